"""Models, graphs and machines made up from arithmetic, for benchmarks and tests of plans."""
