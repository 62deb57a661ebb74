"""The latencies of links, from those of the ways that lead over them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from bireme.cluster.cluster import Cluster
from bireme.cluster.links import Bridge, Card, Link, Mesh
from bireme.cluster.server import Server

__all__ = ["groups_of", "with_latencies"]


def with_latencies(shape: Cluster, latency_s: Mapping[tuple[int, int], float]) -> Cluster:
    """The latencies of the links, such that those of all ways come out as nearly as can be."""
    links: list[tuple[int, str]] = []
    for number, server in enumerate(shape.servers):
        links += [(number, group.name) for group in groups_of(server)]
    if not links:
        return shape
    pairs = list(latency_s)
    crossed = np.zeros((len(pairs), len(links)))
    for column, (number, name) in enumerate(links):
        probe = _late(shape, {(number, name): 1.0})
        crossed[:, column] = [probe.latency(*pair) for pair in pairs]
    seconds = _least_squares(crossed, np.array([latency_s[pair] for pair in pairs]))
    return _late(shape, dict(zip(links, seconds, strict=True)))


def groups_of(server: Server) -> tuple[Bridge | Mesh | Card, ...]:
    """All links of a server."""
    return (*server.bridges, *server.meshes, *server.cards)


def _late(shape: Cluster, latency_s: dict[tuple[int, str], float]) -> Cluster:
    """The structure with these latencies, and none elsewhere."""
    servers = []
    for number, server in enumerate(shape.servers):

        def link(group: Bridge | Mesh | Card, number: int = number) -> Link:
            return replace(group.link, latency_s=latency_s.get((number, group.name), 0.0))

        servers.append(
            replace(
                server,
                bridges=tuple(replace(one, link=link(one)) for one in server.bridges),
                meshes=tuple(replace(one, link=link(one)) for one in server.meshes),
                cards=tuple(replace(one, link=link(one)) for one in server.cards),
            )
        )
    return Cluster(tuple(servers), shape.switch)


SWEEPS = 4000


def _least_squares(
    matrix: "np.ndarray[tuple[int, int], np.dtype[np.float64]]",
    wanted: "np.ndarray[tuple[int], np.dtype[np.float64]]",
) -> list[float]:
    """What makes `matrix` times it most nearly what is wanted, with nothing below zero; one at a time."""
    square, target = matrix.T @ matrix, matrix.T @ wanted
    known = np.zeros(len(target))
    for _ in range(SWEEPS):
        before = known.copy()
        for column in range(len(known)):
            if square[column, column] > 0:
                rest = target[column] - square[column] @ known
                known[column] = max(known[column] + rest / square[column, column], 0.0)
        if np.abs(known - before).max(initial=0.0) <= 1e-12 * np.abs(known).max(initial=0.0):
            break
    return [float(one) for one in known]
