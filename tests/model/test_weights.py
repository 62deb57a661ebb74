"""A stage's weights: from a seed the same whatever the stages are, from a folder only those asked for."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bireme.errors import BiremeError
from bireme.model import weights
from bireme.model.convert import dtype_name
from bireme.model.graph import Graph, ModelState
from bireme.model.weights import check_weights, load_weights, materialize, open_weights


class Block(nn.Module):
    """Parameters of its own beside those of a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3, 4))
        self.weight = nn.Parameter(torch.empty(4))
        self.shift = nn.Parameter(torch.empty(4))
        self.truncated = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)


class Tiny(nn.Module):
    """Initialized by itself, in a way that depends on the numbers drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, padding_idx=0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.recurrent = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 8, bias=True)
        self.head.weight = self.embedding.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Block):
            # Rejected numbers are drawn again, so how many there are is not known ahead.
            nn.init.trunc_normal_(module.truncated.weight, std=0.02, a=-0.02, b=0.02)
            nn.init.trunc_normal_(module.truncated.bias, std=0.02, a=-0.02, b=0.02)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers())]


def graph_of(model: nn.Module) -> Graph:
    """A graph without operators: only what the model holds."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    tensors: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for name, tensor in tensors.items():
        if first.setdefault(id(tensor), name) != name:
            aliases.setdefault(first[id(tensor)], []).append(name)
    persistent = set(model.state_dict())
    states = [
        ModelState(
            name=name,
            shape=tuple(tensors[name].shape),
            dtype=dtype_name(tensors[name].dtype),
            is_parameter=isinstance(tensors[name], nn.Parameter),
            persistent=name in persistent,
            aliases=tuple(aliases.get(name, ())),
        )
        for name in first.values()
    ]
    parameters = tuple(state for state in states if state.is_parameter)
    buffers = tuple(state for state in states if not state.is_parameter)
    return Graph("model", True, 1, True, (), parameters, buffers, (), (), ())


def transformers_model(kind: str) -> Callable[[], nn.Module]:
    transformers: Any = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**small, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    gpt2 = {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("ForCausalLM", {**text, "num_key_value_heads": 2}),
        "mixtral": ("ForCausalLM", {**text, "num_key_value_heads": 2, "num_local_experts": 12}),
        "gpt2": ("ForCausalLM", gpt2),
        "bert": ("ForMaskedLM", text),
        "t5": ("ForSeq2SeqLM", t5),
        "vit": ("ForImageClassification", {**small, "image_size": 16, "patch_size": 8}),
        "resnet": (
            "ForImageClassification",
            {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        ),
    }
    task, given = settings[kind]
    config = transformers.AutoConfig.for_model(kind, **given)
    return lambda: getattr(transformers, f"AutoModel{task}").from_config(config)


KINDS = ["llama", "mixtral", "gpt2", "bert", "t5", "vit", "resnet"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tiny", *KINDS])
def test_weights_from_a_seed_are_the_same_in_however_many_parts_they_are_made(kind: str) -> None:
    model = on_meta(Tiny if kind == "tiny" else transformers_model(kind))
    names = names_of(model)
    whole = materialize(model, names, seed=3)
    for count in (2, 3, 5):
        parts: dict[str, Tensor] = {}
        for part in range(count):
            parts |= materialize(model, names[part::count], seed=3)
        assert all(torch.equal(parts[name], whole[name]) for name in names)
    for name in names:
        assert torch.equal(materialize(model, [name], seed=3)[name], whole[name]), name
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_weights_from_a_seed_are_spread_as_the_model_spreads_them(kind: str) -> None:
    build = transformers_model(kind)
    torch.manual_seed(0)
    own = build()
    made = materialize(on_meta(build), names_of(own), seed=0)
    for name, tensor in own.named_parameters():
        if tensor.numel() >= 128:
            assert made[name].std().item() == pytest.approx(tensor.std().item(), rel=0.3), name
        if (tensor == tensor.flatten()[0]).all():
            assert torch.equal(made[name], tensor), name
    for name, buffer in own.named_buffers():
        assert torch.equal(made[name], buffer), name


def test_a_seed_and_a_name_make_a_tensor_their_own() -> None:
    model = on_meta(Tiny)
    names = [f"blocks.{index}.truncated.weight" for index in range(4)]
    one, other = materialize(model, names, seed=0), materialize(model, names, seed=1)
    for tensor in (one, other):
        assert all(tensor[name].abs().max() <= 0.02 for name in names)
    assert len({float(tensor[name][0, 0]) for tensor in (one, other) for name in names}) == 8


def test_parameters_that_no_code_initializes_have_the_values_written_down() -> None:
    made = materialize(on_meta(Tiny), [f"blocks.0.{name}" for name in ("scale", "weight", "shift")], seed=0)
    assert 0.005 < made["blocks.0.scale"].std() < 0.05
    assert torch.equal(made["blocks.0.weight"], torch.ones(4))
    assert torch.equal(made["blocks.0.shift"], torch.zeros(4))


def test_a_constant_of_a_model_with_numbers_is_kept() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.full((4,), 1e-6))

    assert torch.equal(materialize(Scaled(), ["gamma"], seed=0)["gamma"], torch.full((4,), 1e-6))


def test_a_tied_weight_is_one_tensor_made_where_it_is_first() -> None:
    made = materialize(on_meta(Tiny), ["head.weight", "embedding.weight"], seed=0)
    assert made["head.weight"] is made["embedding.weight"]
    assert torch.equal(made["head.weight"][0], torch.zeros(4))


def test_the_model_and_the_random_state_of_the_caller_are_left_alone() -> None:
    model = Tiny()
    tensors = {
        name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    state = torch.get_rng_state()
    materialize(model, names_of(model), seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(tensors)
    for name, (identity, numbers) in tensors.items():
        assert id(after[name]) == identity
        assert torch.equal(after[name].nan_to_num(), numbers.nan_to_num())


def test_precision_is_for_parameters_and_device_for_all() -> None:
    names = ["blocks.0.norm.weight", "blocks.0.norm.running_var", "blocks.0.norm.num_batches_tracked"]
    made = materialize(on_meta(Tiny), names, seed=0, dtype=torch.bfloat16, device="meta")
    assert [made[name].dtype for name in names] == [torch.bfloat16, torch.float32, torch.int64]
    assert all(tensor.is_meta for tensor in made.values())


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(3, 3).tril())


def test_a_buffer_nobody_can_know_on_the_meta_device_is_refused() -> None:
    assert torch.equal(materialize(Masked(), ["mask"], seed=0)["mask"], torch.ones(3, 3).tril())
    materialize(on_meta(Masked), ["linear.weight"], seed=0)
    with pytest.raises(BiremeError, match=r"buffer mask .*Build the model on the cpu"):
        materialize(on_meta(Masked), ["mask"], seed=0)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(BiremeError, match=r"linear\.wieght.*'linear\.weight'"):
        materialize(Masked(), ["linear.wieght"], seed=0)


def test_code_that_needs_more_than_its_module_is_refused() -> None:
    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.second.weight.copy_(self.first.weight)

    with pytest.raises(BiremeError, match="reset_parameters of the model cannot run for second"):
        materialize(Copying(), ["second.weight"], seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["1GB", "4KB"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_every_tensor_of_the_model_that_was_saved(
    tmp_path: Path, kind: str, shard: str
) -> None:
    pytest.importorskip("safetensors")
    build = transformers_model(kind)
    saved: Any = build()
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "4KB")
    graph = graph_of(saved)
    loaded = load_weights(graph, names_of(saved), tmp_path, model=on_meta(build))
    own = {**dict(saved.named_parameters()), **dict(saved.named_buffers())}
    assert set(loaded) == {s.name for s in (*graph.parameters, *graph.buffers) if s.persistent}
    for name, tensor in loaded.items():
        assert torch.equal(tensor, own[name]), name


class OnlyHeads:
    """A file of which no tensor can be read."""

    def __init__(self, handle: Any) -> None:
        self.keys, self.get_slice = handle.keys, handle.get_slice


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["1GB", "4KB"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt2", "resnet"])
def test_a_folder_is_checked_by_the_heads_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shard: str
) -> None:
    """With experts that are converted, tied weights and buffers; no tensor is read."""
    files = pytest.importorskip("safetensors.torch")
    build = transformers_model(kind)
    saved: Any = build()
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    graph, model = graph_of(saved), on_meta(build)
    really_open = files.safe_open

    @contextmanager
    def only_heads(*args: Any, **kwargs: Any) -> Iterator[OnlyHeads]:
        with really_open(*args, **kwargs) as handle:
            yield OnlyHeads(handle)

    with monkeypatch.context() as context:
        context.setattr("safetensors.safe_open", only_heads)
        check_weights(graph, tmp_path, model=model)
    lost, file = max(
        (key, file)
        for file in tmp_path.glob("*.safetensors")
        for key, tensor in files.load_file(file).items()
        if tensor.ndim > 1
    )
    tensors = files.load_file(file)
    files.save_file({key: value for key, value in tensors.items() if key != lost}, file)
    with pytest.raises(BiremeError, match=r"has no tensor|holds no|with the shape"):
        check_weights(graph, tmp_path, model=model)
    wrong = tensors[lost].flatten()[:-1].clone()
    files.save_file(tensors | {lost: wrong}, file)
    with pytest.raises(BiremeError, match=r"with the shape|does not fit"):
        check_weights(graph, tmp_path, model=model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards: two layers and a head that is tied to nothing."""
    save = pytest.importorskip("safetensors.torch").save_file
    where = {}
    for index, key in enumerate(["layers.0.weight", "layers.1.weight", "head.weight"]):
        file = f"model-{index}.safetensors"
        save({f"base.{key}": torch.full((2, 2), float(index))}, tmp_path / file)
        where[f"base.{key}"] = file
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return tmp_path


def holding(*names: str, prefix: str = "base.", aliases: tuple[str, ...] = ()) -> Graph:
    states = tuple(
        ModelState(prefix + name, (2, 2), "float32", True, True, aliases=aliases) for name in names
    )
    return Graph("model", True, 1, True, (), states, (), (), (), ())


def test_only_the_shards_that_are_needed_are_opened_and_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors

    opened: list[str] = []
    really_open = safetensors.safe_open

    def counted(path: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(path.name)
        return really_open(path, *args, **kwargs)

    monkeypatch.setattr(safetensors, "safe_open", counted)
    graph = holding("layers.0.weight", "layers.1.weight", "head.weight")
    load_weights(graph, ["base.layers.1.weight", "base.layers.1.weight"], folder)
    assert opened == ["model-1.safetensors"]


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="Linux lists what is mapped")
def test_files_of_a_large_model_are_not_resident_while_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"layers.{number}.weight" for number in range(16)]
    path = tmp_path / "model.safetensors"
    pytest.importorskip("safetensors.torch").save_file(
        {name: torch.full((256, 256), float(number)) for number, name in enumerate(names)}, path
    )
    states = tuple(ModelState(name, (256, 256), "bfloat16", True) for name in names)
    limit = 4 * 256 * 256 * 4
    monkeypatch.setattr(weights, "_MAPPED_BYTES", limit - 1)
    most = 0
    with open_weights(Graph("model", True, 1, True, (), states, (), (), (), ()), tmp_path) as read:
        for number, name in enumerate(names):
            assert (read(name) == number).all()
            most = max(most, mapped_bytes(path))
    assert 0 < most < 2 * limit < path.stat().st_size


def mapped_bytes(path: Path) -> int:
    """The resident bytes of a file that this process has mapped."""
    of_file, found = False, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            of_file = line.endswith(str(path))
        elif of_file and name == "Rss:":
            found += 1024 * int(rest[0])
    return found


@pytest.mark.parametrize("prefix", ["", "base.", "outer.base."])
def test_names_may_lack_or_have_a_word_at_their_front(folder: Path, prefix: str) -> None:
    loaded = load_weights(holding("layers.1.weight", prefix=prefix), [f"{prefix}layers.1.weight"], folder)
    assert torch.equal(loaded[f"{prefix}layers.1.weight"], torch.ones(2, 2))


def test_a_tied_weight_is_found_under_its_other_name(folder: Path) -> None:
    graph = holding("embedding.weight", aliases=("base.head.weight",))
    loaded = load_weights(graph, ["base.embedding.weight"], folder, dtype=torch.float64)
    assert torch.equal(loaded["base.embedding.weight"], torch.full((2, 2), 2.0, dtype=torch.float64))


def refused(folder: Path, sentence: str, *, names: str = "layers.1.weight") -> None:
    graph = holding(names)
    with pytest.raises(BiremeError, match=sentence):
        load_weights(graph, [f"base.{names}"], folder)


def test_a_missing_tensor_is_named_with_its_file(folder: Path) -> None:
    refused(folder, r"index\.json holds no tensor base\.layers\.2\.weight", names="layers.2.weight")


def test_an_ambiguous_tensor_is_refused(tmp_path: Path) -> None:
    save = pytest.importorskip("safetensors.torch").save_file
    save({"a.x": torch.ones(2, 2), "b.x": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(BiremeError, match=r"a\.x and b\.x"):
        load_weights(holding("x", prefix=""), ["x"], tmp_path)


def test_a_tensor_of_another_shape_is_named_with_its_file(folder: Path) -> None:
    graph = holding("layers.1.weight")
    wider = replace(graph, parameters=(replace(graph.parameters[0], shape=(2, 3)),))
    with pytest.raises(BiremeError, match=r"model-1\.safetensors holds base\.layers\.1\.weight .*\(2, 2\)"):
        load_weights(wider, ["base.layers.1.weight"], folder)


def test_a_missing_or_damaged_file_is_named(folder: Path) -> None:
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    refused(folder, r"model-1\.safetensors is damaged or truncated")
    file.unlink()
    refused(folder, r"model-1\.safetensors is missing")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x')
    refused(folder, r"index\.json is damaged")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x"}}')
    refused(folder, "outside of its folder")
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "holds no weights")


def test_without_the_package_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    refused(folder, r"bireme\[hf\]")
