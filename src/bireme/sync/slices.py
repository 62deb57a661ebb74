"""Into which slices sums over replicas are cut, and what memory those take that are on their way."""

SLICE_BYTES = 25 * 2**20
"""Of gradients that all members get the sums of through a codec."""

DENSE_SLICE_BYTES = 2**22
"""Of gradients that are summed as they are: what members send each other lies beside them."""

NUM_IN_FLIGHT = 3
"""How many slices may be on their way at once, before one more is begun."""

_NUM_BUCKETS = 6
"""Of gradients whose sums begin during a backward. The last bucket is summed after it, so small ones are
better; but each takes messages of its own.
"""

_LEAST_BUCKET_BYTES = 2**17
_LEAST_CODED_BYTES = 2**18
"""For each member: to code fewer values at once takes longer for each of them."""


def bucket_bytes(gradient_bytes: float, num_coders: int = 0) -> float:
    """The least size of a bucket, but for the last, of gradients of that size in all. If the sums go through
    a codec, `num_coders` members code each bucket.
    """
    least = max(_LEAST_BUCKET_BYTES, num_coders * _LEAST_CODED_BYTES)
    return max(min(gradient_bytes / _NUM_BUCKETS, DENSE_SLICE_BYTES), least)


DENSE_BYTES_IN_FLIGHT = (NUM_IN_FLIGHT + 1) * DENSE_SLICE_BYTES
"""Of gradients, the most that are under way at once while they are summed in parts."""


def beside_parts(num_members: int) -> float:
    """The bytes that a member needs besides for each byte of its gradients that is under way to be summed in
    parts.

    It has room for what the others send. What it sends them it copies only where there are several of them,
    for then it does not lie together.
    """
    copies = 1 if num_members == 2 else 2
    return copies * (num_members - 1) / num_members


def part_sum_bytes(gradient_bytes: float, num_members: int) -> float:
    """The most memory that a member needs beside its gradients while these are summed in parts."""
    return beside_parts(num_members) * min(gradient_bytes, DENSE_BYTES_IN_FLIGHT)
