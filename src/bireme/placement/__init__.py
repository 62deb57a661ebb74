"""Which device runs which operator: exact and heuristic placement of a graph that need not be a chain.

After Tarnawski, Phanishayee, Devanur, Mahajan and Nina Paravecino, "Efficient Algorithms for Device Placement
of DNN Graph Operators" (NeurIPS 2020), and in their file format.
"""
