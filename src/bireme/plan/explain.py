"""Why a plan is what it is: what would help, found by planning again with one thing changed at a time."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from bireme.cluster.cluster import MOST_BYTES_PER_S, Bridge, Card, Cluster, Link, Mesh
from bireme.cluster.device import Device
from bireme.codec.sum_description import SumCost, parse_sum_codec, sum_cost
from bireme.errors import BiremeError, Progress
from bireme.plan.forecast import Answer, Candidate, MemoryWay, NothingFits, summarize
from bireme.plan.partition.loads import Recompute
from bireme.plan.plan import device_ranges
from bireme.plan.plan_request import AUTO, PlanRequest
from bireme.profile.profile import Profile

# What could be otherwise: clusters and requests changed in one thing each, to plan for them again.

_TIMES = 2
"""As much of it: enough to see whether a thing limits."""

_MOST_KINDS = 4
"""Kinds of devices or of links that are tried, the most frequent first."""

_HARMLESS, _MANY_ENTRIES = "int4", 1 << 20
"""The codec of sums with the fewest bytes of those that cost no steps (docs/figures-codecs.md); it sends as
much of each entry, however many there are.
"""

_Thing = TypeVar("_Thing", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _WhatIf:
    """What is otherwise, in words that follow on "with", and the cluster and request that are then."""

    words: str
    cluster: Cluster
    request: PlanRequest


def changes(cluster: Cluster, request: PlanRequest) -> Iterator[_WhatIf]:
    """More memory on each kind of device, each kind of link faster, a larger batch, each wish given up."""
    for device in _most_frequent([placed.device for placed in cluster.devices()]):
        names = [placed.name for placed in cluster.devices() if placed.device == device]
        yield _WhatIf(f"{_TIMES} × the memory on {device_ranges(names)}", _larger(cluster, device), request)
    links = [(type(group), group.link) for server in cluster.servers for group in server.groups]
    for kind, link in _most_frequent(links):
        names = [
            f"{server.name}/{group.name}"
            for server in cluster.servers
            for group in server.groups
            if isinstance(group, kind) and group.link == link
        ]
        if _faster(link) != link:
            other = _with_link(cluster, kind, link, _faster(link))
            yield _WhatIf(f"{_TIMES} × the bandwidth of {device_ranges(names)}", other, request)
    rate = None if cluster.switch is None else cluster.switch.bytes_per_s
    if cluster.switch is not None and rate is not None and _more(rate) != rate:
        switch = replace(cluster.switch, bytes_per_s=_more(rate))
        yield _WhatIf(f"{_TIMES} × the bandwidth of the switch", replace(cluster, switch=switch), request)
    for route in cluster.routes:
        if _faster(route.link) != route.link:
            others = (replace(one, link=_faster(one.link)) if one is route else one for one in cluster.routes)
            other = replace(cluster, routes=tuple(others))
            yield _WhatIf(f"{_TIMES} × the bandwidth of the route {route.name}", other, request)
    yield from _other_tiers(cluster, request)
    yield from (_WhatIf(words, cluster, other) for words, other in _other_request(cluster, request))


def _other_tiers(cluster: Cluster, request: PlanRequest) -> Iterator[_WhatIf]:
    """Where paging is allowed: more of the device, and faster wires as far as the cluster says them."""
    memory = request.memory
    if memory is None:
        return
    if memory.device_bytes is not None:
        more = replace(memory, device_bytes=_TIMES * memory.device_bytes)
        yield _WhatIf(f"{_TIMES} × the device memory that is allowed", cluster, replace(request, memory=more))
    if any(server.disk_bytes_per_s for server in cluster.servers):
        servers = (replace(one, disk_bytes_per_s=_more(one.disk_bytes_per_s)) for one in cluster.servers)
        disks = replace(cluster, servers=tuple(servers))
        yield _WhatIf(f"{_TIMES} × the bandwidth of the disks", disks, request)
    if any(device.device.host_bytes_per_s for device in cluster.devices()):
        wires = cluster.with_devices(lambda own: replace(own, host_bytes_per_s=_more(own.host_bytes_per_s)))
        yield _WhatIf(f"{_TIMES} × the bandwidth between devices and hosts", wires, request)


def _most_frequent(things: Iterable[_Thing]) -> list[_Thing]:
    return [thing for thing, _ in Counter(things).most_common(_MOST_KINDS)]


def _larger(cluster: Cluster, device: Device) -> Cluster:
    more = replace(device, memory_bytes=_TIMES * device.memory_bytes)
    return cluster.with_devices(lambda own: more if own == device else own)


def _more(bytes_per_s: float) -> float:
    return min(_TIMES * bytes_per_s, MOST_BYTES_PER_S)


def _faster(link: Link) -> Link:
    back = link.back_bytes_per_s
    return replace(
        link,
        bytes_per_s=_more(link.bytes_per_s),
        back_bytes_per_s=None if back is None else _more(back),
        curve=tuple((n, link.latency_s + (s - link.latency_s) / _TIMES) for n, s in link.curve),
    )


def _with_link(cluster: Cluster, kind: type[Bridge | Mesh | Card], link: Link, faster: Link) -> Cluster:
    return cluster.with_links(
        lambda _, group: faster if isinstance(group, kind) and group.link == link else group.link
    )


def _other_request(cluster: Cluster, request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    batch, largest = _TIMES * request.batch_size, request.largest_batch
    yield (
        f"a batch of {batch} samples",
        replace(request, batch_size=batch, largest_batch=None if largest is None else max(batch, largest)),
    )
    if len(cluster.servers) > 1 and request.codec == "none" and not request.boundaries and request.depth != 1:
        yield "codecs on the boundaries", replace(request, codec=AUTO)
    is_summed = request.sums.is_dense and request.rounds is None and request.shard == "none"
    if is_summed and cluster.num_devices > 1 and request.width != 1:
        sums = sum_cost(parse_sum_codec(_HARMLESS), [(_MANY_ENTRIES,)])
        yield f"sums of gradients through {_HARMLESS}", replace(request, sums=sums)
    plain = PlanRequest(request.batch_size, sums=SumCost(gathered=request.sums.gathered))
    words = {
        "schedule": f"any schedule, not {request.schedule} alone",
        "synchronous": "delayed updates allowed",
        "memory_fraction": f"all of the memory instead of {request.memory_fraction:.0%}",
        "depth": f"another depth than {request.depth}",
        "width": f"another width than {request.width}",
        "micro_batch": f"other micro-batches than of {request.micro_batch}",
        "pinned": "no units pinned",
        "together": "no units kept together",
        "devices": f"all {cluster.num_devices} devices",
        "recompute": "recomputation where needed",
        "lookahead": "stages that may run further ahead",
        "stage_widths": "stages of any width",
        "sums": f"sums of gradients as they are, not through {request.sums.codec}",
    }
    if request.rounds is not None and request.rounds.state_share:
        fewer = replace(request.rounds, state_share=0.0)
        yield "averages of weights without the optimizer's state", replace(request, rounds=fewer)
    for name, sentence in words.items():
        usual = getattr(plain, name)
        if getattr(request, name) != usual:
            yield sentence, replace(request, **{name: usual})


# What each way to save memory would take alone, compared with the plan that would be best with room for
# everything.
#
# The planner mixes them; this says which of them pays. Each is planned for again, within the budgets.

Search = Callable[[Profile, Cluster, PlanRequest], Answer | NothingFits]
"""Finds the best plan within the budgets: any, or one that pages nothing."""


def with_single_ways(
    profile: Profile, cluster: Cluster, request: PlanRequest, answer: Answer, search: Search
) -> Answer:
    """The answer with these ways among its `memory_ways`; itself where memory is not short."""
    if not answer.memory_ways:
        return answer
    roomy = answer.memory_ways[-1].candidate
    assert roomy is not None, "there is always a plan with room for everything"
    first, *others = answer.memory_ways
    short = summarize(roomy)
    singles = [
        _way(words, partial(search, profile, cluster, asked))
        for words, asked in _asked(request, short.depth, short.width, max(short.micro_batch_sizes))
    ]
    return replace(answer, memory_ways=(first, *singles, *others))


def _asked(request: PlanRequest, depth: int, width: int, size: int) -> Iterator[tuple[str, PlanRequest]]:
    if request.recompute is not Recompute.NEVER:
        yield "only recomputation", replace(request, depth=depth, width=width, micro_batch=size)
    plain = replace(request, recompute=Recompute.NEVER)
    yield "only more stages", replace(plain, micro_batch=size)
    yield "only smaller micro-batches", replace(plain, depth=depth, width=width)


def _way(words: str, search: Callable[[], Answer | NothingFits]) -> MemoryWay:
    try:
        found = search()
    except BiremeError as error:
        return MemoryWay(words, None, str(error))
    return (
        MemoryWay(words, None, str(found)) if isinstance(found, NothingFits) else MemoryWay(words, found.best)
    )


@dataclass(frozen=True, slots=True)
class Help:
    """The best plan if something were otherwise. `gain` says how many times as much is trained in the same
    time; 1 is no help."""

    words: str
    candidate: Candidate
    gain: float


def explain(
    profile: Profile,
    cluster: Cluster,
    request: PlanRequest,
    answer: Answer,
    search: Callable[[Profile, Cluster, PlanRequest], object],
    *,
    tell: Progress = lambda *_: None,
) -> tuple[Help, ...]:
    """What each change would bring, the best first; what then fits nowhere or cannot be is left out."""
    found = []
    all_changes = list(changes(cluster, request))
    for place, change in enumerate(all_changes):
        tell(place / len(all_changes), f"planning with {change.words}")
        with suppress(BiremeError):
            other = search(profile, change.cluster, change.request)
            if isinstance(other, Answer):
                gain = answer.best.forecast.cost(request.goal) / other.best.forecast.cost(request.goal)
                found.append(Help(change.words, other.best, gain))
    tell(1.0, "done")
    return tuple(sorted(found, key=lambda one: -one.gain))
