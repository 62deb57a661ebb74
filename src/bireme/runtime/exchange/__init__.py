"""How replicas exchange what they learn: rounds of sums among the same ranks of all of them."""
