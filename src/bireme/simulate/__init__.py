"""The interpreter on a clock: what a program would take, in seconds and in bytes."""

from bireme.simulate.costs import Costs as Costs
from bireme.simulate.links import Links as Links
from bireme.simulate.simulator import simulate as simulate
