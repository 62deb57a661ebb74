"""The search for the fastest plan that fits: shapes, mappings onto devices, cuts, the plan evaluator."""
