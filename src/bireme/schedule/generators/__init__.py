"""One file per schedule: a picture of it, and the pure function that makes its order."""
