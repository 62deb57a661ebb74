"""Where bytes lie: flat memory with places for named tensors."""
