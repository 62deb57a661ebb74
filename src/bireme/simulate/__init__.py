"""The interpreter on a clock: what a program would take, in seconds and in bytes."""

from bireme.simulate.comparison import solve_slices
from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.network import Network
from bireme.simulate.simulator import simulate

__all__ = ["Costs", "Links", "Network", "simulate", "solve_slices"]
