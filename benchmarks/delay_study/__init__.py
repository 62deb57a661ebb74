"""What delayed updates cost: the rules simulated exactly, on small GPTs."""
