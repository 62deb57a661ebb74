"""Update rules as data: what a batch runs on, and what is done about the delay.

W(t) is the weights after t updates, g(t) the gradient of batch t, S(W, g) what a step of the optimizer makes
of W, s a stage of d, m the micro-batches of a batch. All rules step W(t+1) = S(W(t), g(t)); they differ in
the weights V(t) that batch t runs on, forward and backward. When stage s begins batch t it has seen
k = m − (d−1−s) micro-batches of batch t−1; the share that it has not seen is τ = (d−1−s) / m.

Error feedback is our reading of arXiv 2606.30634, of which we know the idea and no formula: the step that a
batch gives comes one step late, so what was made in its place was that of the batch before. With u(t) =
S(W(t), g(t)) − W(t) that error is u(t) − u(t−1), and it is paid with the next step:

    W(t+1) = W(t) + u(t) + c·(u(t) − u(t−1))

With c = 1, W(t) is a run of plain steps X(t) with the last one on top once more, X(t) + u(t−1), but for one
step at the start. The batch that runs on W(t−1) runs on X(t−1) + u(t−2): a guess at X(t) that takes the next
step to be like the last. So error feedback is prediction by repeated steps with other weights coming out.
"""

from dataclasses import dataclass
from enum import StrEnum

from bireme.errors import BiremeError, closest

__all__ = ["RULES", "ClipsBy", "Rest", "RunsOn", "UpdateRule", "rule_named"]


class RunsOn(StrEnum):
    """V(t), the weights of a batch."""

    NEWEST = "newest"
    """W(t)."""
    OLDER = "older"
    """W(t−1)."""
    REPEATED = "repeated"
    """W(t−1) + (W(t−1) − W(t−2)): the last step once more."""
    TRIED = "tried"
    """S(W(t−1), ĝ): a trial step by what there is of g(t−1), with the last clipping factor known."""


class Rest(StrEnum):
    """What a trial step takes for the mean gradient of micro-batches that it has not seen."""

    MEAN = "mean"
    """The mean of those it has seen."""
    ZERO = "zero"
    """Nothing: momentum goes on by itself."""
    LAST = "last"
    """The gradient of the batch before, g(t−2), which must be kept; zero until there is one."""


class ClipsBy(StrEnum):
    """The norm by which a stage's gradient is clipped. Except for the first, stages step from the last to the
    first, each before the gradients of the stages before it are there.
    """

    WHOLE = "whole"
    """The norm of the whole gradient, which all stages wait for."""
    OWN = "own"
    """The norm of the stage's own gradient, against its share of the limit: the squares of all stages'
    shares are in proportion to their elements, and add up to the square of the limit."""
    BEFORE = "before"
    """The norm of the batch before. The first stage knows the whole norm."""
    GUESSED = "guessed"
    """The norm of the gradients from this stage to the last, times the whole norm of the batch before over
    that of the same stages; in the first batch the norm of those gradients alone. The first stage knows the
    whole norm."""


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """A rule by its name in results.

    `sees` says that trial steps take the gradients there are; without, they take the rest for all.
    `feedback` is c where a batch runs on older weights, and c/τ on trial ones. `warm_up` is the share of the
    run's batches that are synchronous before the delay begins. With `switches` only the first d micro-batches
    of a batch run on V(t) and the others on W(t): by then all stages have had the last gradient of the batch
    before, and one micro-batch's time to agree on its norm. Where stages run ahead they are more.
    """

    name: str
    runs_on: RunsOn
    sees: bool = False
    rest: Rest = Rest.ZERO
    feedback: float = 0.0
    warm_up: float = 0.0
    switches: bool = False
    clips_by: ClipsBy = ClipsBy.WHOLE

    @property
    def depends_on_stages(self) -> bool:
        """Whether stages of a batch run on weights of different age."""
        return self.runs_on is RunsOn.TRIED and self.sees


RULES = (
    UpdateRule("synchronous", RunsOn.NEWEST),
    UpdateRule("apart", RunsOn.NEWEST, clips_by=ClipsBy.OWN),
    UpdateRule("apart, norm before", RunsOn.NEWEST, clips_by=ClipsBy.BEFORE),
    UpdateRule("apart, guessed", RunsOn.NEWEST, clips_by=ClipsBy.GUESSED),
    UpdateRule("2bw", RunsOn.OLDER),
    UpdateRule("2bw-fresh", RunsOn.TRIED, sees=True, rest=Rest.MEAN),
    UpdateRule("momentum", RunsOn.TRIED),
    UpdateRule("repeat", RunsOn.REPEATED),
    UpdateRule("last-gradient", RunsOn.TRIED, rest=Rest.LAST),
    UpdateRule("2bw+feedback", RunsOn.OLDER, feedback=1.0),
    UpdateRule("2bw+warm-up", RunsOn.OLDER, warm_up=0.2),
    UpdateRule("momentum+warm-up", RunsOn.TRIED, warm_up=0.2),
    UpdateRule("2bw+feedback+warm-up", RunsOn.OLDER, feedback=1.0, warm_up=0.2),
    UpdateRule("fresh-zero", RunsOn.TRIED, sees=True, rest=Rest.ZERO),
    UpdateRule("fresh-last", RunsOn.TRIED, sees=True, rest=Rest.LAST),
    UpdateRule("fresh+feedback", RunsOn.TRIED, sees=True, rest=Rest.MEAN, feedback=1.0),
    UpdateRule("fresh+warm-up", RunsOn.TRIED, sees=True, rest=Rest.MEAN, warm_up=0.2),
    UpdateRule("fresh+short warm-up", RunsOn.TRIED, sees=True, rest=Rest.MEAN, warm_up=0.1),
    UpdateRule("fresh-zero+warm-up", RunsOn.TRIED, sees=True, rest=Rest.ZERO, warm_up=0.2),
    UpdateRule("fresh-last+warm-up", RunsOn.TRIED, sees=True, rest=Rest.LAST, warm_up=0.2),
    UpdateRule("2bw+switch", RunsOn.OLDER, switches=True),
    UpdateRule("momentum+switch", RunsOn.TRIED, switches=True),
    UpdateRule("fresh+switch", RunsOn.TRIED, sees=True, rest=Rest.MEAN, switches=True),
    UpdateRule("fresh+switch+warm-up", RunsOn.TRIED, sees=True, rest=Rest.MEAN, switches=True, warm_up=0.2),
    UpdateRule("fresh-zero+switch", RunsOn.TRIED, sees=True, rest=Rest.ZERO, switches=True),
    UpdateRule("fresh-last+switch", RunsOn.TRIED, sees=True, rest=Rest.LAST, switches=True),
)
"""All that are studied."""


def rule_named(name: str) -> UpdateRule:
    """The rule of that name."""
    found = next((rule for rule in RULES if rule.name == name), None)
    if found is None:
        raise BiremeError(f"There is no update rule {name!r}. {closest(name, [rule.name for rule in RULES])}")
    return found
