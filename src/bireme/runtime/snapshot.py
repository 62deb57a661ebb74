"""A snapshot: what one rank holds between two batches, by the model's own names, so that others can go on.

It is taken while other batches are under way: a stage's weights change at its updates only. A name begins
with a section: `weights/` the newest, in the precision that is stepped; `before/` those one update older,
which the next batch runs on under delayed updates; `trial/REPLICA/STAGE/` those that a stage has made up for
the next batch under fresh ones, each for itself; `optimizer/NAME/KEY`; `buffers/`;
`principal/AGE/NAME/PART` what the gradients of the next batches go on from, where they are kept so. What
replicas have pieces of, each saves its own (`piece_sections.py`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.banks import WeightBanks
from bireme.runtime.layout import Layout
from bireme.runtime.shared_weights import SharedWeights
from bireme.runtime.stage import Stage
from bireme.sync.feedback import BASIS, RESIDUAL, Feedback

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
    return _Joined(saved, pieces, shapes) if pieces else saved


class _Joined(Mapping[str, Tensor]):
    """Reads the pieces of a tensor when it is asked for."""

    def __init__(
        self,
        saved: Mapping[str, Tensor],
        pieces: Mapping[str, Mapping[int, str]],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._saved = saved
        self._pieces = pieces
        self._shapes = shapes

    def __getitem__(self, name: str) -> Tensor:
        own = self._pieces.get(name)
        if own is None:
            return self._saved[name]
        shape = self._shapes[name]
        flat: Tensor | None = None
        end = 0
        for begin in sorted(own):
            piece = self._saved[own[begin]]
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

    def __iter__(self) -> Iterator[str]:
        whole = (name for name in self._saved if not name.startswith(f"{_PIECE}/"))
        return iter([*whole, *self._pieces])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: Any) -> bool:
        return name in self._pieces or (name in self._saved and not name.startswith(f"{_PIECE}/"))


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


def sections_of(
    stage: Stage, names: Iterable[str], *, replica: int, pieces_of: Iterable[str] = (), alone: bool = False
) -> dict[str, Tensor]:
    """What a stage holds of the parameters and buffers named, and all of its trial version; copied.

    Where replicas share the optimizer, there are this one's pieces of the parameters in `pieces_of`. With
    `alone` there is what this rank needs to go on by itself: weights whole, and its pieces as they are. Then
    all replicas must call it.
    """
    banks, wanted = stage.banks, set(names)
    if banks.shared is not None:
        return _shared_sections(stage, banks.shared, wanted, {*pieces_of}, replica=replica, alone=alone)
    found = {f"{_WEIGHTS}/{name}": tensor for name, tensor in banks.newest(wanted).items()}
    found |= _to_run_on(stage, wanted, replica)
    for name, state in _optimizer_sections(banks):
        found |= state if name in wanted else {}
    found |= _buffers(stage, wanted)
    principal = banks.gradients.principal
    if principal is not None:
        found |= {
            f"{_PRINCIPAL}/{key}": tensor
            for key, tensor in principal.state(banks.newest_version).items()
            if _name_in(key) in wanted
        }
    return _copied(found)


def _shared_sections(
    stage: Stage, shared: SharedWeights, wanted: set[str], pieces_of: set[str], *, replica: int, alone: bool
) -> dict[str, Tensor]:
    banks = stage.banks
    newest = banks.newest(alone=not alone)
    found = {f"{_WEIGHTS}/{name}": tensor for name, tensor in newest.items() if name in wanted}
    found |= _to_run_on(stage, wanted, replica, alone=not alone) | _buffers(stage, wanted)
    pieces: dict[str, dict[str, Tensor]] = {}
    for section, before in ((_WEIGHTS, False), (BEFORE, True)) if not alone else ():
        for name, one in banks.own_pieces(before=before).items():
            pieces.setdefault(name, {})[f"{section}/{name}"] = one
    for name, state in _optimizer_sections(banks):
        pieces.setdefault(name, {}).update(state)
    for name, own in pieces.items():
        if alone and name in wanted:
            found |= own
        elif not alone and name in pieces_of:
            found |= _named_pieces(shared, name, own)
    return _copied(found)


def own_sections(stage: Stage, names: Collection[str], *, replica: int) -> dict[str, Tensor]:
    """What this rank has of a stage of the parameters and buffers named, for the same rank of another site:
    whole, or its pieces as they are. Copied; no other rank takes part.
    """
    banks = stage.banks
    if banks.shared is None:
        return sections_of(stage, names, replica=replica)
    found = {f"{_WEIGHTS}/{name}": tensor for name, tensor in banks.newest(names, alone=True).items()}
    found |= _to_run_on(stage, names, replica, alone=True) | _buffers(stage, names)
    for section, before in ((_WEIGHTS, False), (BEFORE, True)):
        for name, piece in banks.own_pieces(before=before).items():
            if name in names:
                found.setdefault(f"{section}/{name}", piece)
    for name, state in _optimizer_sections(banks):
        found |= state if name in names else {}
    return _copied(found)


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


def _to_run_on(
    stage: Stage, wanted: Collection[str], replica: int, *, alone: bool = False
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in stage.banks.next_to_run_on(alone=alone).items():
        if stage.banks.is_fresh:
            found[f"{TRIAL}/{replica}/{stage.index}/{name}"] = tensor
        elif name in wanted:
            found[f"{BEFORE}/{name}"] = tensor
    return found


def _buffers(stage: Stage, wanted: Collection[str]) -> dict[str, Tensor]:
    return {
        f"{_BUFFERS}/{name}": tensor for name, tensor in stage.settled_buffers().items() if name in wanted
    }


def _copied(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()}


def load_stage(stage: Stage, saved: Mapping[str, Tensor], *, version: int, replica: int) -> None:
    """Restore a stage from saved tensors, after `version` updates.

    Weights that are trained and buffers that are written must be among them; of the others, what was not
    saved stays as the stage has it. What was saved of another rule, or not at all, begins equal to the newest
    weights.
    """
    banks = stage.banks
    saved = joined(saved)
    # Of what replicas share, there may be this one's pieces alone.
    trained = set(banks.trainable if banks.shared is None else banks.shared.part_of)
    newest = {
        name: saved[key] for name in banks.names if (key := f"{_WEIGHTS}/{name}") in saved or name in trained
    }
    names = tuple(newest)
    section = f"{TRIAL}/{replica}/{stage.index}" if banks.is_fresh else BEFORE
    others = {name: saved.get(f"{section}/{name}", newest[name]) for name in names}
    number = version if banks.is_fresh else version - 1
    banks.load(newest, _optimizer_state(banks, saved), version=version, older={number: others})
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
