"""What the checker proves, one file per kind of claim."""
