"""LoRA adapters through the peft library: added to a model before capture, saved so that peft loads them.

The model keeps its class and its forward; its linear layers are wrapped in place. A wrapped parameter gets a
longer name, `q_proj.base_layer.weight`; what its own folder and code call it is in `Adapter.base_names`.
"""

import copy
import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bireme.errors import BiremeError, closest
from bireme.model.convert import named_tensors
from bireme.model.graph import Graph, ModelState
from bireme.model.nf4_operator import plain
from bireme.model.part import ALL_LINEAR, LoraPart
from bireme.model.weights import Weights
from bireme.user_code import optional_package

_ADAPTER_WEIGHTS = "adapter_model.safetensors"

NAME = "default"
"""Under which peft keeps the adapter; its files leave it out."""

PREFIX = "base_model.model."
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
                own[f"{PREFIX}{begin}{end}"] = weights[name]
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
        reason = str(error).strip().partition("\n")[0].rstrip(".")
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
    found: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        found.setdefault(id(tensor), []).append(name)
    return found


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
