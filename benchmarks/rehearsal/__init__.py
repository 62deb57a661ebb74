"""Plans rehearsed on emulated devices with real processes and shaped links."""
