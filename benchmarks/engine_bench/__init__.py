"""The benchmark of the engine: emulated devices, a small GPT, two replicas, and torch's runtime as a peer."""
