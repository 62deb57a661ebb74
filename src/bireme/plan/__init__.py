"""Which device does what: plans, and the search for the best."""
