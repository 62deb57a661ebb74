"""Options of the verbs that measure a model, and the profile that they produce."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bireme.codec.sum_description import DENSE, SumCodec
from bireme.errors import BiremeError
from bireme.model.part import ALL_LINEAR, WHOLE, LoraPart, TrainedPart

if TYPE_CHECKING:
    from bireme.model.capture import Captures
    from bireme.model.sources import ModelSource
    from bireme.profile.profile import Profile


PANEL = "Measuring"

Length = Annotated[
    int | None,
    typer.Option(help="Tokens per sequence, if the model does not fix it.", rich_help_panel=PANEL),
]
MeasureOn = Annotated[
    str,
    typer.Option(help="Device: cpu, cuda, cuda:1; meta estimates without running.", rich_help_panel=PANEL),
]
Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="NAME|FILE.json",
        help="Device to estimate for on meta, such as a100.",
        rich_help_panel=PANEL,
    ),
]
DataType = Annotated[
    str,
    typer.Option(
        "--dtype", help="Number format: float32, bfloat16, float16 or float64.", rich_help_panel=PANEL
    ),
]
Optimizer = Annotated[
    str, typer.Option(help="Optimizer: adamw, adam, muon or sgd (with momentum).", rich_help_panel=PANEL)
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Measure again, ignoring the cache.", rich_help_panel=PANEL)
]
Train = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Parameters that learn; all others are frozen. Repeat it.",
        rich_help_panel=PANEL,
    ),
]
Freeze = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Parameters that do not learn. Repeat it.", rich_help_panel=PANEL),
]
LoraRank = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="RANK",
        help="Train a LoRA adapter of this rank and freeze the model.",
        rich_help_panel=PANEL,
    ),
]
LoraTarget = Annotated[
    list[str] | None,
    typer.Option(
        "--lora-target",
        metavar="NAME",
        help="Modules that get an adapter. Repeat it.",
        show_default=ALL_LINEAR,
        rich_help_panel=PANEL,
    ),
]


def part_of(
    train: list[str] | None, freeze: list[str] | None, lora_rank: int | None, lora_target: list[str] | None
) -> TrainedPart:
    """Which part of the model learns, as the options say it."""
    asked = {"--train": train, "--freeze": freeze, "--lora-rank": lora_rank}
    given = [name for name, value in asked.items() if value]
    if len(given) > 1:
        raise BiremeError(f"{given[0]} and {given[1]} both say what learns. Leave out one of the two.")
    if lora_target and lora_rank is None:
        raise BiremeError("--lora-target names modules for an adapter. Give its rank with --lora-rank.")
    lora = None if lora_rank is None else LoraPart(lora_rank, targets=tuple(lora_target or (ALL_LINEAR,)))
    return TrainedPart(tuple(train) if train else None, tuple(freeze) if freeze else None, lora)


@dataclass(frozen=True, slots=True)
class Measuring:
    """What to measure: the model, the micro-batch sizes and the device."""

    model: str
    batches: Sequence[int]
    length: int | None = None
    device: str = "cpu"
    like: str | None = None
    dtype: str = "float32"
    optimizer: str = "adamw"
    halves: bool = False
    fresh: bool = False
    part: TrainedPart = WHOLE
    codecs: Sequence[str] = ()
    """Of boundaries: how long they take is measured too."""
    sums: SumCodec = DENSE
    """The codec of sums over replicas, likewise."""

    def __post_init__(self) -> None:
        if min(self.batches) < 1:
            raise BiremeError(f"The batch is {min(self.batches)}; it must be at least 1.")


def captures_of(asked: Measuring) -> "Captures":
    """The model's graphs, without running it."""
    from bireme.model.capture import Captures

    source = _source_of(asked)
    return Captures(source.model, source.example_inputs, name=asked.model)


def _source_of(asked: Measuring) -> "ModelSource":
    from bireme.model.sources import load_source

    size = max(asked.batches)
    return load_source(asked.model, batch=size, length=asked.length, dtype=asked.dtype, part=asked.part)


def measure(asked: Measuring, progress: Any) -> "Profile":
    """The profile of a model: measured here, or estimated for a device elsewhere."""
    from bireme.cluster.device import device_named
    from bireme.model.capture import Captures
    from bireme.model.weights import check_weights
    from bireme.profile.control import torch_device
    from bireme.profile.optimizers import check_optimizer
    from bireme.profile.profiler import profile as run

    check_optimizer(asked.optimizer)
    where = device_named(asked.like or "laptop") if asked.device == "meta" else torch_device(asked.device)
    source = _source_of(asked)
    captures = Captures(source.model, source.example_inputs, name=asked.model)
    if source.folder is not None and any(source.folder.glob("*.safetensors")):
        graph = captures.graph(asked.batches[0])
        check_weights(source.base_graph(graph), source.folder, model=source.base)
    found = run(
        captures.graph,
        where,
        asked.batches,
        examples=source.example_inputs,
        optimizer=asked.optimizer,
        halves=asked.halves,
        use_cache=not asked.fresh,
        progress=progress,
    )
    if not found.is_measured or (not asked.codecs and asked.sums == DENSE):
        return found
    from bireme.profile.codec_timing import with_codec_rates

    value_bytes = 2 if asked.dtype in ("bfloat16", "float16") else 4
    return with_codec_rates(
        found,
        asked.codecs,
        value_bytes,
        torch_device(asked.device),
        sums=asked.sums,
        use_cache=not asked.fresh,
    )
