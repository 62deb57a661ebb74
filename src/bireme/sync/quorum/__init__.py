"""How replicas that may die agree on the gradients of a batch: lines, the sum over members, its rounds."""
