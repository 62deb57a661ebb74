"""The coordinator: who is a member, which samples each replica trains, and which rounds count.

It handles integers and never tensors. Everything here is a pure function of a state, an event and the time:
no clock, no socket, no torch. The server and the client around it are in `bireme.runtime`.
"""
