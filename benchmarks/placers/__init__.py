"""Simple ways to place operators, which the searches of Bireme are compared with."""
