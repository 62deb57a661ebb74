"""Training with principal components in one process and plain loops: what the engine's is judged by.

The components of pairs are found by the codec itself. Where pairs come from, in what order they count, what
each batch goes on from and what a step is made from is written out here once more, on an ordinary module.
"""

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor, nn

from bireme.codec.lowrank import Components, PrincipalStream, first_components, merged
from tests.support.small_models import Batch

__all__ = ["principal_oracle"]

LR = 0.02


def principal_oracle(
    module: nn.Module,
    maps: Mapping[str, nn.Linear],
    data: Sequence[Batch],
    *,
    rank: int,
    width: int,
    num_microbatches: int,
    is_delayed: bool,
) -> list[dict[str, Tensor]]:
    """The weights after each batch, by plain steps at the rate `LR`; `maps` are layers by their weights."""
    names = dict(module.named_parameters())
    history = [{name: one.detach().clone() for name, one in names.items()}]
    settled = [
        {
            name: first_components(
                len(layer.weight), len(layer.weight[0]), rank, seed=crc32(name.encode()), dtype=torch.float64
            )
            for name, layer in maps.items()
        }
    ]
    for number, batch in enumerate(data):
        begin = max(number - is_delayed, 0)
        with torch.no_grad():
            for name, one in names.items():
                one.copy_(history[begin][name])
        grads: dict[str, Tensor] = {}
        of_replicas: list[dict[str, PrincipalStream]] = []
        pieces = [dict(zip(batch, part, strict=True)) for part in _cut(batch, width * num_microbatches)]
        for replica in range(width):
            streams = {name: PrincipalStream(one) for name, one in settled[begin].items()}
            of_replicas.append(streams)
            for piece in pieces[replica * num_microbatches : (replica + 1) * num_microbatches]:
                _feed(module, maps, streams, piece, len(piece["x"]) / len(batch["x"]))
            for name, one in names.items():
                if one.grad is not None:
                    grads[name] = grads[name] + one.grad if name in grads else one.grad
                    one.grad = None
        found = {name: merged([streams[name].factors() for streams in of_replicas], rank) for name in maps}
        newest = history[-1]
        numbers = [*grads.values(), *(one.values for one in found.values())]
        finite = all(bool(one.isfinite().all()) for one in numbers)
        settled.append(found if finite else settled[-1])
        history.append(_stepped(newest, grads, found) if finite else newest)
    return history[1:]


def _cut(batch: Batch, num: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.chunk(num) for tensor in batch.values()), strict=True))


def _feed(
    module: nn.Module,
    maps: Mapping[str, nn.Linear],
    streams: Mapping[str, PrincipalStream],
    piece: Mapping[str, Tensor],
    share: float,
) -> None:
    """One micro-batch: what goes into each layer and what flows back out of it."""
    seen: dict[str, Tensor] = {}
    hooks = []
    for name, layer in maps.items():
        layer.weight.requires_grad_(False)

        def note(_layer: nn.Module, given: tuple[Tensor], made: Tensor, name: str = name) -> None:
            seen[name] = given[0].detach()
            made.register_hook(lambda back: streams[name].feed(back, seen[name]))

        hooks.append(layer.register_forward_hook(note))
    loss = module(**piece)["loss"]
    loss.backward(torch.full_like(loss, share))
    for hook in hooks:
        hook.remove()


def _stepped(
    weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], found: Mapping[str, Components]
) -> dict[str, Tensor]:
    stepped = {name: nn.Parameter(one.clone()) for name, one in weights.items()}
    for name, one in stepped.items():
        one.grad = found[name].product(one.shape).rows() if name in found else gradients[name]
    torch.optim.SGD(stepped.values(), lr=LR, fused=True).step()
    return {name: one.detach() for name, one in stepped.items()}
