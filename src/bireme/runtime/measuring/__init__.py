"""What the engine itself takes, found by running it: the end of a batch, messages, instructions."""
