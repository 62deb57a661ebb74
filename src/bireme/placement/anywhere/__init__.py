"""Placements whose devices need not be contiguous: annealing, and what is proven about it."""
