"""How gradients are laid into messages, and their norm."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bireme.sync.buckets import plan_buckets
from bireme.sync.norm import CHUNK_ELEMENTS, squared_norm


@given(
    st.dictionaries(
        st.text("abcd.", min_size=1, max_size=4),
        st.tuples(st.integers(0, 40), st.sampled_from((torch.float32, torch.bfloat16, torch.float64))),
        max_size=12,
    ),
    st.integers(8, 200),
)
def test_every_gradient_is_in_one_bucket_of_bounded_size(
    forms: dict[str, tuple[int, torch.dtype]], bucket_bytes: int
) -> None:
    templates = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in forms.items()}
    buckets = plan_buckets(templates, bucket_bytes)
    assert sorted(name for bucket in buckets for name in bucket.names) == sorted(templates)
    for bucket in buckets:
        assert bucket.num_elements == sum(templates[name].numel() for name in bucket.names)
        assert len(bucket.names) == 1 or bucket.num_elements * bucket.dtype.itemsize <= bucket_bytes
        assert all(bucket.dtype.itemsize >= templates[name].itemsize for name in bucket.names)
    assert buckets == plan_buckets(dict(reversed(templates.items())), bucket_bytes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS + 3])
def test_the_squared_norm_is_that_of_float64(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(size, 2, dtype=torch.float64).to(dtype).t()
    assert squared_norm(tensor) == pytest.approx(float(tensor.double().square().sum()), rel=1e-13)
