"""Inputs for a model that came without any, made from its configuration and the signature of its forward.

What a model is called with is read from the names its forward accepts; how its labels look, from what it
returns for those inputs when it runs once on tensors without numbers. The same model always gets the same.
"""

import inspect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bireme.errors import BiremeError, first_line
from bireme.model.torch_private import NUMBERS_NEEDED, as_in_capture, fake_tensors

LONGEST = 128
"""Sequences get this many tokens where the model takes as many and nobody says otherwise."""

_IMAGE_SIZE = 224
_NUM_CHANNELS = 3
_NUM_SAMPLES = 16_000
"""Of what the configuration of a model for images or sound does not say: pixels, channels, samples."""

_PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")
"""Where the configuration of a model made of models keeps theirs."""

_Shape = tuple[int, ...]

_known: dict[Hashable, _Shape | None] = {}
"""The shapes of logits of models that ran before in this process."""

_OWN_INPUTS = "Write a function that returns (model, inputs) and give it as file.py:function."


def example_inputs(
    model: torch.nn.Module,
    config: object,
    batch: int,
    length: int | None = None,
    *,
    known_as: str | None = None,
) -> dict[str, Tensor]:
    """Inputs and labels by name; the first axis of each is the batch.

    They are on the model's device, or on the CPU where the model holds no numbers: they do hold some.

    `config` holds the sizes under the names that transformers uses. `length` is that of sequences. A model
    whose text `known_as` says all of it need not run again: a process makes the same one more than once.
    """
    accepted = set(inspect.signature(model.forward).parameters)
    maker = _Maker(config, batch, length)
    inputs = _without_labels(maker, accepted, type(model).__name__)
    key = known_as, batch, length
    is_known = known_as is not None and key in _known
    logits = _known.get(key)
    if not is_known and (made := _returned(model, inputs).get("logits")) is not None:
        logits = tuple(made.shape)
    inputs |= _labels(maker, accepted, inputs, logits)
    if not is_known and "labels" in inputs:
        _check_loss(model, inputs)
    if known_as is not None:
        _known[key] = logits
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return inputs if device.type == "meta" else {name: tensor.to(device) for name, tensor in inputs.items()}


@dataclass(slots=True)
class _Maker:
    """Makes tensors of the sizes in a configuration; always the same ones."""

    config: object
    batch: int
    length: int | None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def size(self, *names: str) -> Any:
        """The first of these fields that the configuration or one of its parts has, or None."""
        for part in (self.config, *(getattr(self.config, name, None) for name in _PARTS)):
            for name in names:
                value = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
                if value is not None:
                    return value
        return None

    def ids(self, *longest: str) -> Tensor:
        """Token ids; `longest` are the fields that say how many a sequence can have."""
        vocab = self.size("vocab_size")
        if vocab is None:
            raise BiremeError(
                f"The model's configuration lacks vocab_size, so no token ids can be made. {_OWN_INPUTS}"
            )
        most = self.size(*longest)
        if self.length is not None and most is not None and self.length > most:
            raise BiremeError(f"Sequences of {self.length} tokens do not fit: the model takes {most}.")
        length = self.length or min(LONGEST, most or LONGEST)
        return self.below(int(vocab), self.batch, length)

    def below(self, end: int, *shape: int) -> Tensor:
        """Whole numbers from 0 up to but without `end`."""
        return torch.randint(end, shape, generator=self.generator)

    def real(self, *shape: int) -> Tensor:
        """Normally distributed numbers."""
        return torch.randn(shape, generator=self.generator)

    def pixels(self) -> Tensor:
        """Images."""
        size = self.size("image_size") or _IMAGE_SIZE
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        return self.real(self.batch, self.size("num_channels") or _NUM_CHANNELS, height, width)


def _without_labels(maker: _Maker, accepted: set[str], model: str) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    if "input_ids" in accepted:
        inputs["input_ids"] = maker.ids("max_position_embeddings", "n_positions", "max_source_positions")
    # A model that learns to write text may look at pictures; one that compares the two must.
    if "pixel_values" in accepted and not {"input_ids", "labels"} <= accepted:
        inputs["pixel_values"] = maker.pixels()
    frequencies = maker.size("num_mel_bins")
    if "input_features" in accepted and frequencies is not None and maker.size("max_source_positions"):
        inputs["input_features"] = maker.real(
            maker.batch, frequencies, 2 * maker.size("max_source_positions")
        )
    if "input_values" in accepted and frequencies is None:
        inputs["input_values"] = maker.real(maker.batch, _NUM_SAMPLES)
    elif "input_values" in accepted and maker.size("max_length"):
        inputs["input_values"] = maker.real(maker.batch, maker.size("max_length"), frequencies)
    if not inputs:
        raise BiremeError(
            f"No example inputs can be made for {model}: its forward accepts {', '.join(sorted(accepted))}, "
            f"of which none is known. {_OWN_INPUTS}"
        )
    if "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = maker.ids(
            "max_target_positions", "max_position_embeddings", "n_positions"
        )
    return inputs


def _labels(
    maker: _Maker, accepted: set[str], inputs: dict[str, Tensor], logits: _Shape | None
) -> dict[str, Tensor]:
    """What the model learns from: for each place or each sample, as its logits show."""
    if {"start_positions", "end_positions"} <= accepted:
        ends = {name: maker.below(inputs["input_ids"].shape[1], maker.batch) for name in ("start", "end")}
        return {f"{name}_positions": places for name, places in ends.items()}
    if "labels" not in accepted:
        return {}
    tokens = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    if logits is None or len(logits) < 2:
        # It did not say: a model that reads tokens mostly predicts tokens.
        labels = maker.below(2, maker.batch) if tokens is None else tokens.clone()
    elif "pixel_values" in inputs and len(logits) == 4:
        labels = maker.below(logits[1], maker.batch, *inputs["pixel_values"].shape[2:])
    elif tokens is not None and logits == tokens.shape != (maker.batch, maker.size("num_labels")):
        labels = maker.below(2, *tokens.shape)
    elif len(logits) == 2:
        labels = _label_per_sample(maker, logits[1])
    elif tokens is not None and logits[:-1] == tokens.shape and logits[-1] >= maker.size("vocab_size"):
        labels = tokens.clone()
    else:
        labels = maker.below(logits[-1], *logits[:-1])
    made = {"labels": labels}
    written = inputs.get("decoder_input_ids")
    if written is not None and labels.shape == written.shape:
        made["decoder_input_ids"] = _shifted(labels, maker)
    read = inputs.get("input_ids")
    # Where the model writes what it reads, all samples are full and a mask would only cost.
    if (
        "attention_mask" in accepted
        and read is not None
        and (written is not None or labels.shape != read.shape)
    ):
        made["attention_mask"] = torch.ones_like(read)
    return made


def _label_per_sample(maker: _Maker, num_labels: int) -> Tensor:
    problem = maker.size("problem_type")
    if problem == "multi_label_classification":
        return maker.below(2, maker.batch, num_labels).float()
    if problem == "regression" or num_labels == 1:
        return maker.real(maker.batch) if num_labels == 1 else maker.real(maker.batch, num_labels)
    return maker.below(num_labels, maker.batch)


def _shifted(labels: Tensor, maker: _Maker) -> Tensor:
    """What a decoder reads to predict the labels: all but the last, after the start token."""
    start = maker.size("decoder_start_token_id", "bos_token_id", "pad_token_id") or 0
    return torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)


def _returned(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """What the model returns, in shapes without numbers; nothing where only numbers could tell."""
    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    try:
        # As capture will see it, and as if on the CPU: what a model does can depend on both.
        with fake_tensors(), as_in_capture(), torch.no_grad():
            named = (*model.named_parameters(), *model.named_buffers())
            states = {name: torch.empty_like(tensor, device="cpu") for name, tensor in named}
            given = {name: torch.empty_like(tensor, device="cpu") for name, tensor in inputs.items()}
            returned = torch.func.functional_call(model, states, (), given | extra)
    except NUMBERS_NEEDED:
        return {}
    except Exception as error:
        raise BiremeError(
            f"{type(model).__name__} does not take the inputs made for it ({_shown(inputs)}): "
            f"{first_line(error).rstrip('.')}. {_OWN_INPUTS}"
        ) from error
    return returned if isinstance(returned, Mapping) else {}


def _check_loss(model: torch.nn.Module, inputs: dict[str, Tensor]) -> None:
    returned = _returned(model, inputs)
    if returned and not (isinstance(returned.get("loss"), Tensor) and returned["loss"].ndim == 0):
        raise BiremeError(
            f"{type(model).__name__} returns no loss for the inputs made for it ({_shown(inputs)}). "
            f"{_OWN_INPUTS}"
        )


def _shown(inputs: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
