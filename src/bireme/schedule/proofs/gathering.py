"""Proofs about shared weights: what a pass uses is whole, and every gradient reaches its owner.

What is proved: weights are gathered once they have been made, used before they are let go, and let go before
their bank is written again and before the window ends; the gradients of every backward are summed over the
replicas before their batch is reduced, and no others.
"""

from collections.abc import Iterator

from bireme.schedule.instruction import COMPUTE, Instruction, Kind
from bireme.schedule.program import Program

__all__ = ["gathering_problems"]


def gathering_problems(program: Program) -> Iterator[str]:
    """What is wrong with the weights that replicas share. Every instruction must be in its place."""
    if program.num_sharers == 1:
        return
    for track in program.tracks:
        proof = _TrackProof(program)
        for step in track:
            yield from proof.step(step)
        for stage, version in sorted(proof.whole):
            yield f"Version {version} of the weights of stage {stage} is still whole when the window ends."


class _TrackProof:
    """The weights and gradients of one rank while its track goes by."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.newest = [program.first_batch] * program.num_stages
        self.whole: dict[tuple[int, int], bool] = {}
        """The stages and versions that are gathered, and whether a pass has used them since."""
        self.unsummed: set[tuple[int, int]] = set()
        """Stages and batches with gradients of this replica alone."""

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
                self.unsummed.discard(gradients)
            case Kind.REDUCE:
                if gradients in self.unsummed:
                    yield f"{step} comes before the gradients of its stage have been summed over replicas."
            case Kind.UPDATE:
                yield from self._update(step)

    def _update(self, step: Instruction) -> Iterator[str]:
        made, banks = step.version or 0, self.program.banks[step.stage]
        self.newest[step.stage] = max(self.newest[step.stage], made)
        for stage, version in self.whole:
            if stage == step.stage and version % banks == made % banks:
                yield f"{step} writes the bank of version {version}, which is still whole."
