"""Simple ways to place, to begin others with and to compare them with."""
