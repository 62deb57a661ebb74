"""The engine's side of replicas that may die: what a rank does so that its replica and the others agree."""
