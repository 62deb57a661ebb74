"""A schedule as data: instructions, the programs made of them, and what can be proved about them."""
