"""The wire format: what is packed is what comes out, or there is an error that says whose message came."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.message_format import Arrival, TensorSpec, WireFormat
from bireme.schedule.instruction import Message

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
KEY = Message(forward=True, to_stage=1, batch=3, microbatch=2, half=1)
ACTIVATION = WireFormat([TensorSpec("hidden", (4, 16), torch.float32)])


def packed(wire: WireFormat, tensors: Mapping[str, Tensor], key: Message) -> Tensor:
    """A message with these tensors, where the first of them is."""
    parcel = wire.parcel(next((tensor.device for tensor in tensors.values()), torch.device("cpu")))
    parcel.address(key)
    parcel.pack(tensors)
    return parcel.message


def unpacked(wire: WireFormat, message: Tensor, key: Message) -> dict[str, Tensor]:
    """What is in a message where the one of that key is expected."""
    arrival = wire.arrival(key, message.device)
    arrival.message.copy_(message)
    return arrival.unpack(message.device)


def test_every_dtype_comes_out_as_it_went_in_bit_for_bit() -> None:
    wire, tensors = every_dtype()
    found = unpacked(wire, packed(wire, tensors, KEY), KEY)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(found[name], tensor), name


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=4), st.sampled_from(DTYPES)),
        max_size=5,
    )
)
def test_any_tensors_fit_into_one_message(forms: list[tuple[list[int], torch.dtype]]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {f"t{i}": _random(tuple(shape), dtype, generator) for i, (shape, dtype) in enumerate(forms)}
    wire = WireFormat(TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items())
    message = packed(wire, tensors, KEY)
    assert message.numel() == wire.num_bytes
    assert wire.num_bytes % 64 == 0
    found = unpacked(wire, message, KEY)
    assert all(same_bits(found[name], tensor) for name, tensor in tensors.items())


def test_tensors_are_aligned_views_of_the_message() -> None:
    wire, tensors = every_dtype()
    pool = torch.zeros(wire.num_bytes + 128, dtype=torch.uint8)
    arrival = Arrival(wire, KEY, pool[64 : 64 + wire.num_bytes])
    arrival.message.copy_(packed(wire, tensors, KEY))
    found = arrival.unpack(pool.device)
    for name, tensor in found.items():
        assert tensor.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr()
        assert tensor.storage_offset() * tensor.itemsize % 64 == 0, name
        assert tensor.is_contiguous()
        assert same_bits(tensor, tensors[name])


def test_a_packed_tensor_brings_no_graph_and_may_be_strided() -> None:
    weight = torch.randn(16, 4, requires_grad=True)
    message = packed(ACTIVATION, {"hidden": weight.t(), "not sent": weight}, KEY)
    assert not message.requires_grad
    received = unpacked(ACTIVATION, message, KEY)["hidden"].requires_grad_()
    (gradient,) = torch.autograd.grad(received.square().sum(), received)
    assert torch.equal(gradient, 2 * weight.detach().t())


@pytest.mark.parametrize(
    "key",
    [
        Message(True, 1, 0, 0, None),
        Message(False, 1, 0, 10**6, None),
        Message(True, 9, 2**40, None, None),
        KEY,
    ],
)
def test_a_header_names_every_message(key: Message) -> None:
    message = packed(ACTIVATION, {"hidden": torch.zeros(4, 16)}, key)
    assert "hidden" in unpacked(ACTIVATION, message, key)
    other = key._replace(batch=key.batch + 1)
    with pytest.raises(BiremeError, match="do not follow the same program") as caught:
        unpacked(ACTIVATION, message, other)
    assert f"expected the {other} (hidden float32 [4, 16], 320 bytes" in str(caught.value)
    assert f"but got the {key} (" in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("hidden", (2, 32), torch.float32),
        TensorSpec("hidden", (4, 16), torch.int32),
        TensorSpec("hidden", (64,), torch.float32),
    ],
)
def test_tensors_of_other_shapes_or_dtypes_are_refused_though_as_long(spec: TensorSpec) -> None:
    message = packed(WireFormat([spec]), {"hidden": torch.zeros(spec.shape, dtype=spec.dtype)}, KEY)
    with pytest.raises(
        BiremeError, match=r"micro-batch 2b of batch 3 into stage 1 .* other shapes or dtypes"
    ):
        unpacked(ACTIVATION, message, KEY)


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(BiremeError, match="is not a message of this version"):
        unpacked(ACTIVATION, torch.zeros(ACTIVATION.num_bytes, dtype=torch.uint8), KEY)


def test_a_tensor_that_does_not_fit_the_boundary_is_named() -> None:
    with pytest.raises(BiremeError, match=r"should carry hidden float32 \[4, 16\], but .* float32 \[3, 16\]"):
        packed(ACTIVATION, {"hidden": torch.zeros(3, 16)}, KEY)


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bits at all, where the dtype allows it."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    num_bytes = math.prod(shape) * dtype.itemsize
    return (
        torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def every_dtype() -> tuple[WireFormat, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tensors = {str(dtype): _random((3, 5), dtype, generator) for dtype in DTYPES}
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 7)
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    return WireFormat(specs), tensors
