"""What each instruction costs: the numbers that turn a program into a timeline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool, Tag

from bireme.cluster.device import NO_ENGINE, EngineCost, ResourceSeconds, Speeds
from bireme.documents import read_json
from bireme.errors import BiremeError, errors_of
from bireme.schedule.accesses import Sizes
from bireme.schedule.instruction import PAGING, SHARING, Instruction, Kind, Message

_PerStage = float | Sequence[float]
"""One number for every stage, or one for all."""


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What codecs change on a boundary, for one micro-batch: the bytes of its messages, as shares of those
    without, and the seconds to encode and to decode them, on a device of speed 1.
    """

    forward_share: float = 1.0
    backward_share: float = 1.0
    encode_forward_s: float = 0.0
    decode_forward_s: float = 0.0
    encode_backward_s: float = 0.0
    decode_backward_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and bytes per stage, for one micro-batch where that matters.

    `message_bytes[s]` crosses the boundary from stage s to s+1, `gradient_message_bytes[s]` comes back over
    it; where none are given that is as much. `codecs[s]`, where there are any, says what is sent of both.
    `reduce_s` is the gradient sync of a stage with its replicas; `reduce_bytes` is what it moves over the
    network's links besides. Before it sets out, REDUCE keeps the rank busy for `reduce_busy_s`.
    `rank_speed[r]` divides the seconds that rank r computes: 0.5 is half as fast. `update_speed[r]` divides
    those in which it reads and writes its memory, `host_speed[r]` the engine's own; left out, these are the
    `rank_speed`, and 1. Nothing divides the seconds of links. `engine` is what instructions and messages take
    besides. `workspace_bytes` is what a pass of a micro-batch takes and gives back,
    `buffer_bytes` what a stage always keeps besides; of that `frozen_bytes` are weights that do not learn,
    which may be paged. `host_update_s` is an update that the host makes, whatever the speed of the device;
    where none are given, the host is the processor that the device is, and takes as long.
    `tied_gradient_bytes` are those of a stage's gradients that other stages add to, where replicas share
    weights. Where the backward runs in halves, `waiting_bytes` of a micro-batch's gradients wait for the
    second one, and `halves_bytes` are needed beside `workspace_bytes`. Of the bytes of a stage's sum
    `early_share` can cross while its last backward of a batch runs, if that is whole. Of each byte of
    gradients that replicas sum part by part they exchange `part_sum_share`. Empty stands for none. Make one
    with `per_stage`.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    half_forward_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    update_s: tuple[float, ...]
    trial_s: tuple[float, ...]
    reduce_s: tuple[float, ...]
    reduce_bytes: tuple[float, ...]
    message_bytes: tuple[float, ...]
    weight_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    optimizer_bytes: tuple[float, ...]
    stash_bytes: tuple[float, ...]
    input_bytes: tuple[float, ...]
    rank_speed: tuple[float, ...] = ()
    master_weights: bool = False
    reduce_busy_s: tuple[float, ...] = ()
    gradient_message_bytes: tuple[float, ...] = ()
    engine: EngineCost = NO_ENGINE
    workspace_bytes: tuple[float, ...] = ()
    codecs: tuple[CodecCost, ...] = ()
    buffer_bytes: tuple[float, ...] = ()
    frozen_bytes: tuple[float, ...] = ()
    host_update_s: tuple[float, ...] = ()
    tied_gradient_bytes: tuple[float, ...] = ()
    waiting_bytes: tuple[float, ...] = ()
    halves_bytes: tuple[float, ...] = ()
    early_share: tuple[float, ...] = ()
    part_sum_share: float = 1.0
    update_speed: tuple[float, ...] = ()
    host_speed: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            if isinstance(values, bool | float | EngineCost) or field.name == "codecs":
                continue
            is_speed = field.name.endswith("_speed")
            least = "greater than 0" if is_speed else "0 or greater"
            for value in values:
                if not 0 <= value < math.inf or (value == 0 and is_speed):
                    raise BiremeError(f"{field.name} has the value {value}; it must be {least}.")

    @property
    def num_stages(self) -> int:
        """How many stages the costs are for."""
        return len(self.forward_s)

    @staticmethod
    def per_stage(
        num_stages: int,
        *,
        rank_speed: Sequence[float] = (),
        master_weights: bool = False,
        engine: EngineCost = NO_ENGINE,
        **per_stage: _PerStage | None,
    ) -> "Costs":
        """Costs with what is left out, or None, filled in.

        Both parts of a split backward take half of it unless one is given; half a micro-batch takes half
        the forward, recomputing takes the forward, a trial step what an update takes; gradients are as
        large as weights, a stage's input as large as the message that brings it, and as much comes back.
        """
        found = dict.fromkeys(_ZERO_UNLESS_GIVEN, (0.0,) * num_stages)
        for name, value in per_stage.items():
            if value is not None:
                found[name] = _spread(name, value, num_stages)
        forward, backward = found["forward_s"], found["backward_s"]
        inputs, weights = found.get("backward_input_s"), found.get("backward_weight_s")
        if inputs is None:
            inputs = tuple(s / 2 for s in backward) if weights is None else _less(backward, weights)
        derived = {
            "backward_input_s": inputs,
            "backward_weight_s": _less(backward, inputs),
            "half_forward_s": tuple(s / 2 for s in forward),
            "recompute_s": forward,
            "trial_s": found["update_s"],
            "gradient_bytes": found["weight_bytes"],
            "input_bytes": (0.0, *found["message_bytes"][:-1]),
            "gradient_message_bytes": found["message_bytes"],
        }
        others: dict[str, Any] = {**derived, **found}
        for name in _EMPTY_IF_ZERO:
            if not any(others.get(name, ())):
                others[name] = ()
        speeds = tuple(map(float, rank_speed))
        return Costs(rank_speed=speeds, master_weights=master_weights, engine=engine, **others)

    def in_halves(self) -> "Costs":
        """The costs where each backward runs in halves, which together may take longer than a whole one."""
        pairs = zip(self.backward_input_s, self.backward_weight_s, strict=True)
        return replace(self, backward_s=tuple(one + other for one, other in pairs))

    def seconds(
        self, step: Instruction, rank: int, *, takes_bytes: float | None = None, on_host: bool = False
    ) -> float:
        """How long an instruction keeps its rank busy; `takes_bytes` has the message that it uses, if any.
        `on_host` is for an UPDATE that the host makes.

        What a message is under way and a sync with replicas run in parallel to it.
        """
        if step.kind in PAGING or step.kind in SHARING:
            return 0.0  # Posted or waited for; what it moves moves in parallel.
        parts = [ResourceSeconds(host=self.engine.instruction_s), self._work_s(step, on_host=on_host)]
        if takes_bytes is not None:
            parts += [
                self.engine.taking_s(takes_bytes),
                ResourceSeconds(compute=self._coding_s(step, sends=False)),
            ]
        speeds = self._speeds(rank)
        return sum(part.on(speeds) for part in parts)

    def _speeds(self, rank: int) -> Speeds:
        compute = self.rank_speed[rank] if self.rank_speed else 1.0
        return Speeds(
            compute,
            self.update_speed[rank] if self.update_speed else compute,
            self.host_speed[rank] if self.host_speed else 1.0,
        )

    def _work_s(self, step: Instruction, *, on_host: bool) -> ResourceSeconds:
        engine, stage = self.engine, step.stage
        match step.kind:
            case Kind.FORWARD:
                table = self.forward_s if step.half is None else self.half_forward_s
            case Kind.BACKWARD:
                table = self.backward_s
            case Kind.BACKWARD_INPUT:
                table = self.backward_input_s
            case Kind.BACKWARD_WEIGHT:
                table = self.backward_weight_s
            case Kind.RECOMPUTE:
                table = self.recompute_s
            case Kind.UPDATE if on_host and self.host_update_s:
                return ResourceSeconds(host=self.host_update_s[stage] + engine.update_s)
            case Kind.UPDATE:
                return ResourceSeconds(memory=self.update_s[stage], host=engine.update_s)
            case Kind.TRIAL:
                return ResourceSeconds(memory=self.trial_s[stage], host=engine.trial_s)
            case Kind.REDUCE:
                busy_s = self.reduce_busy_s[stage] if self.reduce_busy_s else 0.0
                return ResourceSeconds(memory=busy_s, host=engine.reduce_s + engine.batch_s)
            case Kind.AVERAGE_START | Kind.AVERAGE_END:
                return ResourceSeconds()
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                sending = engine.sending_s(self.boundary_bytes(step))
                return replace(sending, compute=self._coding_s(step, sends=True))
            case _:
                return ResourceSeconds(host=engine.receive_s)
        return ResourceSeconds(compute=table[stage])

    def boundary_bytes(self, step: Instruction) -> float:
        """The bytes a send moves."""
        return self.message_of(step.carries())

    def message_of(self, message: Message) -> float:
        """The bytes that cross a boundary for a micro-batch, or for half of one."""
        boundary = min(message.from_stage, message.to_stage)
        table = self.forward_bytes if message.forward else self.backward_bytes
        return table[boundary] * (1.0 if message.half is None else 0.5)

    @property
    def forward_bytes(self) -> tuple[float, ...]:
        """What crosses each boundary forward for a micro-batch, as it is sent."""
        return tuple(num * self._codec(place).forward_share for place, num in enumerate(self.message_bytes))

    @property
    def backward_bytes(self) -> tuple[float, ...]:
        """What comes back over each boundary for a micro-batch, as it is sent."""
        back = self.gradient_message_bytes or self.message_bytes
        return tuple(num * self._codec(place).backward_share for place, num in enumerate(back))

    @property
    def part_gradient_bytes(self) -> tuple[float, ...]:
        """The gradients of each stage that replicas sum in parts, where they share weights."""
        tied = self.tied_gradient_bytes or (0.0,) * self.num_stages
        return tuple(whole - one for whole, one in zip(self.gradient_bytes, tied, strict=True))

    def _codec(self, boundary: int) -> CodecCost:
        return self.codecs[boundary] if boundary < len(self.codecs) else AS_IT_IS

    def _coding_s(self, step: Instruction, *, sends: bool) -> float:
        """For how long a rank is busy to encode what it sends, or to decode the message that it uses."""
        forward = step.kind in (Kind.SEND_FORWARD, Kind.FORWARD)
        codec = self._codec(step.stage if forward is sends else step.stage - 1)
        work, way = "encode" if sends else "decode", "forward" if forward else "backward"
        whole_s: float = getattr(codec, f"{work}_{way}_s")
        return whole_s * (1.0 if step.half is None else 0.5)

    def sizes(self) -> Sizes:
        """What each stage keeps, for the account of memory."""
        return Sizes(
            version=self.weight_bytes,
            gradient=self.gradient_bytes,
            optimizer=self.optimizer_bytes,
            stash=self.stash_bytes,
            inputs=self.input_bytes,
            activation=(0.0, *self.forward_bytes[:-1]),
            gradient_message=self.backward_bytes,
            master=self.master_weights,
            workspace=self.workspace_bytes,
            buffers=self.buffer_bytes,
            frozen=self.frozen_bytes,
            tied_gradient=self.tied_gradient_bytes,
            waiting=self.waiting_bytes,
            halves=self.halves_bytes,
        )


AS_IT_IS = CodecCost()

_ZERO_UNLESS_GIVEN = (
    "update_s",
    "reduce_s",
    "reduce_busy_s",
    "reduce_bytes",
    "message_bytes",
    "weight_bytes",
    "optimizer_bytes",
    "stash_bytes",
    "workspace_bytes",
    "buffer_bytes",
)

_EMPTY_IF_ZERO = ("frozen_bytes", "waiting_bytes", "halves_bytes")


def _spread(name: str, value: _PerStage, num_stages: int) -> tuple[float, ...]:
    values = (float(value),) * num_stages if isinstance(value, int | float) else tuple(map(float, value))
    if len(values) != num_stages:
        raise BiremeError(
            f"{name} has {len(values)} values for {num_stages} stages; give one each, or one for all."
        )
    return values


def _less(whole: tuple[float, ...], part: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(max(one - other, 0.0) for one, other in zip(whole, part, strict=True))


# `costs.json`: what each instruction costs, as a file. One number stands for all stages, a list for each.

_NotNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False, strict=True)]
_Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False, strict=True)]


def _form(value: Any) -> str:
    return "<each>" if isinstance(value, list | tuple) else "<all>"


def _derived(meaning: str) -> Any:
    return Field(None, description=meaning)


_StageValue = Annotated[
    Annotated[_NotNegative, Tag("<all>")] | Annotated[list[_NotNegative], Tag("<each>")], Discriminator(_form)
]


class CostsFile(BaseModel):
    """Seconds and bytes per stage; what is left out is derived from the rest (see `Costs.per_stage`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    forward_s: _StageValue = Field(description="seconds of a micro-batch's forward, per stage")
    backward_s: _StageValue = Field(description="seconds of a micro-batch's backward, per stage")
    backward_input_s: _StageValue | None = _derived("the part of it that gives the input's gradient")
    backward_weight_s: _StageValue | None = _derived("the part that gives the weights' gradient")
    half_forward_s: _StageValue | None = _derived("seconds of half a micro-batch's forward")
    recompute_s: _StageValue | None = _derived("seconds to run a forward again")
    update_s: _StageValue = Field(0.0, description="seconds of an optimizer step")
    host_update_s: _StageValue | None = _derived(
        "seconds of an optimizer step that the host makes, where chunks lie there"
    )
    trial_s: _StageValue | None = _derived("seconds of a trial step")
    reduce_s: _StageValue = Field(0.0, description="seconds of a batch's gradient sync between replicas")
    message_bytes: _StageValue = Field(0.0, description="bytes sent after each stage, in each direction")
    gradient_message_bytes: _StageValue | None = _derived(
        "bytes of the gradients that come back, where they are not as many"
    )
    weight_bytes: _StageValue = Field(0.0, description="bytes of one weight version")
    gradient_bytes: _StageValue | None = _derived("bytes of one batch's gradient")
    optimizer_bytes: _StageValue = Field(0.0, description="bytes of the optimizer's state")
    stash_bytes: _StageValue = Field(0.0, description="bytes kept of a micro-batch until its backward")
    input_bytes: _StageValue | None = _derived("bytes of a micro-batch's input to the stage")
    master_weights: StrictBool = Field(
        default=False, description="whether the optimizer holds weights of its own"
    )
    rank_speed: list[_Positive] = Field(default_factory=list, description="speed of each rank; 1 is as given")

    def costs(self, num_stages: int) -> Costs:
        """The costs of so many stages."""
        return Costs.per_stage(num_stages, **self.model_dump(exclude={"format"}))


def load_costs(path: Path, num_stages: int) -> Costs:
    """The costs in a file, which must fit so many stages."""
    file = read_json(path, CostsFile)
    with errors_of(path):
        return file.costs(num_stages)
