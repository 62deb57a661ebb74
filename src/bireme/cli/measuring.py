"""How a model is measured, for the verbs that do: their options, and the profile that comes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.model.captures import Captures
    from bireme.profile.profile import Profile

__all__ = [
    "PANEL",
    "DataType",
    "Fresh",
    "Length",
    "Like",
    "MeasureOn",
    "Measuring",
    "Optimizer",
    "captures_of",
    "measure",
]

PANEL = "Measuring"

Length = Annotated[
    int | None,
    typer.Option(help="Tokens in a sequence, where the model leaves that open.", rich_help_panel=PANEL),
]
MeasureOn = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1, or meta to estimate without running.", rich_help_panel=PANEL)
]
Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="NAME|FILE.json",
        help="On meta: the device to estimate for, such as a100.",
        rich_help_panel=PANEL,
    ),
]
DataType = Annotated[
    str, typer.Option("--dtype", help="float32, bfloat16, float16 or float64.", rich_help_panel=PANEL)
]
Optimizer = Annotated[
    str, typer.Option(help="adamw, adam, muon or sgd (with momentum).", rich_help_panel=PANEL)
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Measure again, whatever is in the cache.", rich_help_panel=PANEL)
]


@dataclass(frozen=True, slots=True)
class Measuring:
    """What to measure of a model, at which micro-batch sizes, and where."""

    model: str
    batches: Sequence[int]
    length: int | None = None
    device: str = "cpu"
    like: str | None = None
    dtype: str = "float32"
    optimizer: str = "adamw"
    halves: bool = False
    fresh: bool = False

    def __post_init__(self) -> None:
        if min(self.batches) < 1:
            raise BiremeError(f"The batch is {min(self.batches)}; it must be at least 1.")


def captures_of(asked: Measuring) -> "Captures":
    """The model's graphs, without running it."""
    from bireme.model.captures import Captures
    from bireme.model.sources import load_source

    source = load_source(asked.model, batch=max(asked.batches), length=asked.length, dtype=asked.dtype)
    return Captures(source.model, source.example_inputs, name=asked.model)


def measure(asked: Measuring, progress: Any) -> "Profile":
    """The profile of a model: measured here, or estimated for a device that is elsewhere."""
    from bireme.cluster.device import device_named
    from bireme.model.captures import Captures
    from bireme.model.sources import load_source
    from bireme.model.weight_folder import check_weights
    from bireme.profile.here import torch_device
    from bireme.profile.optimizers import check_optimizer
    from bireme.profile.profiler import profile as run

    check_optimizer(asked.optimizer)
    where = device_named(asked.like or "laptop") if asked.device == "meta" else torch_device(asked.device)
    source = load_source(asked.model, batch=max(asked.batches), length=asked.length, dtype=asked.dtype)
    captures = Captures(source.model, source.example_inputs, name=asked.model)
    if source.folder is not None and any(source.folder.glob("*.safetensors")):
        check_weights(captures.graph(asked.batches[0]), source.folder, model=source.model)
    return run(
        captures.graph,
        where,
        asked.batches,
        examples=source.example_inputs,
        optimizer=asked.optimizer,
        halves=asked.halves,
        use_cache=not asked.fresh,
        progress=progress,
    )
