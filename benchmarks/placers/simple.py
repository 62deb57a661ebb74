"""Everything on one device, and PipeDream's way to place. Neither proves a bound."""

from dataclasses import replace

import networkx

from bireme.errors import BiremeError
from bireme.placement.contiguous import cut_chain
from bireme.placement.contraction import FoundPlacement, Items, fits, items_of, loads_of, value_of
from bireme.placement.workload import Objective, Workload


def single(items: Items, objective: Objective) -> FoundPlacement:
    """Everything on one accelerator, or on one CPU where it does not fit there.

    Raises `BiremeError` where neither takes it all.
    """
    firsts = ([0] if items.num_accelerators else []) + ([items.num_accelerators] if items.num_cpus else [])
    for device in firsts:
        where = (device,) * len(items)
        if fits(items, where):
            return _found(items, objective, where)
    raise BiremeError(
        f"No single device takes it all: the operators take {items.size.sum():g} bytes, an accelerator has "
        f"{items.accelerator_bytes:g}, {int((~items.supported).sum())} of {len(items)} groups of operators "
        "need a CPU, and there is none. Use a method that splits."
    )


def pipedream(workload: Workload, objective: Objective) -> tuple[FoundPlacement, Items]:
    """PipeDream's way: make the graph a chain, then cut that in the best way; and the items of the chain.

    Parallel branches become one: of each biconnected component all but the last operators are merged. What
    is not a chain even so is taken in a topological order. Raises `BiremeError` where no cut fits.
    """
    items = items_of(_without_branches(workload, items_of(workload, contiguous=True)), contiguous=True)
    return cut_chain(items, objective), items


def _found(items: Items, objective: Objective, where: tuple[int, ...]) -> FoundPlacement:
    return FoundPlacement(where, value_of(loads_of(items, where), objective), 0.0)


def _without_branches(workload: Workload, items: Items) -> Workload:
    """The workload with one colour for all that a chain cannot tell apart."""
    edges = [(tail, head) for tail in range(len(items)) for head in items.after.row(tail)]
    together = networkx.empty_graph(len(items))
    for component in networkx.biconnected_component_edges(networkx.Graph(edges)):
        # Items are in an order that all edges follow, so the tail is the lesser end.
        networkx.add_path(together, sorted({min(edge) for edge in component}))
    nodes = list(workload.nodes)
    for colour, found in enumerate(networkx.connected_components(together)):
        group = sorted(found)
        if not workload.num_cpus:
            _check_room(items, group)
        for item in group:
            for place in items.members[item]:
                nodes[place] = replace(nodes[place], colour=colour)
    return replace(workload, nodes=tuple(nodes))


def _check_room(items: Items, group: list[int]) -> None:
    size = items.size[group].sum()
    if size > items.accelerator_bytes:
        raise BiremeError(
            f"PipeDream's chain does not fit: branches that it keeps together take {size:g} bytes, an "
            f"accelerator has {items.accelerator_bytes:g}, and there is no CPU. Use a method that parts "
            "branches."
        )
