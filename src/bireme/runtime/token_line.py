"""Tokens by ranks in a line, each with a part of the model: states go down the line, each token comes back.

    rank 0:  ids ─▶ part ─▶ state ─┐                              ┌─▶ next token ─▶ part ─▶ …
    rank 1:                        └─▶ part ─▶ state ─┐           │
    rank 2:                                           └─▶ part ─▶ chosen

The last rank chooses, because it has as many scores as the vocabulary has tokens, and a token is one number.
A rank waits for a message as long as the others live, which their heartbeats show.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from bireme.runtime.fabric import Fabric
from bireme.runtime.message_format import TensorSpec, WireFormat
from bireme.schedule.instruction import Message
from bireme.schedule.routes import Routes

SCORES = "scores"
"""The result of the part that ends the model: a number for each token that may be next."""

_TOKEN = "token"
_OVER = -1
"""In the place of a token: the text has ended."""

_BEFORE = -1
"""The step before the first."""

Tensors = Mapping[str, Tensor]


class ModelPart(ABC):
    """Consecutive layers or units of a model, which all tokens of a text go through. `context` is the most
    tokens that it reads. One with a cache is given each token once, others all tokens again.
    """

    has_cache = False
    context: int

    @abstractmethod
    def run(self, ids: Sequence[int], count: int, received: Tensors) -> Tensors:
        """The state that goes to the next part, or the `SCORES`. Of the tokens `ids` the last `count` are
        new; if all are, a text begins.
        """

    def receives(self, count: int) -> tuple[TensorSpec, ...]:
        """The state that comes from the part before, if `count` tokens are new."""
        return ()

    def sends(self, count: int) -> tuple[TensorSpec, ...]:
        """The state that goes to the next part."""
        return ()


class TokenLine:
    """The ranks of a line; `device` is that of this rank's part."""

    def __init__(self, fabric: Fabric, device: torch.device) -> None:
        self.rank, self.last = fabric.rank, fabric.size - 1
        ranks = tuple(range(fabric.size))
        self._transport = fabric.transport(ranks, Routes(ranks))
        self._device = device
        self._memory = torch.device("cpu") if self._transport.is_host else device
        self._is_staged = self._memory.type != device.type

    def meet(self) -> None:
        """Return on rank 0 once all ranks have come here."""
        if self.rank > 0:
            self.state(_BEFORE, ())
        if self.rank < self.last:
            self.send_state(_BEFORE, (), {}, 0)
        if self.rank == self.last > 0:
            self.send_token(_BEFORE, 0)
        if self.rank == 0 < self.last:
            self.token(_BEFORE)

    def state(self, step: int, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
        """The state that comes from the rank before, and with it the last token."""
        return self._receive(_Tokens(True, self.rank, step, 0, None), self.rank - 1, (_TOKEN_SPEC, *specs))

    def send_state(self, step: int, specs: Sequence[TensorSpec], state: Tensors, token: int) -> None:
        """Send the next rank a state with the last token; its tensors may be missing if the text is over."""
        blank = {spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs if not state}
        key = _Tokens(True, self.rank + 1, step, 0, None)
        self._send(key, self.rank + 1, (_TOKEN_SPEC, *specs), {**(state or blank), _TOKEN: _number(token)})

    def token(self, step: int) -> int | None:
        """The token that the last rank has chosen; None if the text is over."""
        came = self._receive(_Tokens(False, self.last - 1, step, 0, None), self.last, (_TOKEN_SPEC,))
        token = int(came[_TOKEN])
        return None if token == _OVER else token

    def send_token(self, step: int, token: int | None) -> None:
        """Send rank 0 the token that this last rank has chosen."""
        key = _Tokens(False, self.last - 1, step, 0, None)
        self._send(key, 0, (_TOKEN_SPEC,), {_TOKEN: _number(_OVER if token is None else token)})

    def close(self) -> None:
        """Give the sockets back."""
        self._transport.close()

    def _receive(self, key: Message, source: int, specs: tuple[TensorSpec, ...]) -> dict[str, Tensor]:
        arrival = _format(specs).arrival(key, self._memory, is_pinned=self._is_staged)
        self._transport.receive(key, source, arrival.message).wait()
        return arrival.unpack(self._device)

    def _send(self, key: Message, to: int, specs: tuple[TensorSpec, ...], tensors: Tensors) -> None:
        parcel = _format(specs).parcel(self._memory, is_pinned=self._is_staged)
        parcel.address(key)
        parcel.pack(tensors)
        self._transport.send(key, to, parcel.message).wait()


class _Tokens(Message):
    """The key of a message of a line."""

    def __str__(self) -> str:
        """Such as `state of token 3 into part 1`."""
        return (
            f"state of token {self.batch} into part {self.to_stage}"
            if self.forward
            else f"token {self.batch}"
        )


_TOKEN_SPEC = TensorSpec(_TOKEN, (1,), torch.int64)
_format = lru_cache(maxsize=8)(WireFormat)


def _number(token: int) -> Tensor:
    return torch.tensor([token])


def continued(
    part: ModelPart,
    first: Sequence[int],
    choose: Callable[[Tensor], int | None],
    most: int,
    line: TokenLine | None = None,
) -> Iterator[int]:
    """At most `most` tokens after the `first` ones, each chosen from its scores after the last `context`
    tokens, until None is chosen. Rank 0 of a line gives all of them. Each other rank must iterate to the end.
    """
    rank, last = (0, 0) if line is None else (line.rank, line.last)
    ids = list(first)

    def num_new(step: int) -> int:
        num_known = len(first) + step
        is_next = part.has_cache and step > 0 and num_known <= part.context
        return 1 if is_next else min(num_known, part.context)

    for step in range(most):
        count, received = num_new(step), dict[str, Tensor]()
        if line is not None and rank > 0:
            received = line.state(step, part.receives(count))
            token = int(received[_TOKEN])
            if token == _OVER:
                if rank + 1 < last:
                    line.send_state(step, part.sends(count), {}, _OVER)
                return
            if step > 0:
                ids.append(token)
                yield token
        made = part.run(ids[-part.context :], count, received)
        chosen = choose(made[SCORES]) if rank == last else None
        if line is not None and rank < last:
            line.send_state(step, part.sends(count), made, ids[-1])
            chosen = line.token(step) if rank == 0 else None
        elif line is not None and rank > 0:
            line.send_token(step, chosen)
        if chosen is None and rank in (0, last):
            if line is not None and rank == 0 and last > 1 and step + 1 < most:
                line.send_state(step + 1, part.sends(num_new(step + 1)), {}, _OVER)
            return
        if chosen is not None and rank == 0:
            ids.append(chosen)
            yield chosen
