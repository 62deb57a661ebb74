"""Digests of weights: every bit counts, and who differs is found by all alike."""

import pytest
import torch

from bireme.sync.rounds import contribution
from bireme.sync.rounds.contribution import NO_DIGEST, Digest, differing, digest_of


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_a_digest_changes_with_each_bit_of_each_tensor(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: (8 * torch.randn(size, generator=generator)).to(dtype) for name, size in (("a", 3), ("b", 2))
    }
    found = {digest_of(tensors)}
    assert found == {digest_of({name: tensors[name].clone() for name in reversed(tensors)})}
    for name, tensor in tensors.items():
        for bit in range(8 * tensor.nbytes):
            other = tensor.clone()
            other.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
            found.add(digest_of({**tensors, name: other}))
    assert len(found) == 1 + 8 * sum(one.nbytes for one in tensors.values())


def test_a_digest_knows_the_places_of_equal_numbers_across_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contribution, "SLICE", 8)
    found = {digest_of({"a": torch.eye(29, dtype=torch.int16)[place]}) for place in range(29)}
    assert len(found) == 29


def digests(*rows: tuple[int, int, int, int]) -> dict[int, Digest]:
    return {member: Digest(*row) for member, row in enumerate(rows)}


def test_who_has_other_weights_than_most_or_than_the_leader_differs() -> None:
    assert differing(digests((4, 11, 0, 0), (4, 11, 0, 0), (4, 12, 0, 0))) == {2}
    assert differing(digests((4, 12, 0, 0), (4, 11, 0, 0), (4, 11, 0, 0))) == {0}
    assert differing(digests((4, 12, 0, 0), (4, 11, 0, 0))) == {1}
    assert differing(digests((4, 12, 0, 9), (4, 11, 0, 2))) == {0}
    assert differing(digests((4, 12, 0, 0), (4, 11, 0, 0), (4, 11, 0, 0), (4, 12, 0, 0))) == {1, 2}


def test_digests_of_other_versions_or_other_kinds_of_devices_say_nothing() -> None:
    assert differing(digests((4, 11, 0, 0), (8, 12, 0, 0), (4, 13, 7, 0))) == set()
    assert differing({0: NO_DIGEST, 1: NO_DIGEST, 2: Digest(4, 11, 0, 0)}) == set()
