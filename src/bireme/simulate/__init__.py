"""The interpreter on a clock: what a program would take, in seconds and in bytes."""

from bireme.simulate.costs import Costs
from bireme.simulate.links import Links
from bireme.simulate.network import Network
from bireme.simulate.simulator import simulate
from bireme.simulate.slicing import solve_slices

__all__ = ["Costs", "Links", "Network", "simulate", "solve_slices"]
