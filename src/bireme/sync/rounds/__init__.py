"""Rounds of sums among the same ranks of replicas that may die: their lines, groups and contributions."""
