"""Where a chain of units is cut into stages: exactly, as AutoPipe does it, and as other planners do."""
