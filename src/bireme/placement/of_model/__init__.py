"""From a captured model to a workload, and from a placement back to a plan."""
