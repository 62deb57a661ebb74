"""Second copies of the state of a run, in the memory of other processes and other machines."""
