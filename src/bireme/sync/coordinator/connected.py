"""Whether groups have joined all replicas: a union-find over the pairs that were in one group."""

from collections.abc import Collection, Iterable

__all__ = ["is_connected"]


def is_connected(replicas: Collection[int], pairs: Iterable[tuple[int, int]]) -> bool:
    """Whether each replica can be reached from each other one over the pairs; those of others count not."""
    root = {one: one for one in replicas}

    def found(one: int) -> int:
        while root[one] != one:
            root[one] = root[root[one]]
            one = root[one]
        return one

    parts = len(root)
    for one, other in pairs:
        if one in root and other in root and found(one) != found(other):
            root[found(one)] = found(other)
            parts -= 1
    return parts <= 1
