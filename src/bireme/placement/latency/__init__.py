"""Placement for the latency of one sample: what it is, how it is searched, how it is proven."""
