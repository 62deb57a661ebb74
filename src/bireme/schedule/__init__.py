"""A schedule as data: instructions, the programs made of them, and what can be proved about them."""

from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.checker import CheckReport, check
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Program, Rule, Track
from bireme.schedule.weave import lower

__all__ = [
    "SCHEDULES",
    "CheckReport",
    "Instruction",
    "Kind",
    "Program",
    "Rule",
    "Track",
    "check",
    "generate",
    "lower",
]
