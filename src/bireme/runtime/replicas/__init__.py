"""The launcher of replicas that may die: it starts their ranks, and reads the ledger of their run."""
