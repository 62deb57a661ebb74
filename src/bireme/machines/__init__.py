"""The machines of a run: the key of each, who is admitted, and what keeps one from taking part."""
