"""Plans for one device in each replica that runs the model in parts, each of which runs its forward again.

The device then holds the inputs of all parts and the activations of one, as with frameworks that checkpoint
layer by layer. The last part keeps its activations: its backward follows its forward.
"""

from dataclasses import replace
from itertools import pairwise

from bireme.plan.program_plan import even_cuts
from bireme.plan.search.draft import Draft, Grid
from bireme.plan.search.explorers import Explorer
from bireme.plan.search.mapping import promising_grids
from bireme.plan.search.shapes import Outline

NUMBERS_OF_PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Each part more but the last runs its forward again, so the fewest parts that fit are the fastest."""


class InPartsExplorer(Explorer):
    """Goes through plans in parts."""

    def explore(self, outlines: list[Outline]) -> None:
        """Evaluate plans in parts for all shapes of one device in each replica."""
        before = self._ledger.num_evaluated
        for outline in outlines:
            if outline.schedule == "sequential" and outline.num_ranks == 1:
                for grid in promising_grids(self._problem, outline):
                    self._explore_grid(outline, grid)
        self.how = f"{self._ledger.num_evaluated - before:,} plans in parts simulated"

    def _explore_grid(self, outline: Outline, grid: Grid) -> None:
        bounds = self._problem.bounds
        kept = self._problem.whole(max(outline.sizes)).bytes.kept
        work = [float(kept[one, other]) for one, other in pairwise(bounds)]
        for count in NUMBERS_OF_PARTS:
            if count > len(work) or not self._ledger.could_win(outline, self._outlines.least_s(outline)):
                return
            cuts = tuple(bounds[cut] for cut in even_cuts(work, count))
            parts = replace(outline, stages_per_rank=count)
            if self._ledger.evaluated(Draft(parts, grid, cuts, tuple(range(count - 1)))).fits:
                return
