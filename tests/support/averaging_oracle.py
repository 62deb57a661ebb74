"""Replicas that average weights, by plain loops: an oracle for each, with the same averages between.

What is taken from the replicas is who had which samples and which groups there were, not what they computed.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bireme.runtime.exchange.averages import DilocoSettings
from bireme.sync.coordinator.messages import GroupMember, RankId
from tests.support.averaging_threads import AveragingReplicas
from tests.support.coded_oracle import CodedOracle
from tests.support.engine_parity import oracle
from tests.support.oracles import Update
from tests.support.patience import patience_s
from tests.support.together import run_threads

__all__ = ["expected_of_groups", "expected_of_outer_steps"]

Weights = Mapping[str, Tensor]
State = Mapping[str, Mapping[str, Any]]


class _Meetings:
    """Where the loops of all replicas meet: each brings tensors, and all get those of all, by replica."""

    def __init__(self) -> None:
        self._brought: dict[object, dict[int, list[Tensor]]] = {}
        self._changed = threading.Condition()

    def bring(self, what: object, replica: int, tensors: Sequence[Tensor]) -> None:
        with self._changed:
            self._brought.setdefault(what, {})[replica] = [tensor.clone() for tensor in tensors]
            self._changed.notify_all()

    def take(self, what: object, num: int) -> dict[int, list[Tensor]]:
        with self._changed:
            came = self._changed.wait_for(lambda: len(self._brought.get(what, {})) == num, patience_s())
        assert came, what
        return dict(sorted(self._brought[what].items()))


class _Coded:
    """The codec of all replicas, as one of them works it out. Drifts are by name."""

    def __init__(self, codec: str) -> None:
        self._oracle = CodedOracle(codec)

    def mean(
        self, number: int, names: Sequence[str], brought: Mapping[int, Sequence[Tensor]]
    ) -> list[Tensor]:
        of_replicas = {
            replica: dict(zip(names, tensors, strict=True)) for replica, tensors in brought.items()
        }
        sums = self._oracle.sum(number, of_replicas)
        return [sums[name] * (1.0 / len(brought)) for name in names]  # type: ignore[operator, misc]

    def unsent(self, replica: int, name: str) -> Tensor | float:
        """What a replica has not sent of a drift, which all replicas have sent by now."""
        return self._oracle._residuals.get((replica, name), 0.0)

    def clear(self) -> None:
        self._oracle._residuals.clear()


def _mean(brought: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
    parts = [[tensor * (1.0 / len(brought)) for tensor in one] for one in brought.values()]
    return [torch.stack(own).sum(0) for own in zip(*parts, strict=True)]


def _expected(
    run: AveragingReplicas, after_step: Callable[[int, int, Weights, State], None]
) -> list[list[Update]]:
    """What each replica learns, with `after_step(replica, batch, weights, state)` between."""

    def learn(replica: int) -> list[Update]:
        told = run.told[RankId(replica, 0, 0)]
        ends = (0, *told.ends)
        windows = tuple(end - begin for begin, end in pairwise(ends))
        data = [run.batch(replica, batch, told.dealt[batch]) for batch in range(told.ends[-1])]
        return oracle(
            run.model,
            replace(run.setting, windows=windows),
            data,
            after_step=lambda batch, weights, state: after_step(replica, batch, weights, state),
        )

    return run_threads(run.num_replicas, learn)


def _averaged(run: AveragingReplicas, names: Iterable[str], weights: Weights, state: State) -> list[Tensor]:
    """What replicas average of the parameters of these names."""
    ordered = sorted(weights.keys() & set(names))  # all others are frozen
    if not run.averages_optimizer:
        return [weights[name] for name in ordered]
    moments = [state[name][key] for name in ordered for key in sorted(state[name].keys() - {"step"})]
    return [*(weights[name] for name in ordered), *moments]


def expected_of_groups(run: AveragingReplicas) -> list[list[Update]]:
    """With each rank averaged in the groups that there were, and all weights at the end of each window."""
    meetings = _Meetings()
    ranks = _weights_of_ranks(run)
    coded = [_Coded(run.codec) for _ in range(run.num_replicas)] if run.codec != "none" else []
    first = {state.name: run.model.weights[state.name] for state in run.model.graph.parameters}
    starts = [{name: tensor.clone() for name, tensor in first.items()} for _ in range(run.num_replicas)]

    def bring_drifts(group: object, rank: int, replica: int, weights: Weights) -> None:
        drifts = [weights[name] - starts[replica][name] for name in sorted(ranks[rank])]
        meetings.bring(group, replica, drifts)

    def take_drifts(group: tuple[int, Sequence[object]], replica: int, weights: Weights) -> None:
        names = sorted(ranks[group[0]])
        means = coded[replica].mean(0, names, meetings.take(group, len(group[1])))
        for name, mean in zip(names, means, strict=True):
            weights[name].copy_(mean + starts[replica][name])

    def after_step(replica: int, batch: int, weights: Weights, state: State) -> None:
        told = [run.told[RankId(replica, 0, rank)] for rank in range(len(ranks))]
        groups = [
            (rank, one.groups.get(batch, (GroupMember(replica, batch),))) for rank, one in enumerate(told)
        ]
        if coded:
            for group in groups:
                bring_drifts(group, group[0], replica, weights)
            for group in groups:
                if len(group[1]) > 1:
                    take_drifts(group, replica, weights)
        own = [_averaged(run, ranks[rank], weights, state) for rank, _ in groups if not coded]
        for group, tensors in zip(groups, own, strict=not coded):
            meetings.bring(group, replica, tensors)
        for group, tensors in zip(groups, own, strict=not coded):
            if len(group[1]) > 1:
                for tensor, mean in zip(tensors, _mean(meetings.take(group, len(group[1]))), strict=True):
                    tensor.copy_(mean)
        if batch + 1 in told[0].ends:
            for name in weights if coded else ():
                weights[name].add_(coded[replica].unsent(replica, name))
            everything = _averaged(run, weights, weights, state)
            window = told[0].ends.index(batch + 1)
            meetings.bring(window, replica, everything)
            for tensor, mean in zip(everything, _mean(meetings.take(window, run.num_replicas)), strict=True):
                tensor.copy_(mean)
            if coded:
                coded[replica].clear()
                starts[replica] = {name: tensor.clone() for name, tensor in weights.items()}

    return _expected(run, after_step)


def _weights_of_ranks(run: AveragingReplicas) -> list[set[str]]:
    """The weights of each rank, those of several ranks at the first of them."""
    source = run.setting.plan.source
    trained = {state.name for state in run.model.graph.parameters if state.trainable}
    found: list[set[str]] = [set() for _ in range(source.num_ranks)]
    for rank, own in enumerate(found):
        for stage in source.stages_of(rank):
            own.update(trained.intersection(run.model.stage(run.setting.plan, stage).parameters))
        own.difference_update(*found[:rank])
    return found


def expected_of_outer_steps(run: AveragingReplicas, settings: DilocoSettings) -> list[list[Update]]:
    """With one fragment, equal batches, and rounds that come one batch late; one more ends each window. Where
    the optimizers' state is averaged too, it becomes the mean of what was offered.
    """
    meetings = _Meetings()
    first = {state.name: run.model.weights[state.name] for state in run.model.graph.parameters}
    starts = [{name: tensor.clone() for name, tensor in first.items()} for _ in range(run.num_replicas)]
    buffers = [{name: torch.zeros_like(tensor) for name, tensor in first.items()} for _ in starts]
    offered: list[dict[str, Tensor]] = [{} for _ in starts]
    remembered: list[list[Tensor]] = [[] for _ in starts]
    coded = [_Coded(run.codec) for _ in starts] if run.codec != "none" else []
    rounds = [0 for _ in starts]

    def step(what: tuple[str, int], replica: int, drifts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """How the start has changed."""
        names = sorted(drifts)
        meetings.bring(what, replica, [drifts[name] for name in names])
        changes = {}
        brought = meetings.take(what, run.num_replicas)
        if coded and what[0] == "round":
            means = coded[replica].mean(rounds[replica], names, brought)
            rounds[replica] += 1
        else:
            means = _mean(brought)
        for name, mean in zip(names, means, strict=True):
            start, buffer = starts[replica][name], buffers[replica][name]
            before = start.clone()
            buffer.mul_(settings.momentum).add_(mean)
            start.sub_((mean + settings.momentum * buffer) * settings.rate)
            changes[name] = start - before
        return changes

    def average_state(what: object, replica: int, offer: Sequence[Tensor], state: State) -> None:
        meetings.bring(("state", what), replica, offer)
        means = _mean(meetings.take(("state", what), run.num_replicas))
        for tensor, mean in zip(moments_of(state), means, strict=True):
            tensor.copy_(mean)

    def moments_of(state: State) -> list[Tensor]:
        return _averaged(run, first, first, state)[len(first) :]

    def end(replica: int, batch: int, weights: Weights, state: State) -> None:
        if offered[replica]:
            average_state(("round", batch), replica, remembered[replica], state)
            for name, change in step(("round", batch), replica, offered[replica]).items():
                weights[name].add_(change + offered[replica][name])
            offered[replica] = {}

    def after_step(replica: int, batch: int, weights: Weights, state: State) -> None:
        end(replica, batch - 1, weights, state)
        if (batch + 1) % settings.every == 0:
            offered[replica] = {name: starts[replica][name] - weights[name] for name in weights}
            remembered[replica] = [tensor.clone() for tensor in moments_of(state)]
        told = run.told[RankId(replica, 0, 0)]
        if batch + 1 in told.ends:
            end(replica, batch, weights, state)
            if (batch + 1) % settings.every:  # else nothing was trained since the last round
                drifts = {name: starts[replica][name] - weights[name] for name in weights}
                for name in drifts if coded else ():
                    drifts[name] += coded[replica].unsent(replica, name)
                step(("window", batch), replica, drifts)
                average_state(("window", batch), replica, moments_of(state), state)
            for name, tensor in weights.items():
                tensor.copy_(starts[replica][name])
            if coded:
                coded[replica].clear()

    return _expected(run, after_step)
