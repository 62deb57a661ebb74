"""A run over the machines of a home: unequal, slowly linked, and not always there."""
