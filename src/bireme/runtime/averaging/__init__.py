"""The engine's side of replicas that average their weights, in groups or by outer steps."""
