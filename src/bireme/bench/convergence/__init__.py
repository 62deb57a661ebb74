"""What updating late costs in loss: the rules simulated in one process, and a study over them."""
