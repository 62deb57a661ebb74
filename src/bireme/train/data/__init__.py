"""The data of a training run: from files or a function of the user to batches in an order."""
