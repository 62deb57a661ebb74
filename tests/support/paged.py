"""Plans that page, for tests of the engine: the bytes of small models, and budgets between the extremes."""

from dataclasses import replace

import torch

from bireme.plan.plan import Paging, Plan
from bireme.schedule.accesses import Sizes
from bireme.schedule.budgets import Budgets, TierTooSmallError
from bireme.schedule.residency import resident
from tests.support.engine_parity import Trained
from tests.support.small_models import Model

__all__ = ["CHUNK", "assert_same", "least_device_bytes", "paged", "sizes_of"]

CHUNK = 4096
PLENTY = 1 << 30


def sizes_of(model: Model, plan: Plan, *, bank_dtype: torch.dtype | None = None, stash: int) -> Sizes:
    """What the stages keep under Adam; a micro-batch keeps `stash` bytes, and none of messages counts."""
    states = {state.name: state for state in model.graph.parameters}
    elements, bank, step, frozen = [], [], [], []
    for stage in range(plan.num_stages):
        names = {
            name
            for index in plan.units_of(stage, len(model.units))
            for name in model.units[index].parameters
            if name in states
        }
        own = [model.weights[name] for name in sorted(names) if states[name].trainable]
        frozen.append(float(sum(states[name].num_bytes for name in names if not states[name].trainable)))
        elements.append(sum(tensor.numel() for tensor in own))
        size = own[0].itemsize if own else 8
        bank.append(size if bank_dtype is None else bank_dtype.itemsize)
        step.append(max(bank[-1], 4))
    nothing = (0.0,) * plan.num_stages
    is_apart = bank_dtype is not None and bank_dtype.itemsize < 4
    return Sizes(
        version=tuple(float(n * b) for n, b in zip(elements, bank, strict=True)),
        gradient=tuple(float(n * s) for n, s in zip(elements, step, strict=True)),
        optimizer=tuple(float(n * s * (2 + is_apart)) for n, s in zip(elements, step, strict=True)),
        stash=(float(stash),) * plan.num_stages,
        inputs=(float(min(stash, CHUNK)),) * plan.num_stages,
        activation=nothing,
        gradient_message=nothing,
        master=is_apart,
        buffers=tuple(frozen),
        frozen=tuple(frozen),
    )


def paged(
    plan: Plan, sizes: Sizes, share: float, *, host: float | None = None, disk: bool = False, **more: object
) -> Plan:
    """The plan within a budget for each rank between the least there can be (0) and all that it keeps (1).

    `host` is a share of the same for the host's memory, 0 none at all.
    """
    program = plan.source.settled()
    ranks = range(plan.source.num_ranks)
    whole = [resident(program, rank, sizes).peak_bytes for rank in ranks]
    below = Budgets(PLENTY) if host is None else Budgets(PLENTY, int(host * max(whole)), PLENTY * disk)

    def within(devices: list[int]) -> Plan:
        budgets = tuple(replace(below, device_bytes=device) for device in devices)
        return replace(
            plan,
            paging=Paging(budgets, sizes, chunk_bytes=(CHUNK,) * len(devices), **more),  # type: ignore[arg-type]
        )

    least = least_device_bytes(within, len(whole))
    asked = [int(low + share * (high - low)) for low, high in zip(least, whole, strict=True)]
    return within(asked)


def least_device_bytes(within: object, num_ranks: int) -> list[int]:
    """For each rank the smallest budget of its device that is not refused."""
    assert callable(within)
    asked = [CHUNK] * num_ranks
    for _ in range(4 * num_ranks):
        try:
            within(asked).source.settled()
        except TierTooSmallError as refused:
            asked[int(str(refused).split()[1])] = int(refused.needed_bytes)
        else:
            return asked
    raise AssertionError("no budget will do")


def assert_same(found: list[Trained], expected: list[Trained]) -> None:
    """Losses, norms, verdicts, weights and optimizer states after every batch, to the last bit."""
    for one, other in zip(found, expected, strict=True):
        assert repr(one.losses) == repr(other.losses)
        assert one.norms == other.norms
        assert one.skipped == other.skipped
        for held, wanted in zip(one.weights, other.weights, strict=True):
            assert held.keys() == wanted.keys()
            assert all(torch.equal(held[name], wanted[name]) for name in held)
        for states, wanted_states in zip(one.states, other.states, strict=True):
            assert states.keys() == wanted_states.keys()
            for name, state in states.items():
                assert all(torch.equal(state[key], wanted_states[name][key]) for key in state)
