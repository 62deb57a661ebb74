"""What a codec of sums keeps, as sections of a snapshot: `feedback/REPLICA-of-WIDTH/NAME/KEY`.

A run may go on with another number of replicas. What was not sent of a gradient must not be lost then, so
residuals of all replicas are added, and each new one takes an equal part: their sum stays what it was, and
gradients are sums over replicas too. Thresholds are found again; bases are the same on all replicas.
"""

from collections.abc import Mapping

from torch import Tensor

from bireme.runtime.layout import Layout
from bireme.runtime.snapshot import Snapshot
from bireme.sync.feedback import BASIS, RESIDUAL, Feedback

__all__ = ["feedback_sections", "load_feedback"]

FEEDBACK = "feedback"


def feedback_sections(feedback: Feedback | None, num_trained: int, layout: Layout) -> dict[str, Tensor]:
    """What a replica keeps after so many batches, by the names of a snapshot; copied."""
    if feedback is None:
        return {}
    return {
        f"{FEEDBACK}/{layout.replica}-of-{layout.width}/{name}/{key}": value.to("cpu", copy=True).contiguous()
        for name, values in feedback.after(num_trained).items()
        for key, value in values.items()
    }


def load_feedback(feedback: Feedback | None, saved: Snapshot, layout: Layout) -> None:
    """Go on from what was saved, if anything was and a codec takes it."""
    if feedback is None:
        return
    wanted = {name for units in layout.units.values() for unit in units for name in unit.parameters}
    of_width: dict[int, dict[str, dict[str, list[str]]]] = {}
    for key in sorted(saved.tensors):
        section, _, rest = key.partition("/")
        if section != FEEDBACK:
            continue
        place, _, rest = rest.partition("/")
        name, _, what = rest.rpartition("/")
        replica, width = map(int, place.split("-of-"))
        if name in wanted and (width != layout.width or replica == layout.replica):
            of_width.setdefault(width, {}).setdefault(name, {}).setdefault(what, []).append(key)
    found = {
        name: _own(keys, saved.tensors)
        if width == layout.width
        else _shared(keys, saved.tensors, layout.width)
        for width, kept in of_width.items()
        for name, keys in kept.items()
    }
    feedback.load(found, num_batches=saved.num_trained)


def _own(keys: Mapping[str, list[str]], saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a replica has kept of one parameter."""
    return {what: saved[of_what[0]] for what, of_what in keys.items()}


def _shared(keys: Mapping[str, list[str]], saved: Mapping[str, Tensor], among: int) -> dict[str, Tensor]:
    """What each of so many new replicas takes of what all old ones have kept of one parameter."""
    shared = {RESIDUAL: sum((saved[key] for key in keys[RESIDUAL][1:]), saved[keys[RESIDUAL][0]]) / among}
    if BASIS in keys:
        shared[BASIS] = saved[keys[BASIS][0]]
    return shared
