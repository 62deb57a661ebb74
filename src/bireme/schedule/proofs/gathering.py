"""Proofs about shared weights: what a pass uses is whole, and every gradient reaches its owner.

What is proved: weights are gathered once they have been made, used before they are let go, and let go before
their bank is written again and before the window ends; the gradients of every backward are summed over the
replicas before their batch is reduced, and no others; nothing is added to them while that is under way, which
ends before the last REDUCE of the batch on the rank; and a rank sums those of one stage at a time.
"""

from collections import Counter
from collections.abc import Iterator

from bireme.schedule.instruction import COMPUTE, Instruction, Kind
from bireme.schedule.program import Program

__all__ = ["gathering_problems"]


def gathering_problems(program: Program) -> Iterator[str]:
    """What is wrong with the weights that replicas share. Every instruction must be in its place."""
    if program.num_sharers == 1:
        return
    for rank, track in enumerate(program.tracks):
        proof = _TrackProof(program, len(program.stages_of(rank)))
        for step in track:
            yield from proof.step(step)
        for stage, version in sorted(proof.whole):
            yield f"Version {version} of the weights of stage {stage} is still whole when the window ends."
        if proof.under_way is not None:
            yield f"The sums of stage {proof.under_way[0]} are still under way when the window ends."


class _TrackProof:
    """The weights and gradients of one rank while its track goes by."""

    def __init__(self, program: Program, num_stages: int) -> None:
        self.program = program
        self.num_stages = num_stages
        self.num_reduced: Counter[int] = Counter()
        self.newest = [program.first_batch] * program.num_stages
        self.whole: dict[tuple[int, int], bool] = {}
        """The stages and versions that are gathered, and whether a pass has used them since."""
        self.unsummed: set[tuple[int, int]] = set()
        """Stages and batches with gradients of this replica alone."""
        self.under_way: tuple[int, int] | None = None
        """The stage and batch whose gradients are being summed."""

    def step(self, step: Instruction) -> Iterator[str]:
        """Take one instruction in; say what is wrong with it."""
        weights = step.stage, step.version or 0
        gradients = step.stage, step.batch
        if step.kind in COMPUTE:
            if weights in self.whole:
                self.whole[weights] = True
            else:
                yield f"{step} comes before its weights have been gathered."
            if step.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                self.unsummed.add(gradients)
                if gradients == self.under_way:
                    yield f"{step} adds to gradients that are being summed over replicas."
            return
        match step.kind:
            case Kind.GATHER:
                if weights[1] > self.newest[step.stage]:
                    yield f"{step} comes before that version has been made."
                if weights in self.whole:
                    yield f"{step} gathers what is whole already."
                self.whole.setdefault(weights, False)
            case Kind.RELEASE:
                if not self.whole.pop(weights, False):
                    yield f"{step} lets go what is not whole, or what no pass has used."
            case Kind.SCATTER:
                if gradients not in self.unsummed:
                    yield f"{step} finds no gradient that is not summed yet."
                if self.under_way is not None:
                    yield f"{step} comes while the sums of stage {self.under_way[0]} are under way."
                self.unsummed.discard(gradients)
                self.under_way = gradients
            case Kind.COLLECT:
                if gradients != self.under_way:
                    yield f"{step} waits for sums that are not under way."
                self.under_way = None
            case Kind.REDUCE:
                yield from self._reduce(step)
            case Kind.UPDATE:
                yield from self._update(step)

    def _reduce(self, step: Instruction) -> Iterator[str]:
        gradients = step.stage, step.batch
        self.num_reduced[step.batch] += 1
        is_last = self.num_reduced[step.batch] == self.num_stages
        if gradients in self.unsummed or (is_last and self.under_way and self.under_way[1] == step.batch):
            yield f"{step} comes before the gradients of its stages have been summed over replicas."

    def _update(self, step: Instruction) -> Iterator[str]:
        made, banks = step.version or 0, self.program.banks[step.stage]
        self.newest[step.stage] = max(self.newest[step.stage], made)
        for stage, version in self.whole:
            if stage == step.stage and version % banks == made % banks:
                yield f"{step} writes the bank of version {version}, which is still whole."
