"""How ranks agree: collectives over a group of them, and the end of a batch."""
