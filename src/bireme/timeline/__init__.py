"""What happened, or would happen: the noun both interpreters of a program make."""
