"""The engine: programs interpreted on torch.distributed."""
