"""The tables of a run file: every key with its type, its bounds, its default and what it means.

An empty file is the demonstration, so every key has a default or may be left out. What concerns one key
alone is checked here, what concerns several in `checks`. Nothing here may look at files, devices or models.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from bireme.codec.sum_description import GradientForm, parse_gradient, parse_sum_codec
from bireme.model.part import ALL_LINEAR, LoraPart, TrainedPart
from bireme.train.run_file.planning import AUTO, Balancing, LinksTable, Memory, Planning, auto_or
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

# `[data]` and `[training]`: what a model learns from, the optimizer, its rates, and how long it goes on.


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
    """Number of batches to load in advance; at most 1 with groups and diloco, and with quorum where samples
    only have to be read.
    """
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


# The other tables, and all together.


LOSSES = ("cross_entropy", "l1", "mse")
"""The losses with a name, for models that have none of their own."""


def _plain_name(value: str) -> str:
    if value in (".", "..") or not value.isprintable() or any(letter in value for letter in "/\\"):
        raise ValueError("a plain name, without slashes")
    return value


def _loss(value: str) -> str:
    module, colon, function = value.rpartition(":")
    if value not in LOSSES and not (module and colon and function):
        raise ValueError(f"{', '.join(LOSSES)}, or a function of your own as module:function")
    return value


PlainName = Annotated[Text, AfterValidator(_plain_name)]


class Lora(Table):
    """`[model.lora]`."""

    rank: Annotated[int, Field(ge=1, le=65536)] | None = Field(default=None, examples=[8])
    """Rank of the two small matrices added to every target; no adapter if not set."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] | None = Field(default=None, examples=[16.0])
    """The adapter's part is multiplied by alpha / rank; twice the rank if not set."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapter's inputs that training sets to zero."""
    use_rslora: bool = False
    """Divide alpha by the square root of the rank, not by the rank (rsLoRA), for high ranks."""
    use_dora: bool = False
    """Learn the length of each row of a weight apart from its direction (DoRA)."""
    targets: Texts = Field(
        default=(ALL_LINEAR,),
        description="Modules that get an adapter, by name or by the end of it, such as q_proj; "
        f"{ALL_LINEAR} is every linear layer of a transformers model but its output head",
    )
    merge: bool = False
    """Export the whole model with the adapter added to its weights, not the adapter alone."""


class Model(Table):
    """`[model]`."""

    source: Text = "gpt:layers=4,width=128,heads=4,vocab=257,context=128"
    """What to train: gpt:layers=…,width=… is built in, hf:FOLDER is a transformers model,
    python:module:function or file.py:function the model that your function returns.
    """
    weights: Text | None = Field(default=None, examples=["weights/"])
    """Folder of safetensors, or a checkpoint of torch.distributed.checkpoint, to start from, by the model's
    own parameter names, in place of the weights of source; each process reads only its own stages.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the computation; bfloat16 also keeps float32 weights. By default bfloat16 for an hf:
    model whose config.json says so.
    """
    seed: Seed = 0
    """Random seed of new weights; your function is called with it."""
    loss: Annotated[str, AfterValidator(_loss)] | None = Field(
        default=None,
        description=f"Loss of a model that returns none: {', '.join(LOSSES)}, or your own module:function or "
        "file.py:function",
        examples=["cross_entropy"],
    )
    from_scratch: bool = False
    """Start from new weights, made stage by stage by the initializers of the modules (reset_parameters,
    _init_weights), even if the source has weights.
    """
    compile: bool = False
    """Compile the stages with torch: a slow start, then often faster steps."""
    fused_loss: bool | None = Field(default=None, examples=[False])
    """Run the last linear layer and its cross-entropy as one operator, which makes the logits piece by piece;
    equal but for rounding. By default if a sample has 2^20 logits or more.
    """
    train: Texts | None = Field(default=None, examples=[["*.bias"]])
    """Patterns of the parameters that learn, by the model's own names; all others are frozen."""
    freeze: Texts | None = Field(default=None, examples=[["*.bias"]])
    """Patterns of the parameters that stay as they are; the others learn."""
    frozen_dtype: Literal["nf4"] | None = Field(default=None, examples=["nf4"])
    """Number format of frozen weights of all linear layers but the last; nf4 has four bits (QLoRA). By
    default that of dtype.
    """
    lora: Lora = Field(default_factory=Lora)
    """An adapter that learns while all other weights are frozen (needs bireme[lora])."""

    @property
    def part(self) -> TrainedPart:
        """Which part of the model learns."""
        asked = self.lora
        lora = None
        if asked.rank is not None:
            lora = LoraPart(
                asked.rank, asked.alpha, asked.dropout, asked.targets, asked.use_rslora, asked.use_dora
            )
        return TrainedPart(self.train, self.freeze, lora)


class ClusterTable(Table):
    """`[cluster]`."""

    source: Text | None = Field(default=None, examples=["cluster.toml"])
    """A cluster file, the name of a ready cluster, or machines in the words of `bireme fit`; by default this
    machine.
    """
    workers: Annotated[int, Field(ge=1, le=1024)] | None = Field(default=None, examples=[2])
    """Number of processes on this machine, or on each host with quorum; by default one per GPU, or two on a
    CPU.
    """
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    """Where to compute; auto is cuda if there is a GPU for every process; xpu and mps have not been tested.
    """
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Communication backend; auto is nccl between GPUs, else gloo, with which processes may share a GPU."""
    threads_per_worker: Annotated[int, Field(ge=1, le=4096)] | None = Field(default=None, examples=[1])
    """Threads per process; by default an equal share of the cores."""
    timeout_s: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Seconds to wait for a silent process, or while all replicas wait for each other, before the run fails.
    """


class Sync(Table):
    """`[sync]`."""

    mode: Literal["auto", "allreduce", "quorum", "groups", "diloco"] = "allreduce"
    """How replicas come to the same weights: allreduce and quorum sum gradients in every batch, groups and
    diloco average weights. With groups each replica trains batches of its own and averages with those that
    are ready, with diloco all replicas average what they have learned every diloco_every batches. auto
    chooses allreduce, groups or diloco by the predicted time to the same loss. A rank that dies ends the run
    with allreduce. Otherwise its replica starts again, and the others continue.
    """
    lease_s: Annotated[float, Field(ge=0.5, le=3600)] = 10.0
    """Except with allreduce, seconds after which a silent replica is taken for dead."""
    grace_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """With quorum and diloco, seconds that a round waits for the others once more than half are ready."""
    compare_every: Annotated[int, Field(ge=0)] = 100
    """With quorum, steps between two comparisons of the replicas' weights, by digest. A replica that differs
    takes the weights of the others; 0 compares only when a replica comes back.
    """
    sites: Annotated[int, Field(ge=2, le=1024)] | None = Field(default=None, examples=[2])
    """Except with allreduce, sites that the replicas of the plan are assigned to, equally many to each.
    Inside a site replicas sum gradients in every batch and may share optimizers or weights (memory.shard),
    with quorum they must; sites sum gradients with quorum, and average weights with groups and diloco. A site
    lives and dies as a whole. By default each replica is a site.
    """
    average_optimizer: bool = False
    """With groups and diloco, average what the optimizer remembers of each weight, such as momenta, along
    with the weights.
    """
    connect_every: Annotated[int, Field(ge=1, le=10**6)] = 10
    """With groups, batches of each replica within which groups connect all of them."""
    diloco_every: Annotated[int, Field(ge=1, le=10**6)] = 50
    """With diloco, batches of the run between two averages of a fragment."""
    diloco_rate: Annotated[float, Field(gt=0, le=10)] = 0.7
    """With diloco, the learning rate of outer steps."""
    diloco_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """With diloco, Nesterov's momentum of outer steps."""
    diloco_fragments: Annotated[int, Field(ge=1, le=1024)] = 1
    """With diloco, parts that the weights are cut into, which are averaged in turn."""
    diloco_overlap: Annotated[int, Field(ge=1, le=1024)] = 1
    """With diloco, batches that a replica trains while an average is made."""

    @property
    def averages(self) -> bool:
        """Whether replicas average weights."""
        return self.mode in ("groups", "diloco")

    def num_sites(self, width: int) -> int:
        """How many of so many replicas, or of sites of them, the coordinator knows."""
        return width if self.sites is None else self.sites

    @property
    def is_coordinated(self) -> bool:
        """Whether a coordinator says who has a part, so that replicas may die."""
        return self.mode not in ("allreduce", AUTO)

    codec: Annotated[str, AfterValidator(partial(auto_or, parse_sum_codec))] = "none"
    """Codec of what replicas send each other: none, int8 (blocks with a scale), int4 to int1 (rotated),
    threshold:SHARE:STEPS (the largest entries, by a threshold found every so many steps) or lowrank:RANK.
    threshold:SHARE:STEPS:FIRST and lowrank:RANK:FIRST send whole gradients in the first FIRST steps; by
    default 0 with threshold and 10 with lowrank. auto lets the planner choose by the predicted time to the
    same loss.
    """


class Elastic(Table):
    """`[elastic]`."""

    patience_s: Seconds = 30.0
    """In a run of `bireme coordinate`: how long a machine must have come or gone before the run is planned
    again over the machines that are there.
    """


class Checkpoints(Table):
    """`[checkpoint]`."""

    folder: PlainName = "checkpoints"
    """Name of the checkpoint folder, inside the run's folder."""
    every_steps: StepsOrNever = 100
    """Steps between checkpoints; 0 for none by steps."""
    every_s: Seconds | None = Field(default=None, examples=[600.0])
    """Seconds between checkpoints; with every_steps, whichever comes first."""
    keep: Annotated[int, Field(ge=0, le=10**6)] = 3
    """Number of newest checkpoints to keep; 0 keeps all."""
    copies: Annotated[int, Field(ge=0, le=10**6)] = 1
    """Number of other machines that keep a copy of each file of a checkpoint, if machines share no folder."""
    background: bool = True
    """Write in the background while training continues."""
    at_end: bool = True
    """Write a checkpoint after the last step."""
    wait_for_room_s: Annotated[float, Field(ge=0, le=1e9)] = 43200.0
    """Most seconds that the processes wait, with what they have learned, if the checkpoint after the last
    step cannot be written, for example because the disk is full.
    """


class ExportTable(Table):
    """`[export]`."""

    at_end: bool = True
    """Write the trained model into the run's folder at the end; bireme export does so at any time."""
    shard_bytes: Annotated[int, Field(ge=1)] = 4_000_000_000
    """Most bytes of weights in a file; a larger model is several files and an index."""


class Log(Table):
    """`[log]`."""

    folder: Text = "runs"
    """Folder for the folders of runs."""
    name: PlainName | None = Field(default=None, examples=["first-run"])
    """Name of this run's folder; by default the date and the model."""
    every_steps: Steps = 10
    """Steps between lines of the log."""
    tensorboard: bool = False
    """Also write curves for TensorBoard."""
    wandb: bool = False
    """Send the curves to Weights & Biases too; WANDB_MODE=offline keeps them in the run's folder."""
    mlflow: bool = False
    """Send the curves to MLflow too, to MLFLOW_TRACKING_URI, or into mlruns in folder."""
    prometheus: Annotated[int, Field(ge=0, lt=2**16)] = 0
    """Port at which rank 0 serves the run's figures to Prometheus, at /metrics; 0 for none."""
    prometheus_host: Text = "127.0.0.1"
    """Address of that port; 0.0.0.0 lets other machines read the figures."""
    project: Text = "bireme"
    """Project of Weights & Biases and experiment of MLflow that a run belongs to."""
    trace: bool = False
    """Record batches for the report's picture of the pipeline even in a very short run; longer runs always
    record a few.
    """
    sample_tokens: Annotated[int, Field(ge=0, le=10**6)] = 200
    """Tokens that the model writes as a sample at the end; 0 for none."""
    prompt: str = "def "
    """Prompt of that sample; a user's message if the data have answers, else by default a question of theirs.
    """

    @property
    def trackers(self) -> dict[str, bool]:
        """Whether each tracker is asked for, by its key."""
        return {"tensorboard": self.tensorboard, "wandb": self.wandb, "mlflow": self.mlflow}


class Tables(Table):
    """All tables, each key checked by itself alone."""

    format: Literal[1] = 1
    """Version of this format."""
    model: Model = Field(default_factory=Model)
    """The model to train."""
    data: Data = Field(default_factory=Data)
    """The training data."""
    training: Training = Field(default_factory=Training)
    """Optimizer, learning rate, steps."""
    plan: Planning = Field(default_factory=Planning)
    """How the pipeline is cut and scheduled."""
    balance: Balancing = Field(default_factory=Balancing)
    """How much of each batch every replica trains."""
    links: LinksTable = Field(default_factory=LinksTable)
    """Fewer bytes between stages, by codecs on the boundaries."""
    memory: Memory = Field(default_factory=Memory)
    """Stages larger than their device, on host and disk; optimizers that replicas share."""
    cluster: ClusterTable = Field(default_factory=ClusterTable)
    """The machines and devices."""
    sync: Sync = Field(default_factory=Sync)
    """How replicas agree on the weights."""
    elastic: Elastic = Field(default_factory=Elastic)
    """Machines that come and go."""
    checkpoint: Checkpoints = Field(default_factory=Checkpoints)
    """Checkpoints, from which a run resumes."""
    export: ExportTable = Field(default_factory=ExportTable)
    """The trained model, as others load it."""
    log: Log = Field(default_factory=Log)
    """Log, curves and samples."""
