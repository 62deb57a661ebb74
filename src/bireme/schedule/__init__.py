"""A schedule as data: instructions, the programs made of them, and what can be proved about them."""

from bireme.schedule.catalogue import SCHEDULES as SCHEDULES
from bireme.schedule.catalogue import generate as generate
from bireme.schedule.checker import CheckReport as CheckReport
from bireme.schedule.checker import check as check
from bireme.schedule.instruction import Instruction as Instruction
from bireme.schedule.instruction import Kind as Kind
from bireme.schedule.program import Program as Program
from bireme.schedule.program import Rule as Rule
from bireme.schedule.program import Track as Track
from bireme.schedule.weave import lower as lower
