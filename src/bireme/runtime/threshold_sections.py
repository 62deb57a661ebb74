"""The thresholds of a rank's codecs as sections of a snapshot: `threshold/REPLICA-of-WIDTH/NAME/CODEC`.

A run that goes on with as many replicas takes them up again. With another number of replicas they are found
anew, by the first message of each tensor.
"""

from torch import Tensor

from bireme.codec.above import Thresholds
from bireme.runtime.layout import Layout
from bireme.runtime.snapshot import Snapshot

__all__ = ["load_thresholds", "threshold_sections"]


def threshold_sections(thresholds: Thresholds, num_trained: int, layout: Layout) -> dict[str, Tensor]:
    """What the batch after so many takes from earlier ones, by the names of a snapshot."""
    found = thresholds.after(num_trained)
    return {f"{_section(layout)}{name}": value.to("cpu", copy=True) for name, value in found.items()}


def load_thresholds(thresholds: Thresholds, saved: Snapshot, layout: Layout) -> None:
    """Go on from what was saved."""
    section = _section(layout)
    found = {
        key.removeprefix(section): saved.tensors[key] for key in saved.tensors if key.startswith(section)
    }
    thresholds.load(found, saved.num_trained)


def _section(layout: Layout) -> str:
    return f"threshold/{layout.replica}-of-{layout.width}/"
