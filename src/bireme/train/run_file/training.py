"""`[data]` and `[training]`: what a model learns from, the optimizer, its rates, and how long it goes on."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from bireme.codec.sum_description import GradientForm, parse_gradient
from bireme.train.run_file.table import (
    Samples,
    Seconds,
    Seed,
    Share,
    Steps,
    StepsOrNever,
    Table,
    Text,
    Texts,
    giving_way,
    listed,
    parsed,
)

# `[data]` of a run file: what a model learns from.


def _by_server(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        raise ValueError('a source for each server, such as {server0 = "texts/"}')
    return value


class Mixed(Table):
    """One entry of `data.mixture`."""

    source: Text
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0


class Data(Table):
    """`[data]`."""

    source: Text | None = "stdlib"
    """Training data: a text file or a folder of them, hf:NAME or hf:FOLDER for a dataset of the datasets
    library, a .npy or .bin file of tokens, module:function or file.py:function of your own, or stdlib, the
    sources of Python's standard library. Not used if mixture is set.
    """
    mixture: (
        Annotated[
            tuple[Mixed, ...],
            Field(max_length=1000),
            listed('one table or more, such as [{source = "texts/", weight = 3.0}]'),
        ]
        | None
    ) = Field(
        default=None,
        examples=[
            (
                {"source": "texts/", "weight": 3.0},
                {"source": "hf:owner/name,split=train", "weight": 1.0},
            )
        ],
    )
    """Several sources to learn from, each with a weight: its share of the samples, relative to the other
    weights.
    """
    private: Annotated[dict[Text, Text], BeforeValidator(_by_server)] | None = Field(
        default=None, examples=[{"server0": "/data/own"}]
    )
    """Samples that only one server may read, in addition to those of source: the server's name, as in the
    cluster, and a source on that server.
    """
    tokenizer: Text = "auto"
    """How text becomes tokens: auto is the tokenizer in the model's folder if there is one, else bytes; or
    bytes, or the folder of another transformers tokenizer.
    """
    length: Annotated[int, Field(ge=2, le=2**24)] = 128
    """Tokens of a sample. By default the context of a gpt: model, and for an hf: model its context, at most
    1,024.
    """
    packing: Literal["stream", "documents", "none"] | None = Field(default=None, examples=["documents"])
    """How documents become samples: stream puts one after the other and cuts anywhere, documents puts several
    into a sample so that none attends to another, none gives each a sample of its own. By default none for
    conversations, else stream.
    """
    loss_on: Literal["answers", "all"] = "answers"
    """Tokens of conversations and of prompts with answers that count in the loss: answers, or all. Of other
    data all tokens count.
    """
    evaluation_fraction: Annotated[float, Field(ge=0, lt=1)] | None = 0.05
    """Share of the data, at its end, held out for evaluation; 0 turns evaluation off. Not used if
    evaluation_source is set.
    """
    evaluation_source: Text | None = Field(default=None, examples=["evaluation.txt"])
    """Separate data for evaluation, in the notation of source."""
    text_column: Text | None = Field(default=None, examples=["text"])
    """Column of a dataset with the text, the tokens or the messages of conversations. By default input_ids,
    else a prompt with its answer, else text, messages or conversations, else the only column with text.
    """
    pattern: Text = "*"
    """Pattern of the names of the files to read in a folder and its subfolders."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Number format of a .bin file."""
    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes that load samples, for a slow dataset of your own; 0 uses a thread."""
    prefetch: Annotated[int, Field(ge=0, le=1024)] = 2
    """Number of batches to load in advance."""
    seed: Seed = 0
    """Random seed of the order of samples."""
    shuffle_buffer: Annotated[int, Field(ge=0, le=10**8)] = 1000
    """Rows of a stream (streaming=true) to shuffle among; 0 keeps their order."""

    @property
    def named(self) -> str:
        """The source, or all of a mixture, in a sentence."""
        return self.source or ", ".join(one.source for one in self.mixture or ())

    @model_validator(mode="before")
    @classmethod
    def _one_of_two(cls, data: Any) -> Any:
        return giving_way(giving_way(data, "evaluation_fraction", "evaluation_source"), "source", "mixture")


def _pair(value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("two numbers, such as [0.9, 0.95]")
    return tuple(value)


def _gradient(value: str) -> str:
    return str(parsed(value, parse_gradient) or "whole")


def _or_none(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    return None if value is None else handler(value)


CountedSteps = Annotated[Steps, WrapValidator(_or_none)]
"""Steps; None only if they follow from `training.epochs`, until the samples are counted."""

Rate = Annotated[float, Field(gt=0, le=1000)]
Inertia = Annotated[float, Field(ge=0, lt=1)]


class Training(Table):
    """`[training]`."""

    steps: CountedSteps = 300
    """Number of optimizer steps; each trains on one batch. Not used with epochs."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = Field(default=None, examples=[3.0])
    """How often every sample is trained, instead of steps; the run counts its samples and keeps the steps."""
    batch_size: Samples = 32
    """Samples per step, over all devices."""
    optimizer: Literal["sgd", "adam", "adamw", "muon"] = "adamw"
    """Optimizer; sgd has momentum, muon leaves all but the matrices inside layers to adamw."""
    learning_rate: Rate = 3e-3
    """Highest learning rate of the schedule. By default 2e-5 for an hf: model that starts from the weights in
    its folder, 2e-4 for an adapter (model.lora) on one, and from new weights less the wider the model is.
    """
    rest_learning_rate: Rate | None = Field(default=None, examples=[1e-3])
    """Only with muon: the learning rate of adamw's parameters; by default learning_rate."""
    weight_decay: Annotated[float, Field(ge=0, le=1000)] | None = Field(default=None, examples=[0.1])
    """Weight decay of parameters with at least two axes; default 0.01 (adamw), 0.1 (muon), else 0."""
    betas: Annotated[tuple[Inertia, Inertia], BeforeValidator(_pair)] = (0.9, 0.95)
    """Betas of adam and adamw: decay of the running mean of gradients, and of their squares."""
    momentum: Inertia | None = Field(default=None, examples=[0.9])
    """Momentum of sgd, by default 0.9, or of muon, by default 0.95."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """The learning rate after warm-up; wsd (warm up, stay, decay) is constant until its last part."""
    schedule_steps: Steps | None = Field(default=None, examples=[300])
    """Number of steps that the learning rate schedule covers; all steps if not set."""
    after_schedule: Literal["hold", "restart"] = "hold"
    """What happens after schedule_steps: hold keeps the last rate, restart runs the schedule again over the
    remaining steps, with its warm-up.
    """
    warmup_steps: StepsOrNever | None = Field(default=None, examples=[10])
    """Number of steps in which the learning rate rises from near 0."""
    warmup_fraction: Share | None = 0.1
    """Warm-up as a share of all steps; warmup_steps overrides it. By default 0.03 for an hf: model that
    starts from the weights in its folder.
    """
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """With wsd, the share of the steps, at the end, in which the learning rate falls."""
    final_fraction: Share = 0.1
    """Last learning rate, as a share of learning_rate, unless the schedule is constant."""
    clip_norm: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    """Largest norm of the whole gradient; 0 turns clipping off. Stages that step apart (memory.updates) are
    clipped each by its own norm.
    """
    evaluate_every: StepsOrNever = 50
    """Steps between evaluations; 0 evaluates only at the end."""
    evaluation_batches: Annotated[int, Field(ge=1, le=10**6)] = 8
    """Largest number of batches per evaluation."""
    gradient: Annotated[str, AfterValidator(_gradient)] = "whole"
    """How gradients of linear maps are kept and summed: whole, or principal:RANK, as so many principal
    components; principal:RANK:PAIRS updates the components after so many rows.
    """
    gradient_of: Texts | None = Field(default=None, examples=[["*.mlp.*.weight"]])
    """Only with principal: patterns of the weights whose gradients are kept so; by default all whose
    gradients become smaller.
    """
    seed: Seed = 0
    """Random seed of dropout."""
    most_skipped_in_a_row: Annotated[int, Field(ge=0, le=10**6)] = 10
    """Steps skipped in a row, because the gradient is not finite, before the run stops."""
    time_limit_s: Seconds | None = Field(default=None, examples=[3600.0])
    """Seconds after which the run ends as if all steps were done."""

    @model_validator(mode="before")
    @classmethod
    def _one_of_two(cls, data: Any) -> Any:
        return giving_way(giving_way(data, "warmup_fraction", "warmup_steps"), "steps", "epochs")

    @property
    def gradient_form(self) -> GradientForm | None:
        """How gradients of linear maps are kept; None if they are whole."""
        return parse_gradient(self.gradient, self.gradient_of)

    @property
    def num_warmup_steps(self) -> int:
        """The steps of warm-up, whichever way they are given."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return round((self.warmup_fraction or 0.0) * self.num_schedule_steps)

    @property
    def num_schedule_steps(self) -> int:
        """The steps that the schedule of the learning rate goes over."""
        return self.steps if self.schedule_steps is None else self.schedule_steps


# Learning-rate schedules: the factor on the learning rate, batch by batch.
#
# A factor depends on the number of the batch alone, so a run that was interrupted goes on as if it had not
# been.


def rate_factor(training: Training) -> Callable[[int], float]:
    """The factor on the learning rate for batch t, counted from 0.

    The schedule goes over all steps, or over `schedule_steps`. After these it holds its last factor, or
    begins again, over the steps that are left.
    """
    length = training.num_schedule_steps
    first = _over(training, length)
    if training.after_schedule == "hold" or training.steps <= length:
        return first
    again = _over(training, training.steps - length)
    return lambda batch: first(batch) if batch < length else again(batch - length)


def _over(training: Training, steps: int) -> Callable[[int], float]:
    """The schedule over so many steps.

    With n steps and w of warm-up it rises in equal parts, (t + 1) / w, and is 1 at t = w - 1. From there
    it is constant, or falls until the last batch, n - 1, has `final_fraction`, and stays so after it. Of
    wsd only the last part falls, straight. Where warm-up leaves no batch to fall in, it ends at 1.
    """
    warmup = training.warmup_steps
    if warmup is None:
        warmup = round((training.warmup_fraction or 0.0) * steps)
    last = steps - 1
    begin = max(warmup - 1, 0)
    if training.schedule == "wsd":
        begin = max(begin, last - max(1, round(training.decay_fraction * steps)))
    final = training.final_fraction
    is_flat = training.schedule == "constant" or last <= begin
    is_round = training.schedule == "cosine"

    def factor(batch: int) -> float:
        if batch < warmup:
            return (batch + 1) / warmup
        if is_flat or batch <= begin:
            return 1.0
        done = min((batch - begin) / (last - begin), 1.0)
        left = (1 + math.cos(math.pi * done)) / 2 if is_round else 1 - done
        return left + final * (1 - left)

    return factor
