"""The connection between two processes of a run: frames, who may connect, and waiting for both."""
