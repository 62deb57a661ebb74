"""The tables of a run file: every key with its type, its bounds, its default and what it means.

An empty file is the demonstration, so every key has a default or may be left out. What concerns one key
alone is checked here, what concerns several in `checks`. Nothing here may look at files, devices or models.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from bireme.codec.sum_description import parse_sum_codec
from bireme.model.part import ALL_LINEAR, LoraPart, TrainedPart
from bireme.train.run_file.planning import AUTO, Balancing, LinksTable, Memory, Planning
from bireme.train.run_file.table import Seconds, Seed, Steps, StepsOrNever, Table, Text, Texts, parsed
from bireme.train.run_file.training import Data, Training

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


def _sum_codec(value: str) -> str:
    if value.strip().lower() == AUTO:
        return AUTO
    return str(parsed(value, parse_sum_codec))


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

    codec: Annotated[str, AfterValidator(_sum_codec)] = "none"
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
