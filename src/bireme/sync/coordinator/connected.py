"""Whether groups have joined all replicas: which can be reached from which over the pairs in one group."""

from collections.abc import Collection, Iterable

__all__ = ["connected_to", "is_connected"]


def is_connected(replicas: Collection[int], pairs: Iterable[tuple[int, int]]) -> bool:
    """Whether each replica can be reached from each other one over the pairs; those of others count not."""
    first = next(iter(replicas), None)
    return first is None or len(connected_to(first, replicas, pairs)) == len(set(replicas))


def connected_to(one: int, replicas: Collection[int], pairs: Iterable[tuple[int, int]]) -> set[int]:
    """The replicas that can be reached from one over the pairs, itself among them."""
    beside: dict[int, list[int]] = {replica: [] for replica in replicas}
    for left, right in pairs:
        if left in beside and right in beside:
            beside[left].append(right)
            beside[right].append(left)
    found, todo = {one}, [one]
    while todo:
        new = [other for other in beside.get(todo.pop(), ()) if other not in found]
        found.update(new)
        todo += new
    return found
