"""A snapshot: what one rank holds between two batches, by the model's own names, so that others can go on.

It is taken while other batches are under way: a stage's weights change at its updates only. A name begins
with a section: `weights/` the newest, in the precision that is stepped; `before/` those one update older,
which the next batch runs on under delayed updates; `trial/REPLICA/STAGE/` those that a stage has made up for
the next batch under fresh ones, each for itself; `optimizer/NAME/KEY`; `buffers/`;
`principal/AGE/NAME/PART` what the gradients of the next batches go on from, where they are kept so. What
replicas have pieces of, each saves its own.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from bireme.codec.above import Thresholds
from bireme.errors import BiremeError
from bireme.runtime.banks import WeightBanks
from bireme.runtime.layout import Layout
from bireme.runtime.shared_weights import SharedWeights
from bireme.runtime.stage import Stage
from bireme.sync.feedback import BASIS, RESIDUAL, Feedback


class NamedTensors(Mapping[str, Tensor]):
    """Tensors of which the `names` are known; each is made when it is asked for."""

    names: Collection[str]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names


# Pieces in snapshots: what replicas that share an optimizer each save of it, and whole tensors made of them.
#
# The name of a piece is `piece/BEGIN/SHAPE/` and the name of what it is a piece of, as
# `piece/4096/128x64/optimizer/NAME/KEY`: its elements from that one on, of a tensor of that shape.

_PIECE = "piece"


def piece_name(begin: int, shape: Iterable[int], name: str) -> str:
    """The name of a piece of a tensor of that name and shape."""
    return f"{_PIECE}/{begin}/{'x'.join(map(str, shape))}/{name}"


def joined(saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Saved tensors with those whole of which there are pieces."""
    pieces: dict[str, dict[int, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for key in saved:
        if not key.startswith(f"{_PIECE}/"):
            continue
        _, begin, shape, name = key.split("/", 3)
        pieces.setdefault(name, {})[int(begin)] = key
        shapes[name] = tuple(map(int, filter(None, shape.split("x"))))
    whole = (name for name in saved if not name.startswith(f"{_PIECE}/"))
    return _Joined(saved, pieces, shapes, dict.fromkeys([*whole, *pieces])) if pieces else saved


@dataclass(frozen=True, slots=True, eq=False)
class _Joined(NamedTensors):
    """Reads the pieces of a tensor when it is asked for."""

    saved: Mapping[str, Tensor]
    pieces: Mapping[str, Mapping[int, str]]
    shapes: Mapping[str, tuple[int, ...]]
    names: Collection[str]

    def __getitem__(self, name: str) -> Tensor:
        own = self.pieces.get(name)
        if own is None:
            return self.saved[name]
        shape = self.shapes[name]
        flat: Tensor | None = None
        end = 0
        for begin in sorted(own):
            piece = self.saved[own[begin]]
            if begin != end:
                break
            if flat is None:
                flat = torch.empty(prod(shape), dtype=piece.dtype)
            end = begin + len(piece)
            flat[begin:end] = piece
        if flat is None or end != len(flat):
            raise BiremeError(
                f"Of {name} there are only {end} of {prod(shape)} elements, without gaps. The file of a "
                "replica is missing: restore it."
            )
        return flat.view(shape)


BEFORE, _BUFFERS, OPTIMIZER, TRIAL, _WEIGHTS = "before", "buffers", "optimizer", "trial", "weights"
_PRINCIPAL = "principal"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies on the CPU of one rank's share of the state, after `num_trained` batches.

    Every name is in the snapshot of one rank. `clip_scale` is the last known factor of clipping, which trial
    steps take. `shares` is all that decides about the shares of batches to come, where they follow speeds.
    """

    num_trained: int
    clip_scale: float
    tensors: Mapping[str, Tensor]
    shares: Mapping[str, Any] | None = None


def own_sections(
    stage: Stage, names: Iterable[str], *, replica: int, pieces_of: Collection[str] | None = None
) -> dict[str, Tensor]:
    """What this rank has of a stage of the parameters and buffers named, and all of its trial version;
    copied. No other rank takes part.

    Of what no replica has whole there are this replica's pieces: of the parameters in `pieces_of`, by names
    that tell where they belong; or as they are, for the same rank of another pipeline, if that is None.
    """
    banks, wanted = stage.banks, set(names)
    found: dict[str, Tensor] = {}
    pieces: dict[str, dict[str, Tensor]] = {}  # of what may be in pieces, by parameter
    other = f"{TRIAL}/{replica}/{stage.index}" if banks.is_fresh else BEFORE
    for section, before in ((_WEIGHTS, False), (other, True)):
        held, is_trial = banks.held(before=before), before and banks.is_fresh
        found |= {f"{section}/{name}": one for name, one in held.whole.items() if is_trial or name in wanted}
        for name, one in held.pieces.items():
            pieces.setdefault(name, {})[f"{section}/{name}"] = one
    for name, state in _optimizer_sections(banks):
        pieces.setdefault(name, {}).update(state)
    for name, own in pieces.items():
        if banks.shared is None or pieces_of is None:
            found |= own if name in wanted else {}
        elif name in pieces_of:
            found |= _named_pieces(banks.shared, name, own)
    buffers = stage.settled_buffers()
    found |= {f"{_BUFFERS}/{name}": tensor for name, tensor in buffers.items() if name in wanted}
    principal = banks.gradients.principal
    if principal is not None:
        found |= {
            f"{_PRINCIPAL}/{key}": tensor
            for key, tensor in principal.state(banks.newest_version).items()
            if _name_in(key) in wanted
        }
    return {name: banks.read(one).to("cpu", copy=True).contiguous() for name, one in found.items()}


def _optimizer_sections(banks: WeightBanks) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each parameter with what the optimizer remembers of it. A number becomes a tensor without axes."""
    for name, state in banks.optimizer_state().items():
        yield (
            name,
            {
                f"{OPTIMIZER}/{name}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
                for key, value in state.items()
                if value is not None
            },
        )


def _named_pieces(shared: SharedWeights, name: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this replica has of a parameter; the owner of its first element has what is there once for all."""
    part, shape = shared.part_of[name], shared.shapes[name]
    piece = part.pieces[name]
    found: dict[str, Tensor] = {}
    for key, value in own.items():
        if value.ndim and value.shape == part.own.slots[name].shape:
            found[piece_name(piece.start, shape, key)] = value.reshape(-1)
        elif piece.start == 0:
            found[key] = value
    return found


def load_stage(stage: Stage, saved: Mapping[str, Tensor], *, version: int, replica: int) -> None:
    """Restore a stage from saved tensors, after `version` updates.

    Weights that are trained and buffers that are written must be among them; of the others, what was not
    saved stays as the stage has it. What was saved of another rule, or not at all, begins equal to the newest
    weights.
    """
    banks = stage.banks
    saved = joined(saved)
    # Of what replicas share, there may be this one's pieces alone.
    trained = {name for name in banks.trainable if banks.shared is None or name in banks.shared.part_of}
    newest = {
        name: saved[key] for name in banks.names if (key := f"{_WEIGHTS}/{name}") in saved or name in trained
    }
    section = f"{TRIAL}/{replica}/{stage.index}" if banks.is_fresh else BEFORE
    others = {name: saved.get(f"{section}/{name}", newest[name]) for name in newest}
    number = version if banks.is_fresh else version - 1
    has_trial = any(key.startswith(f"{section}/") for key in saved)
    older = {number: others} if has_trial or not banks.is_fresh else {}
    banks.load(newest, _optimizer_state(banks, saved), version=version, older=older)
    principal = banks.gradients.principal
    if principal is not None:
        keys = (key.partition("/") for key in saved)
        of_section = [rest for section, _, rest in keys if section == _PRINCIPAL]
        own = {key: saved[f"{_PRINCIPAL}/{key}"] for key in of_section if _name_in(key) in principal.shapes}
        principal.load(own, num_updates=version)
    for name, buffer in stage.buffers.items():
        if (key := f"{_BUFFERS}/{name}") in saved or name in stage.function.writes:
            buffer.copy_(saved[key])


def _optimizer_state(banks: WeightBanks, saved: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """The states of a stage's parameters, as they are in saved tensors; of pieces, where it has pieces."""
    wanted = set(banks.names)
    states: dict[str, dict[str, Any]] = {}
    for key in saved:
        section, _, rest = key.partition("/")
        name, _, what = rest.rpartition("/")
        if section == OPTIMIZER and name in wanted:
            value = saved[key]
            if banks.shared is None:
                states.setdefault(name, {})[what] = value
            elif name in banks.shared.part_of:
                states.setdefault(name, {})[what] = banks.shared.piece_of_state(name, what, value)
    return states


def _name_in(key: str) -> str:
    """The parameter that a part of its components is saved for, as AGE/NAME/PART."""
    return key.partition("/")[2].rpartition("/")[0]


# What a codec of sums keeps, as sections of a snapshot: `feedback/REPLICA-of-WIDTH/NAME/KEY`, by the
# replicas of the stage.
#
# A run may go on with another number of replicas. What was not sent of a gradient must not be lost then, so
# residuals of all replicas are added, and each new one takes an equal part: their sum stays what it was, and
# gradients are sums over replicas too. Thresholds are found again; bases are the same on all replicas. If
# several ranks of a replica send the gradient of a tied parameter, NAME has the rank too, but for the owner.

_FEEDBACK = "feedback"


def feedback_sections(feedback: Feedback | None, num_trained: int, layout: Layout) -> dict[str, Tensor]:
    """What a rank keeps after so many batches, by the names of a snapshot; copied."""
    if feedback is None:
        return {}
    section = f"{_FEEDBACK}/{layout.member}-of-{len(layout.peers)}"
    return {
        f"{section}/{_kept_name(name, layout)}/{key}": value.to("cpu", copy=True).contiguous()
        for name, values in feedback.after(num_trained).items()
        for key, value in values.items()
    }


def _kept_name(name: str, layout: Layout) -> str:
    own = layout.first_rank
    owner = layout.owners.get(name, own)
    return name if owner == own else f"{name}@{own}"


def load_feedback(feedback: Feedback | None, saved: Snapshot, layout: Layout) -> None:
    """Go on from what was saved, if anything was and a codec takes it."""
    if feedback is None:
        return
    wanted = {
        _kept_name(name, layout): name
        for units in layout.units.values()
        for unit in units
        for name in unit.parameters
    }
    own_width = len(layout.peers)
    of_width: dict[int, dict[str, dict[str, list[str]]]] = {}
    for key in sorted(saved.tensors):
        section, _, rest = key.partition("/")
        if section != _FEEDBACK:
            continue
        place, _, rest = rest.partition("/")
        name, _, what = rest.rpartition("/")
        replica, width = map(int, place.split("-of-"))
        if name in wanted and (width != own_width or replica == layout.member):
            of_width.setdefault(width, {}).setdefault(wanted[name], {}).setdefault(what, []).append(key)
    found = {
        name: _own(keys, saved.tensors) if width == own_width else _shared(keys, saved.tensors, own_width)
        for width, kept in of_width.items()
        for name, keys in kept.items()
    }
    feedback.load(found, num_batches=saved.num_trained)


def _own(keys: Mapping[str, list[str]], saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a replica has kept of one parameter."""
    return {what: saved[of_what[0]] for what, of_what in keys.items()}


def _shared(keys: Mapping[str, list[str]], saved: Mapping[str, Tensor], among: int) -> dict[str, Tensor]:
    """What each of so many new replicas takes of what all old ones have kept of one parameter; nothing of
    other pieces.
    """
    residuals = [saved[key] for key in keys[RESIDUAL]]
    if len({one.shape for one in residuals}) > 1:
        return {}
    shared = {RESIDUAL: sum(residuals[1:], residuals[0]) / among}
    if BASIS in keys:
        shared[BASIS] = saved[keys[BASIS][0]]
    return shared


# The thresholds of a rank's codecs as sections of a snapshot: `threshold/REPLICA-of-WIDTH/NAME/CODEC`, by the
# replicas of the stage.
#
# A run that goes on with as many replicas takes them up again. With another number of replicas they are found
# anew, by the first message of each tensor.


def threshold_sections(thresholds: Thresholds, num_trained: int, layout: Layout) -> dict[str, Tensor]:
    """What the batch after so many takes from earlier ones, by the names of a snapshot."""
    found = thresholds.after(num_trained)
    return {
        f"{_threshold_section(layout)}{name}": value.to("cpu", copy=True) for name, value in found.items()
    }


def load_thresholds(thresholds: Thresholds, saved: Snapshot, layout: Layout) -> None:
    """Go on from what was saved."""
    section = _threshold_section(layout)
    found = {
        key.removeprefix(section): saved.tensors[key] for key in saved.tensors if key.startswith(section)
    }
    thresholds.load(found, saved.num_trained)


def _threshold_section(layout: Layout) -> str:
    return f"threshold/{layout.member}-of-{len(layout.peers)}/"
