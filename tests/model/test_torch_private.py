"""One file of a room reaches for torch's private names, so that a new torch breaks one file."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import bireme.model
from bireme.model.torch_private import as_in_capture, fake_tensors, schema_of, storage_id, version_of

ROOM = Path(bireme.model.__path__[0])
OTHERS = sorted(path for path in ROOM.glob("*.py") if path.name != "torch_private.py")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(source: str) -> Iterator[str]:
    """What is imported from torch under a private name, and private attributes of anything but `self`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                paths = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                paths = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=attribute) if is_private(attribute):
                yield attribute
                continue
            case _:
                continue
        for path in paths:
            first, *rest = path.split(".")
            if first == "torch" and any(is_private(part) for part in rest):
                yield path


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_no_other_file_of_the_room_uses_a_private_name(path: Path) -> None:
    assert list(private_names(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._ops",
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "from torch import _C",
        "found = torch._ops.OpOverload",
        "number = tensor.untyped_storage()._cdata",
    ],
)
def test_a_private_name_is_found_wherever_it_stands(source: str) -> None:
    assert list(private_names(source))


def test_tensors_that_share_memory_have_one_storage_with_and_without_numbers() -> None:
    for device in ("cpu", "meta"):
        tensor, other = torch.ones(4, device=device), torch.ones(4, device=device)
        assert storage_id(tensor[1:]) == storage_id(tensor.view(2, 2))
        assert storage_id(tensor) != storage_id(other)


def test_fake_tensors_have_shapes_devices_and_no_numbers() -> None:
    outside = nn.Linear(4, 2)
    with fake_tensors():
        made = outside(torch.ones(3, 4))
    assert made.shape == (3, 2)
    assert made.device.type == "cpu"
    assert type(made) is not torch.Tensor


def test_code_is_told_that_it_is_exported() -> None:
    assert not torch.compiler.is_exporting()
    with as_in_capture():
        assert torch.compiler.is_exporting()
    assert not torch.compiler.is_exporting()


def test_a_write_is_counted_and_a_schema_says_where_an_operator_writes() -> None:
    tensor = torch.zeros(2)
    before = version_of(tensor)
    tensor.add_(1)
    assert version_of(tensor) == before + 1
    schema = schema_of(torch.ops.aten.add_.Tensor)
    assert schema is not None
    written = [argument.name for argument in schema.arguments if argument.alias_info is not None]
    assert written == ["self"]
    assert schema_of(len) is None


@pytest.mark.slow
def test_a_rank_makes_weights_without_torchs_compiler() -> None:
    """Each process would import it for a second, and keep 40 MB of it."""
    code = (
        "import sys\n"
        "from torch import nn\n"
        "from bireme.model.weights import materialize\n"
        "materialize(nn.LayerNorm(4), ['weight', 'bias'], seed=1)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
