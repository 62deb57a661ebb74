"""Sums of gradients through a codec: fewer bytes, and still the same bits on every replica.

Low rank is linear, so its factors are summed as gradients are. Of the other codecs members send messages:

    each owner gets its part      every piece goes to its owner, which adds up
    few bits, if it pays          the same; then each owner sends the sums of its pieces to all, in few bits
    the rest                      all messages go to all, and each member decodes all of them, its own too

Pieces are added in the members' order. A residual stays with the sender. That of a sum stays with the owner,
which adds it to its own next gradient. Gradients that are small, or of another kind than real numbers, are
summed as they are.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from bireme.codec.lowrank import as_matrix, first_basis, next_basis, orthonormal_all, product
from bireme.codec.sum_description import DENSE, SumCodec, SumKind
from bireme.sync.arrivals import Bucket
from bireme.sync.coded_messages import Given, Messages, coder_of, even_cuts, pieces_of, seed_name
from bireme.sync.exchange import (
    BatchGradients,
    SentBytes,
    held_flags,
    note_held,
    sum_flats,
    sum_in_slices,
    sum_parts,
)
from bireme.sync.feedback import BASIS, RESIDUAL, Feedback
from bireme.sync.group import Group
from bireme.sync.slices import DENSE_SLICE_BYTES

_FLAGS, _FLAG_BYTES = "", 4
"""The name of the numbers that tell which gradients a member has, and the bytes of each."""


class GradientSummation:
    """Sums of one rank's gradients over a group, batch by batch, as they are or through a codec: whole on all
    members or, `in_parts`, each piece at its owner.

    If members change from sum to sum no basis is the same on all of them, so none `keeps_basis`: each sum
    begins with a random one.
    """

    def __init__(self, codec: SumCodec = DENSE, *, in_parts: bool = False, keeps_basis: bool = True) -> None:
        self.codec = codec
        self._in_parts, self._keeps_basis = in_parts, keeps_basis
        self.feedback = Feedback() if codec.has_feedback else None
        """What was not sent yet, where that is kept."""

    def sum(
        self,
        group: Group,
        names: Sequence[str],
        gradients: BatchGradients,
        slice_bytes: int,
        sent: SentBytes,
        *,
        batch: int,
        factors: Sequence[float] | None = None,
        sender: int | None = None,
        plain: Collection[str] = (),
        apart: Collection[str] = (),
    ) -> None:
        """Sum the gradients of `names`, in place, over a group, and mark those that any member had. What a
        member holds of pieces that others own is of no use afterwards.

        Each member's part counts times its factor, if there are factors; a codec sees it without. `sender` is
        this member's number wherever groups change; it seeds what is random in its messages. What is `plain`
        goes as it is. What is `apart` is summed in the same way whatever it is summed with.
        """
        if not names:
            return
        if self.codec == DENSE and factors is None:
            if self._in_parts:
                sum_parts(group, names, gradients, min(slice_bytes, DENSE_SLICE_BYTES), sent)
            else:
                flats = gradients.arrivals or gradients.flats
                sum_in_slices(group, names, gradients, flats, slice_bytes, sent)
            return
        if group.size == 1:
            self._send_all_to_itself(names, gradients, 1.0 if factors is None else factors[0])
            return
        kind, in_parts = self.codec.kind, self._in_parts
        factors = (1.0,) * group.size if factors is None else factors
        factor, word = factors[group.rank], f"{batch} {group.rank if sender is None else sender}"
        views = {name: gradients.views[name] for name in names}
        begins = batch >= self.codec.whole_steps
        coded = {
            name: view for name, view in views.items() if begins and name not in plain and self._codes(view)
        }
        sent.note(group.size, raw=_FLAG_BYTES * len(names))
        if not in_parts:
            sent.note(group.size, raw=sum(view.nbytes for view in views.values()))
            if kind is SumKind.BITS or (kind is SumKind.THRESHOLD and group.size == 2):
                self._sum_by_messages(group, gradients, views, coded, factors, word, apart, slice_bytes, sent)
                return
        if gradients.arrivals is not None:
            gradients.arrivals.wait(group)
        flags = held_flags(names, gradients)
        whole = {} if in_parts else {name: view for name, view in views.items() if name not in coded}
        # What no member has a gradient of is opened too, and left as it is.
        kept = self._opened(coded, batch if in_parts else None)
        matrices: list[_Matrix] = []
        if kind is SumKind.LOWRANK:
            seed = "" if self._keeps_basis else f"{batch} "
            for name, view in coded.items():
                piece = gradients.cuts[name][group.rank] if in_parts else None
                matrices.append(_matrix_of(name, view, kept[name], self.codec.rank, seed, factor, piece))
        for view in whole.values() if factor != 1.0 else ():
            view.mul_(factor)
        first = next((view.dtype for view in whole.values() if not view.is_complex()), torch.float32)
        numbers = flags.to(first)
        if whole or matrices:
            lefts = {one.name: one.left for one in matrices}
            sum_all(group, {_FLAGS: numbers, **whole, **lefts}, apart, slice_bytes, sent)
        else:
            group.all_reduce(numbers).wait()
            sent.sent += (group.size - 1) * numbers.nbytes
        note_held(gradients, names, numbers)
        held = [one for one in matrices if one.name in gradients.held]
        if held:
            _sum_matrices(group, held, apart, slice_bytes, sent)
        for one in held if not self._keeps_basis else ():
            del one.kept[BASIS]
        done = {*whole, *(one.name for one in matrices)}
        left = [name for name in names if name not in done and name in gradients.held]
        coder = None if matrices or not coded else coder_of(self.codec, keeps=self.feedback is not None)
        given, cuts = _given(left, views, kept), None
        if in_parts:
            cuts = tuple(tuple((cut.start, cut.stop) for cut in gradients.cuts[name]) for name in left)
        bundles = kind is SumKind.BITS
        pieces = pieces_of(given, views, kept, cuts, group.rank, word, apart, bundles=bundles)
        if in_parts:
            summed = [name for name in views if name in gradients.held]
            own = (views[name].view(-1)[gradients.cuts[name][group.rank]].nbytes for name in summed)
            sent.raw += sum(views[name].nbytes for name in summed) - sum(own)
        messages = Messages(group, coder, factors, sent, to_all=not in_parts)
        messages.add(pieces, min(slice_bytes, DENSE_SLICE_BYTES) // group.size if in_parts else slice_bytes)
        messages.finish()

    def _sum_by_messages(
        self,
        group: Group,
        gradients: BatchGradients,
        views: Mapping[str, Tensor],
        coded: Mapping[str, Tensor],
        factors: Sequence[float],
        word: str,
        apart: Collection[str],
        slice_bytes: int,
        sent: SentBytes,
    ) -> None:
        """Sum gradients whole, bucket after bucket, by messages alone. The flags go along with the last
        bucket: a message of their own would take the latency of the link once more.
        """
        is_cut, keeps = self.codec.is_cut(group.size), self.feedback is not None
        messages = Messages(
            group,
            coder_of(self.codec, keeps=keeps) if coded else None,
            factors,
            sent,
            to_all=not is_cut,
            of_sums=coder_of(self.codec.of_sums, keeps=keeps) if is_cut else None,
        )
        arrivals, noted, flags = gradients.arrivals, list[str](), list[Tensor]()
        whole = [Bucket((*views,), ())]
        for bucket in whole if arrivals is None else arrivals.in_turn(group, messages.go_on):
            own = {name: views[name] for name in bucket.names}
            noted.extend(own)
            flags.append(held_flags([*own], gradients))
            if len(noted) == len(views):
                flags = [torch.cat(flags).float()]
                own = {_FLAGS: flags[0], **own}
            kept = self._opened({name: view for name, view in own.items() if name in coded})
            given, cuts = _given([*own], own, kept), None
            if is_cut:
                cuts = even_cuts(given, tuple(factors), frozenset(apart))
            bundles = self.codec.kind is SumKind.BITS
            pieces = pieces_of(given, own, kept, cuts, group.rank, word, apart, bundles=bundles)
            messages.add(pieces, slice_bytes // len(pieces))
        messages.finish()
        note_held(gradients, noted, flags[0])
        if self.feedback is not None:
            self.feedback.take_back(coded.keys() - gradients.held)

    @property
    def common(self) -> dict[str, Tensor]:
        """What the batch under way leaves that is the same on all members, by parameter."""
        return {} if self.feedback is None else self.feedback.staged(BASIS)

    def settle(self, *, counts: bool, common: Mapping[str, Tensor] | None = None) -> None:
        """The batch is done; what it left is kept if it counts. `common` is what it left on all members that
        counted, for a member that did not.
        """
        if self.feedback is not None:
            self.feedback.settle(counts=counts)
            for name, basis in (common or {}).items():
                self.feedback.put(name, BASIS, basis)

    def _codes(self, view: Tensor) -> bool:
        """Whether a gradient goes through the codec."""
        return view.dtype in (torch.float32, torch.float64) and self.codec.codes(view.shape)

    def _opened(
        self, coded: Mapping[str, Tensor], batch: int | None = None
    ) -> Mapping[str, dict[str, Tensor]]:
        """What is kept of these gradients, to which they are added."""
        if self.feedback is None:
            return {name: {} for name in coded}
        return self.feedback.open(coded, batch)

    def _send_all_to_itself(self, names: Sequence[str], gradients: BatchGradients, factor: float) -> None:
        """The sum of one member is all that it has, with what it has not sent before."""
        if self._in_parts:
            return
        views = {name: gradients.views[name] for name in names}
        known = {} if self.feedback is None else self.feedback.after(self.feedback.num_batches)
        coded = {name: view for name, view in views.items() if RESIDUAL in known.get(name, {})}
        for name in coded.keys() - gradients.held:
            views[name].zero_()
        staged = {} if self.feedback is None else self.feedback.open(coded)
        for name in coded:
            residual = staged[name][RESIDUAL]
            views[name].copy_(residual)
            residual.zero_()
            gradients.held.add(name)
        for name in gradients.held.intersection(names) if factor != 1.0 else ():
            views[name].mul_(factor)


def _given(
    names: Sequence[str], views: Mapping[str, Tensor], kept: Mapping[str, Mapping[str, Tensor]]
) -> tuple[Given, ...]:
    """Gradients as those know them who cut and bundle them."""
    return tuple(
        Given(name, view.numel(), view.dtype, name in kept, RESIDUAL in kept.get(name, ()))
        for name, view in ((name, views[name]) for name in names)
    )


# Low rank: factors for all members, and of the product what a member owns.


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A gradient as a matrix, which lies where it is kept, and the left factor of this member's part times
    its factor. The product belongs into the gradient, or of it the elements in `piece`.
    """

    name: str
    view: Tensor
    kept: dict[str, Tensor]
    matrix: Tensor
    left: Tensor
    seed: int
    factor: float
    piece: slice | None

    def put_product(self, left: Tensor, right: Tensor) -> None:
        """Write the product, or the elements of it that this member owns."""
        piece = self.piece
        if piece is None:
            product(left, right, out=self.view.view(self.matrix.shape))
        elif piece.start != piece.stop:
            num_columns = self.matrix.shape[1]
            first, end = piece.start // num_columns, -(-piece.stop // num_columns)
            rows = product(left[first:end], right).view(-1)
            begin = piece.start - first * num_columns
            self.view.view(-1)[piece] = rows[begin : begin + piece.stop - piece.start]


def _matrix_of(
    name: str,
    view: Tensor,
    kept: dict[str, Tensor],
    rank: int,
    word: str,
    factor: float,
    piece: slice | None = None,
) -> _Matrix:
    """What is kept of a gradient as a matrix, with the next factor of the power iteration. If what that goes
    on from does not fit, it starts again.
    """
    matrix, seed = as_matrix(kept.get(RESIDUAL, view)), crc32(f"{word}{seed_name(name)}".encode())
    basis = kept.get(BASIS)
    if basis is None or basis.shape != (matrix.shape[1], rank):
        basis = first_basis(matrix.shape[1], rank, seed=seed)
    left = matrix @ basis.to(matrix)
    return _Matrix(
        name, view, kept, matrix, left if factor == 1.0 else left.mul_(factor), seed, factor, piece
    )


def _sum_matrices(
    group: Group, matrices: Sequence[_Matrix], apart: Collection[str], slice_bytes: int, sent: SentBytes
) -> None:
    """Sums from left factors that are summed. Residuals become what the replica's own part of them lacks."""
    lefts = orthonormal_all([one.left for one in matrices])
    rights = [one.matrix.T @ left for one, left in zip(matrices, lefts, strict=True)]
    sums = [right * one.factor for one, right in zip(matrices, rights, strict=True)]
    of_names = {one.name: whole for one, whole in zip(matrices, sums, strict=True)}
    sum_all(group, of_names, apart, slice_bytes, sent)
    for one, left, right, whole in zip(matrices, lefts, rights, sums, strict=True):
        # A residual is the replica's own, and may round as it does.
        one.matrix.addmm_(left, right.T, alpha=-1)
        one.put_product(left, whole)
        one.kept[BASIS] = next_basis(whole, seed=one.seed)


def sum_all(
    group: Group, tensors: Mapping[str, Tensor], apart: Collection[str], slice_bytes: int, sent: SentBytes
) -> None:
    """Sum tensors as they are, in place, those of one dtype in one piece but for those `apart`."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if name not in apart:
            alike.setdefault(tensor.dtype, []).append(tensor)
    for own in [*alike.values(), *([tensors[name]] for name in sorted(apart) if name in tensors)]:
        flat = torch.cat([tensor.reshape(-1) for tensor in own])
        sum_flats(group, [flat], slice_bytes, sent)
        for tensor, piece in zip(own, torch.split(flat, [one.numel() for one in own]), strict=True):
            tensor.copy_(piece.view(tensor.shape))
