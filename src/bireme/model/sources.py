"""Where a model comes from, in one notation for files and the command line.

`gpt:layers=8,width=256,heads=8,vocab=256,context=128` is the built-in GPT, `hf:FOLDER` any transformers model
by its `config.json`, `python:package.module:function` and `file.py:function` the model that a function of the
user returns. A model is made on the meta device unless another is asked for, so that it costs no memory. The
network is never used, and code that lies in a model's folder is never run.
"""

import copy
import dataclasses
import hashlib
import importlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bireme.devices import device_called
from bireme.documents import read_json_object
from bireme.errors import BiremeError, closest, first_line
from bireme.grouping import grouped
from bireme.model.convert import named_tensors
from bireme.model.examples import example_inputs
from bireme.model.gpt import GPT, GPTConfig
from bireme.model.graph import Graph, ModelState
from bireme.model.nf4_operator import plain
from bireme.model.own_model import own_model
from bireme.model.part import ALL_LINEAR, WHOLE, LoraPart, TrainedPart
from bireme.model.shapes import has_weights
from bireme.model.weights import Weights
from bireme.user_code import PREFIX, names_function, optional_package, reason_of

# LoRA adapters through the peft library: added to a model before capture, saved so that peft loads them.
#
# The model keeps its class and its forward; its linear layers are wrapped in place. A wrapped parameter gets
# a longer name, `q_proj.base_layer.weight`; what its own folder and code call it is in `Adapter.base_names`.

_ADAPTER_WEIGHTS = "adapter_model.safetensors"

NAME = "default"
"""Under which peft keeps the adapter; its files leave it out."""

_PEFT_PREFIX = "base_model.model."
"""Before every name in peft's files."""

_WRAPPED = ".base_layer."

_LENGTHS = ".lora_magnitude_vector"
"""The parameters of DoRA that begin as the lengths of a weight's rows."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What was added to a model.

    `base` is the model without it, `adapted` the one that has it. `base_names` are the base's names of the
    parameters and buffers that are not the adapter's own, by their names now.
    """

    base: nn.Module
    adapted: nn.Module
    config: Any
    base_names: Mapping[str, str]

    def base_graph(self, graph: Graph) -> Graph:
        """The graph with the states of the base alone, under the base's names: for reading weights."""
        return replace(
            graph, parameters=self._of_base(graph.parameters), buffers=self._of_base(graph.buffers)
        )

    def _of_base(self, states: Iterable[ModelState]) -> tuple[ModelState, ...]:
        return tuple(
            replace(
                state,
                name=self.base_names[state.name],
                aliases=tuple(self.base_names[alias] for alias in state.aliases),
            )
            for state in states
            if state.name in self.base_names
        )

    def weights(self, graph: Graph, base: Weights, seed: int) -> Weights:
        """Gives states by their names now: those of the base from `base`, new ones of the adapter."""
        states = {state.name: state for state in graph.parameters}

        def given(names: Sequence[str]) -> dict[str, Tensor]:
            # The weight that each parameter of DoRA belongs to.
            lengths = {
                name: f"{name.partition(_LENGTHS)[0]}{_WRAPPED}weight" for name in names if _LENGTHS in name
            }
            wanted = [name for name in (*names, *lengths.values()) if name in self.base_names]
            old = base([*dict.fromkeys(self.base_names[name] for name in wanted)])
            found = {name: old[self.base_names[name]] for name in wanted}
            for name in names:
                if name in lengths:
                    weight = plain(found[lengths[name]], states[lengths[name]])
                    found[name] = torch.linalg.vector_norm(weight, dim=1).float()
                elif name not in found:
                    found[name] = _fresh(name, states[name].shape, seed)
            return {name: found[name] for name in names}

        return given

    def save(self, weights: Mapping[str, Tensor], folder: Path, base: str) -> None:
        """Write the adapter's weights and configuration in peft's format; `base` is where its model lies."""
        own = {}
        for name in weights:
            if name not in self.base_names:
                begin, _, end = name.rpartition(f".{NAME}")
                end = "" if begin.endswith(_LENGTHS) else end  # as peft's files have it
                own[f"{_PEFT_PREFIX}{begin}{end}"] = weights[name]
        save_file(own, str(folder / _ADAPTER_WEIGHTS), metadata={"format": "pt"})
        config = copy.copy(self.config)
        config.base_model_name_or_path = base
        config.inference_mode = True
        config.save_pretrained(str(folder))

    def merged(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights of the base with the adapter's products added, under the base's names; each is made
        when it is asked for.
        """
        return _Merged(self, weights)


class _Merged(Mapping[str, Tensor]):
    """An adapter and its base as one model's weights."""

    def __init__(self, adapter: Adapter, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._names = {old: name for name, old in adapter.base_names.items() if name in weights}
        self._base_names = adapter.base_names
        tied = {name for names in _names_by_tensor(adapter.base).values() if len(names) > 1 for name in names}
        self._layers: dict[str, tuple[str, Any]] = {}
        for path, module in adapter.adapted.named_modules():
            if not hasattr(module, "get_delta_weight"):
                continue
            weight = f"{path}.weight"
            if weight in tied:
                raise BiremeError(
                    f"{weight} is shared with another module, so the adapter cannot be added to it. Export "
                    "the adapter alone, or leave this module out of model.lora.targets."
                )
            self._layers[weight] = path, module

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[self._names[name]]
        if name not in self._layers:
            return tensor
        path, module = self._layers[name]
        own = [f"{path}.{inner}" for inner, _ in module.named_parameters()]
        layer = copy.deepcopy(module)
        state = {
            one.removeprefix(f"{path}."): self._weights[one] for one in own if one not in self._base_names
        }
        state["base_layer.weight"] = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        layer.load_state_dict(state, strict=False, assign=True)
        with torch.no_grad():
            layer.merge(adapter_names=[NAME])
        merged: Tensor = layer.get_base_layer().weight.detach()
        return merged.to(tensor.dtype).contiguous()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def add_adapter(model: nn.Module, lora: LoraPart) -> Adapter:
    """Wrap the targets of a model in place; only the adapter's parameters learn from then on."""
    peft = optional_package("peft", "lora", "model.lora")
    base = copy.deepcopy(model)
    before = _names_by_tensor(model)
    targets: Any = ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=2.0 * lora.rank if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        target_modules=targets,
        task_type="CAUSAL_LM" if type(model).__name__.endswith("ForCausalLM") else None,
    )
    modules = [name for name, _ in model.named_modules() if name]
    if targets != ALL_LINEAR:
        _check_targets(modules, lora.targets)
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it corrects by itself, and of merging, which we check
            peft.inject_adapter_in_model(config, model, adapter_name=NAME)
    except (ValueError, TypeError, NotImplementedError) as error:  # what peft raises for what it cannot adapt
        reason = first_line(error).rstrip(".")
        remedy = "Set model.lora.dropout = 0, or name" if "lora_dropout" in reason else "Name"
        raise BiremeError(
            f"No adapter can be added to {type(model).__name__}: {reason}. {remedy} modules that are linear "
            "layers, embeddings or convolutions in model.lora.targets."
        ) from error
    for name, module in model.named_modules() if lora.use_dora else ():
        if hasattr(module, "get_delta_weight") and not isinstance(module.get_base_layer(), nn.Linear):
            raise BiremeError(
                f"model.lora.use_dora is for linear layers, and {name} is a "
                f"{type(module.get_base_layer()).__name__}. Leave it out of model.lora.targets."
            )
    device = next((one.device for one in base.parameters()), torch.device("cpu"))
    for parameter in model.parameters():
        if id(parameter) not in before:
            parameter.data = parameter.data.to(device, dtype)
        parameter.requires_grad_(id(parameter) not in before)
    return Adapter(base, model, config, _base_names(model, before))


def _check_targets(modules: Sequence[str], targets: Iterable[str]) -> None:
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            ends = {name.rpartition(".")[2] for name in modules}
            raise BiremeError(
                f"model.lora.targets has {target!r}, but no module has this name or a name that ends so. "
                f"{closest(target, (end for end in ends if not end.isdecimal()))}"
            )


def _names_by_tensor(model: nn.Module) -> dict[int, list[str]]:
    return grouped((id(tensor), name) for name, tensor in named_tensors(model))


def _base_names(model: nn.Module, before: Mapping[int, list[str]]) -> dict[str, str]:
    """The earlier name of each tensor that was there before; tied ones keep theirs apart."""
    found = {}
    for name, tensor in named_tensors(model):
        names = before.get(id(tensor))
        if names is not None:
            bare = name.replace(_WRAPPED, ".")
            found[name] = bare if bare in names else names[0]
    return found


def _fresh(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A new parameter as peft initializes it: the product of the two is zero, so the model begins as it was.

    It depends on the seed and the name alone, not on which rank makes it.
    """
    tensor = torch.zeros(shape)
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
    )
    parts = name.split(".")
    if "lora_A" in parts:
        nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)
    elif "lora_embedding_B" in parts:
        nn.init.normal_(tensor, generator=generator)
    return tensor


# Choosing the parameters that learn, by patterns over the model's own names.


def choose_trainable(
    model: nn.Module, *, train: Iterable[str] | None = None, freeze: Iterable[str] | None = None
) -> None:
    """Let only the parameters that `train` matches learn, or let those that `freeze` matches not learn.

    A tied parameter is matched under any of its names. A pattern that matches nothing is an error, and so is
    a model in which nothing learns afterwards.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    if train is not None:
        chosen = _matched(model, named, train, "model.train")
        for parameter in named.values():
            parameter.requires_grad_(False)
        for name in chosen:
            named[name].requires_grad_(named[name].is_floating_point() or named[name].is_complex())
    if freeze is not None:
        for name in _matched(model, named, freeze, "model.freeze"):
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        key = "model.train" if train is not None else "model.freeze"
        raise BiremeError(f"With this {key} no parameter learns. Let at least one of {len(named)} learn.")


def _matched(
    model: nn.Module, named: Mapping[str, nn.Parameter], patterns: Iterable[str], key: str
) -> list[str]:
    found: dict[str, None] = {}
    for pattern in patterns:
        own = [name for name in named if fnmatchcase(name, pattern)]
        if not own:
            modules = {f"{module}.*" for name in named for module in _modules_around(name)}
            raise BiremeError(
                f"{key} has {pattern!r}, which matches none of the model's {len(named)} parameters. "
                f"{closest(pattern, [*modules, *named])}"
            )
        found.update(dict.fromkeys(own))
    return list(found)


def _modules_around(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


_NOTATIONS = (
    "gpt:layers=8,width=256,heads=8,vocab=256,context=128",
    "hf:FOLDER",
    "python:package.module:function",
    "file.py:function",
)
"""How a model can be named, by example."""

_FITTING = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
)
"""Where transformers lists the models that a configuration can be of, by task, the likeliest task first."""


_LARGEST_BATCH, _LONGEST = 2**20, 2**24
"""The bounds of the example inputs: samples, and tokens of a sequence."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model and its example inputs. `folder` holds its weights, None if no folder does. `adapter` is the
    adapter that was added to it, if there is one. `is_own` if a function of the user makes the model.

    The inputs are on the model's device. Where that is meta they are on the CPU, so that they hold numbers,
    but for those that a function of the user's made on meta.
    """

    text: str
    model: nn.Module
    example_inputs: dict[str, Tensor]
    folder: Path | None = None
    adapter: Adapter | None = None
    is_own: bool = False

    @property
    def base(self) -> nn.Module:
        """The model without an adapter: its own code and its folder know the names in it."""
        return self.model if self.adapter is None else self.adapter.base

    def base_graph(self, graph: Graph) -> Graph:
        """A graph of the model with the states of the base alone, by the base's names."""
        return graph if self.adapter is None else self.adapter.base_graph(graph)


def load_source(
    text: str,
    *,
    batch: int = 1,
    length: int | None = None,
    device: str = "meta",
    dtype: str | None = None,
    training: bool = True,
    part: TrainedPart = WHOLE,
    weights: Path | None = None,
    seed: int = 0,
) -> ModelSource:
    """The model that `text` names, in training or evaluation mode, with inputs of `batch` samples.

    Of it `part` learns.

    `length` is that of made sequences where the source leaves it open, `dtype` that of parameters and of all
    else that is not whole numbers. `weights` is a folder that holds them, in place of the source's own; no
    weights in a folder are read here. A function of the user is called with random numbers from `seed`.
    """
    for name, number, largest in (("batch", batch, _LARGEST_BATCH), ("length", length, _LONGEST)):
        if number is not None and not 1 <= number <= largest:
            raise BiremeError(f"The {name} is {number}; it must be at least 1 and at most {largest:,}.")
    where = device_called(device)
    kind, colon, rest = text.partition(":")
    folder, is_own = weights, False
    match kind if colon else "":
        case "gpt":
            model, inputs = _from_sizes(rest, batch, where)
        case "hf":
            model, inputs = _from_folder(Path(rest), batch, length, where)
            if folder is None and has_weights(Path(rest)):
                folder = Path(rest)
        case _ if _is_function(text):
            model, inputs = own_model(text, batch, length, where, seed)
            is_own = True
        case _:
            raise BiremeError(f"There is no model source {text!r}. Use one of: {', '.join(_NOTATIONS)}.")
    if dtype is not None:
        model, inputs = _converted(model, inputs, dtype)
    if part.train is not None or part.freeze is not None:
        choose_trainable(model, train=part.train, freeze=part.freeze)
    adapter = None if part.lora is None else add_adapter(model, part.lora)
    return ModelSource(text, model.train(training), inputs, folder, adapter, is_own)


def _is_function(text: str) -> bool:
    """Whether a source names a function of the user. Without `python:` its module must have a dot."""
    return text.startswith(PREFIX) or (names_function(text) and "." in text.rpartition(":")[0])


Made = tuple[nn.Module, dict[str, Tensor]]

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def _converted(model: nn.Module, inputs: dict[str, Tensor], dtype: str) -> Made:
    if dtype not in _DTYPES:
        raise BiremeError(f"There is no number format {dtype!r} for a model. {closest(dtype, _DTYPES)}")
    kind: torch.dtype = getattr(torch, dtype)
    floating = {name: tensor.to(kind) for name, tensor in inputs.items() if tensor.is_floating_point()}
    return model.to(kind), inputs | floating


def _from_sizes(text: str, batch: int, device: torch.device) -> Made:
    config = _gpt_config(text)
    with device:
        model = GPT(config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab, (batch, config.context), generator=generator)
    ids = ids if device.type == "meta" else ids.to(device)
    return model, {"input_ids": ids, "labels": ids.clone()}


def _gpt_config(text: str) -> GPTConfig:
    fields = {field.name: field for field in dataclasses.fields(GPTConfig)}
    given: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise BiremeError(f"gpt: has {part!r}, which is not of the form key=value, such as layers=8.")
        if key not in fields:
            raise BiremeError(f"gpt: has an unknown key {key!r}. {closest(key, fields)}")
        if key in given:
            raise BiremeError(f"gpt: has the key {key!r} twice. Leave one of them out.")
        given[key] = _number(key, value, fields[key].type)
    missing = [
        name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in given
    ]
    if missing:
        raise BiremeError(f"gpt: lacks {', '.join(missing)}. Write it as in {_NOTATIONS[0]}.")
    return GPTConfig(**given)


def _number(key: str, value: str, kind: Any) -> int | float | bool:
    if kind is bool:
        if value in ("true", "false"):
            return value == "true"
        raise BiremeError(f"gpt: has {key}={value}; {key} must be true or false.")
    try:
        number: int | float = kind(value)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise BiremeError(f"gpt: has {key}={value}; {key} must be {wanted}.") from None
    return number


def _from_folder(folder: Path, batch: int, length: int | None, device: torch.device) -> Made:
    content = _config_content(folder)
    transformers = optional_package("transformers", "hf", f"hf:{folder}")
    kind = content.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        named = f"the model_type {kind!r}, which transformers {transformers.__version__} does not know"
        remedy = (
            "The code of such a model is in its folder, and Bireme never runs code from there. Load "
            f"it in a function of your own, given as {_NOTATIONS[2]}."
            if content.get("auto_map")
            else "Try a newer transformers."
        )
        raise BiremeError(f"{folder}/config.json has {named if kind else 'no model_type'}. {remedy}")
    load = transformers.AutoConfig.from_pretrained
    try:
        with offline(), device:  # some models would fetch a part of theirs when they are made
            config = load(str(folder), local_files_only=True, trust_remote_code=False)
            model = _model_class(transformers, config)(config)
    except Exception as error:  # a configuration's mistakes come as whatever the model stumbles over
        raise BiremeError(f"No model can be made from {folder}/config.json: {reason_of(error)}.") from error
    said = json.dumps([content, str(device)], sort_keys=True)
    return model, example_inputs(model, config, batch, length, known_as=said)


def _config_content(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not folder.is_dir():
        raise BiremeError(
            f"There is no folder {folder}. hf: takes one with a config.json; nothing is downloaded."
        )
    if not path.is_file():
        raise BiremeError(
            f"The folder {folder} has no config.json, so it holds no transformers model. Name one that does."
        )
    return read_json_object(path)


def _model_class(transformers: Any, config: Any) -> Callable[[Any], nn.Module]:
    """The class that the configuration names, else the one of the likeliest task."""
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
    for task in _FITTING:
        mapping = getattr(transformers, task, {})
        if type(config) in mapping:
            fitting = mapping[type(config)]
            likeliest: Callable[[Any], nn.Module] = fitting[0] if isinstance(fitting, tuple) else fitting
            return likeliest
    raise LookupError(f"transformers has no model with a loss for the model_type {config.model_type!r}")


@contextmanager
def offline(*also: Any) -> Iterator[None]:
    """Keep the Hugging Face libraries from the network: the Hub's, and others by their configurations."""
    kept = [importlib.import_module("huggingface_hub.constants"), *also]
    before = [one.HF_HUB_OFFLINE for one in kept]
    for one in kept:
        one.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for one, was in zip(kept, before, strict=True):
            one.HF_HUB_OFFLINE = was
