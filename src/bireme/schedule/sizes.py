"""The bytes of what each stage keeps, and which of them can be paged."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from bireme.schedule.instruction import Item
from bireme.schedule.program import Program
from bireme.schedule.rule import Rule

__all__ = ["Sizes", "item_bytes", "unpaged"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of what each stage keeps.

    `stash` and `inputs` are for one micro-batch: all activations kept for the backward, and the stage's
    input alone, which is what a recomputed stage keeps. `activation` and `gradient_message` are the
    messages that come into the stage from the stages before and after. `workspace` is what a pass of a
    micro-batch takes and gives back; empty stands for none. Where `master` is set, the newest weights live in
    the optimiser's own master copy, counted in `optimizer`. `buffers` are always there besides the
    optimiser's bytes; of them `frozen` are weights that do not learn, which alone are paged; empty stands for
    none. `tied_gradient` is what other stages add to of a stage's gradients: where replicas share weights, it
    stays whole from the first backward of a batch to its update. Of a backward in halves, `waiting` are a
    micro-batch's gradients between the two, and `halves` is what they take beside `workspace`. Empty stands
    for none.
    """

    version: tuple[float, ...]
    gradient: tuple[float, ...]
    optimizer: tuple[float, ...]
    stash: tuple[float, ...]
    inputs: tuple[float, ...]
    activation: tuple[float, ...]
    gradient_message: tuple[float, ...]
    master: bool = False
    workspace: tuple[float, ...] = ()
    buffers: tuple[float, ...] = ()
    frozen: tuple[float, ...] = ()
    tied_gradient: tuple[float, ...] = ()
    waiting: tuple[float, ...] = ()
    halves: tuple[float, ...] = ()


def item_bytes(program: Program, sizes: Sizes, item: Item, stage: int) -> float:
    """The bytes of an item that can be paged: one bank, one sum of gradients, one micro-batch."""
    match item:
        case Item.WEIGHTS:
            return sizes.version[stage]
        case Item.GRADIENT:
            return sizes.gradient[stage]
        case Item.OPTIMIZER:
            has_newest = program.rule is Rule.FRESH and not sizes.master
            return sizes.optimizer[stage] + (sizes.version[stage] if has_newest else 0.0)
        case Item.STASH:
            return (sizes.inputs if stage in program.recomputed else sizes.stash)[stage]
        case Item.FROZEN:
            return sizes.frozen[stage] if sizes.frozen else 0.0


def unpaged(program: Program, sizes: Sizes, paged: Collection[tuple[Item, int]]) -> Sizes:
    """The sizes without the items that are paged: of messages, of what is recomputed, and of small items."""

    def without(item: Item, values: tuple[float, ...], *, but: Collection[int] = ()) -> tuple[float, ...]:
        return tuple(
            0.0 if (item, stage) in paged and stage not in but else value
            for stage, value in enumerate(values)
        )

    recomputed = program.recomputed
    buffers = sizes.buffers
    if sizes.frozen:
        beside = without(Item.FROZEN, sizes.frozen)
        buffers = tuple(
            all_of_it - whole + left
            for all_of_it, whole, left in zip(buffers, sizes.frozen, beside, strict=True)
        )
    return replace(
        sizes,
        buffers=buffers,
        version=without(Item.WEIGHTS, sizes.version),
        gradient=without(Item.GRADIENT, sizes.gradient),
        optimizer=without(Item.OPTIMIZER, sizes.optimizer),
        stash=without(Item.STASH, sizes.stash, but=recomputed),
        inputs=without(Item.STASH, sizes.inputs, but=set(range(program.num_stages)) - recomputed),
    )
