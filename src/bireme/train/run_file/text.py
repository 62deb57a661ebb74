"""Run files as text: a complete one for the record of a run, a template, and what other programs call keys.

What is written is read back as it was.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from textwrap import wrap
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bireme.train.run_file.tables import Tables

# What there is to say about every key of a run file, read from the tables themselves.
#
# Texts for people are made of it: the file of `bireme init` and the reference. So neither can differ from
# what is accepted.


@dataclass(frozen=True, slots=True)
class Key:
    """A key: what it means, which values it may have, what it is if it is left out.

    `choices` are the words it may be, where only some are right. `default` is None where it is then not
    set; `example` is a value for that case.
    """

    name: str
    meaning: str
    allowed: str
    choices: tuple[str, ...]
    default: Any
    example: Any


@dataclass(frozen=True, slots=True)
class TableOfKeys:
    """A table by its name in the file, what it is about, and its keys in the order of the file."""

    name: str
    meaning: str
    keys: tuple[Key, ...]


def tables_of_keys(model: type[BaseModel] = Tables, beginning: str = "") -> Iterator[TableOfKeys]:
    """All tables, each nested table after its parent."""
    for name, field in model.model_fields.items():
        inner = _table_class(field.annotation)
        if inner is not None:
            yield TableOfKeys(f"{beginning}{name}", _described(field), _keys(inner))
            yield from tables_of_keys(inner, f"{beginning}{name}.")


@cache
def known_keys() -> tuple[str, ...]:
    """All keys of a run file as `table.key`, in the order of the file."""
    return tuple(f"{table.name}.{key.name}" for table in tables_of_keys() for key in table.keys)


@cache
def _keys(model: type[BaseModel]) -> tuple[Key, ...]:
    whole = model.model_json_schema()
    schema, inner = whole["properties"], whole.get("$defs", {})
    return tuple(
        Key(
            name,
            _described(field).removesuffix("."),
            _allowed(_not_null(schema[name]), inner),
            _choices(_not_null(schema[name])),
            field.default,
            field.examples[0] if field.examples else None,
        )
        for name, field in model.model_fields.items()
        if _table_class(field.annotation) is None
    )


def _described(field: FieldInfo) -> str:
    """The description of a key or a table, on one line."""
    return " ".join((field.description or "").split())


def _table_class(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a key that is set; a single word that it may be is a list of one choice."""
    found: dict[str, Any] = next(
        choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"
    )
    return found | {"enum": [found["const"]]} if "const" in found else found


def _choices(schema: dict[str, Any]) -> tuple[Any, ...]:
    """The only values that a key may have; none if there are others."""
    return tuple(schema.get("enum", [schema["const"]] if "const" in schema else ()))


def _allowed(schema: dict[str, Any], inner: dict[str, Any]) -> str:
    """Which values a key may have, in words, from its JSON schema; `inner` has those of tables in lists."""
    if choices := _choices(schema):
        return ", ".join(map(str, choices))
    match schema["type"]:
        case "boolean":
            return "true, false"
        case "integer":
            return f"whole number, {_range(schema)}"
        case "number":
            return f"number, {_range(schema)}"
        case "object":
            return "table of SERVER = source"
        case "array" if "prefixItems" not in schema:
            table = schema.get("items", {}).get("$ref")
            return (
                "list of texts" if table is None else f"list of {{{_keys_of(inner[table.split('/')[-1]])}}}"
            )
        case "array":
            places = schema["prefixItems"]
            return f"{len(places)} numbers, {_range(places[0])}"
    return "text"


def _keys_of(table: dict[str, Any]) -> str:
    """The keys of a table in a list, such as `source = text, weight = number`."""
    words = {"string": "text"}
    types = {name: _not_null(one)["type"] for name, one in table["properties"].items()}
    return ", ".join(f"{name} = {words.get(kind, kind)}" for name, kind in types.items())


def _range(schema: dict[str, Any]) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f"{_number(schema['minimum'])} to {_number(schema['maximum'])}"
    least = f"from {_number(schema['minimum'])}" if "minimum" in schema else ""
    above = f"above {_number(schema['exclusiveMinimum'])}" if "exclusiveMinimum" in schema else ""
    most = f"to {_number(schema['maximum'])}" if "maximum" in schema else ""
    below = f"below {_number(schema['exclusiveMaximum'])}" if "exclusiveMaximum" in schema else ""
    return ", ".join(part for part in (least, above, most, below) if part)


def _number(value: float) -> str:
    powers = {2**power: f"2^{power}" for power in (24, 31, 63)}
    whole = int(value)
    return powers.get(whole, f"{whole:_}") if whole == value else f"{value:g}"


WIDTH = 100

BARE = re.compile(r"[A-Za-z0-9_-]+")

COMPLETE = """\
# A run of Bireme, with the value of every key. `bireme train` with this file repeats the run.
format = 1
"""

BEGINNING = """\
# A run file for `bireme train`. Every key is commented out and shows its default, so the unchanged file
# is the demonstration: a small GPT learns the sources of Python's standard library, byte by byte.
# To set a key, remove the # before it (not before its explanation) and change the value.
# On the command line use --set training.steps=1000. docs/run-file.md lists all keys in tables.
format = 1
"""


def to_toml(run: Tables) -> str:
    """A complete run file: every key with its value; those that are not set are named in a comment."""
    lines = [COMPLETE]
    for table in tables_of_keys():
        values: BaseModel = run
        for name in table.name.split("."):
            values = getattr(values, name)
        lines.append(f"[{table.name}]")
        lines += [_assignment(key.name, getattr(values, key.name)) for key in table.keys]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def commented_toml() -> str:
    """A run file that says nothing, with every key in a comment: its meaning, its words, its default.

    A line that begins with a # and a letter is a key. Without the # it is right as it is, except where
    it needs another model or optimizer. Keys that are not set have an example there.
    """
    lines = [BEGINNING]
    for table in tables_of_keys():
        lines += [f"# {table.meaning}", f"[{table.name}]"]
        for key in table.keys:
            lines += ["", *_explained(key)]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case tuple() | list():
            return f"[{', '.join(map(toml_value, value))}]"
        case BaseModel():
            return toml_value(value.model_dump(exclude_none=True))
        case dict():
            return f"{{{', '.join(f'{_key(key)} = {toml_value(inner)}' for key, inner in value.items())}}}"
    # JSON writes strings as TOML reads them, but for one letter.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    """A key as TOML writes it: with quotes where it has other letters than a plain one."""
    return name if BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _assignment(name: str, value: Any) -> str:
    return f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}"


def _explained(key: Key) -> Iterator[str]:
    choices = f" One of {', '.join(key.choices)}." if key.choices else ""
    meaning = f"{key.meaning}.{choices}"
    yield from wrap(meaning, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
    if key.default is None:
        yield "# Not set. For example:"
    yield f"#{key.name} = {toml_value(key.example if key.default is None else key.default)}"


# The reference of the run file, `docs/run-file.md`, made from the tables themselves.

REFERENCE_BEGINNING = """\
# The run file

<!-- Made by bireme.train.run_file.reference_markdown(), not by hand. -->

A run file tells `bireme train` what to do. Without one, or with an empty one, it trains a small byte-level
GPT on the sources of Python's standard library. `bireme init --for PURPOSE` writes a short file for one
purpose, and `bireme init --all` a file with every key, commented out and explained.

```console
$ bireme init run.toml --all
```

<!-- not run: the demonstration trains for minutes -->
```console
$ bireme train run.toml
$ bireme train run.toml --set training.steps=500 --set model.dtype=bfloat16
```

A run file sets only what differs from the defaults:

```toml
format = 1

[model]
source = "gpt:layers=8,width=256,heads=8,vocab=257,context=256"

[data]
source = "texts/"
length = 256

[training]
steps = 2000
learning_rate = 1e-3

[plan]
schedule = "2bw"
depth = 2
microbatches = 4
```

`--set table.key=value` sets one key and overrides the file. The value is TOML, or else a string. An empty
value, as in `--set plan.depth=`, removes the key, so that its default applies. The last setting of a key
wins.

A key that is not known is refused with the nearest right name, and so are keys that contradict each other:
the run does not begin.

Paths are relative to the folder that `bireme train` is called in. The `run.toml` that a run keeps in its own
folder has them absolute, so that `bireme resume` works from anywhere; those that begin with `./` are within
that folder, wherever it is moved.
"""


def reference_markdown() -> str:
    """All of `docs/run-file.md`."""
    lines = [REFERENCE_BEGINNING]
    for table in tables_of_keys():
        lines += [f"## [{table.name}]", "", table.meaning, "", "| key | default | allowed | meaning |"]
        lines += ["|---|---|---|---|", *map(_row, table.keys), *_more(table.name), ""]
    return "\n".join(lines[:-1]) + "\n"


def _row(key: Key) -> str:
    default = "not set" if key.default is None else f"`{toml_value(key.default)}`"
    cells = (f"`{key.name}`", default, key.allowed, key.meaning)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _more(table: str) -> Iterator[str]:
    """Where to read on about a table."""
    further = {
        "data": "[data.md](data.md) explains sources, mixtures, conversations and packing, "
        "[private-data.md](private-data.md) private samples.",
        "plan": "[plan.md](plan.md) explains planning, [schedules.md](schedules.md) the schedules.",
        "balance": "[balance.md](balance.md) explains shares.",
        "links": "[slow-links.md](slow-links.md) explains codecs, [security.md](security.md) encryption.",
        "memory": "[offloading.md](offloading.md) explains offloading and shared optimizers.",
        "cluster": "[cluster.md](cluster.md) explains cluster files.",
        "elastic": "[machines.md](machines.md#phases) explains phases.",
        "sync": "[averaging.md](averaging.md) explains the modes, [replicas.md](replicas.md) quorum, "
        "[slow-links.md](slow-links.md) codecs of sums.",
    }
    if table in further:
        yield from ("", further[table])


# What other programs call the keys of a run file, and which key means the same here.
#
# It is asked only about names that are no keys. Answers are hints for people; nothing is renamed for them.

LAYERS = "Bireme gives each device whole layers, with their gradients and optimizer state:"

_KNOWN = f"""
# [model]
model.source: model_name_or_path model_name model_path model_id name_or_path pretrained model.name model.path
    pretrained_model_name_or_path base_model
    | A transformers model is hf:FOLDER.
model.dtype: bf16 fp16 fp32 precision mixed_precision amp autocast torch_dtype half use_bf16
    | Mixed precision is "bfloat16".
model.compile: torch_compile use_compile compile_model
model.fused_loss: use_liger_kernel liger_kernel use_liger fused_linear_cross_entropy fused_cross_entropy
    chunked_cross_entropy
model.seed data.seed training.seed: init_seed random_seed manual_seed
# [data]
data.length: seq_len seqlen seq_length sequence_length sequence_len max_seq_len max_seq_length max_length
    block_size context_length context_len context_size ctx_len n_ctx context
data.source: dataset datasets dataset_name dataset_path data_path data_dir train_file train_files train_data
    train_path train_dataset training_data data.path data.name data.file
data.evaluation_source: eval_dataset eval_data eval_file eval_source val_data val_file val_dataset
    validation_data validation_file validation_source test_data test_file
data.evaluation_fraction: eval_fraction eval_split val_fraction val_split val_size validation_fraction
    validation_split validation_split_percentage test_size test_split
    | It is a share of the data, from 0 to 1.
data.tokenizer: tokenizer_name tokenizer_path tokenizer_name_or_path
data.text_column: text_field text_key dataset_text_field
data.num_workers: dataloader_num_workers dataloader_workers num_loader_workers loader_workers
data.prefetch: prefetch_factor dataloader_prefetch_factor
data.seed: data_seed shuffle_seed
# [sync]
sync.connect_every: ssp_bound sync_bound connectivity_period
sync.diloco_every: sync_every local_steps inner_steps num_inner_steps diloco_steps h_steps
sync.diloco_rate: outer_lr outer_learning_rate
sync.diloco_fragments: num_fragments fragments
sync.diloco_overlap: fragment_sync_delay overlap_steps
# [training]
training.learning_rate: lr max_lr peak_lr base_lr learning_rate_max
training.final_fraction: min_lr lr_min min_learning_rate final_lr eta_min
    | It is a share of learning_rate.
training.batch_size: global_batch_size train_batch_size total_batch_size batch bs gbs
    | It counts the samples of a step over all devices.
training.steps: max_steps num_steps n_steps train_steps num_train_steps total_steps max_iters num_iters
    train_iters iterations num_iterations max_train_steps
training.epochs: epoch num_epochs n_epochs num_train_epochs max_epochs
training.warmup_steps training.warmup_fraction: warmup warmup_iters warmup_ratio num_warmup_steps lr_warmup
    lr_warmup_steps lr_warmup_iters
training.schedule: scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay_style learning_rate_schedule
training.optimizer: optim optimizer_name optimizer_type
training.weight_decay: wd
training.betas: beta1 beta2 adam_beta1 adam_beta2 adam_betas
    | It has both: [0.9, 0.95].
training.clip_norm: grad_clip clip clip_grad clip_grad_norm clip_gradient max_grad_norm max_norm
    grad_norm_clip gradient_clip gradient_clipping gradient_clip_val
training.evaluate_every: eval evaluate evaluation eval_steps eval_every eval_interval eval_freq
    evaluation_steps evaluation_interval validation_interval val_interval val_check_interval
training.evaluation_batches: eval_iters eval_batches max_eval_batches limit_val_batches limit_eval_batches
training.time_limit_s: time_limit max_time max_train_time max_duration
# [plan]
plan.width: dp dp_size dp_degree ddp data_parallel data_parallel_size data_parallel_degree replicas
    num_replicas
    | It is the number of replicas of the pipeline.
plan.depth: pp pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_parallel_degree
    pipeline_model_parallel_size stages num_stages pipeline_stages
    | It is the number of devices that a pipeline has.
: tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size
    cp context_parallel sp sequence_parallel ep expert_parallel
    | There is none: {LAYERS} plan.depth is how many devices share a model.
: fsdp fsdp_config fully_sharded_data_parallel zero zero_stage zero_optimization deepspeed deepspeed_config
    sharding_strategy
    | There is none: {LAYERS} plan.depth is how many devices share a model, plan.width how many replicas there
    are, and memory.shard = "optimizer" or "weights" what the replicas share.
plan.micro_batch: per_device_batch_size per_device_train_batch_size per_gpu_batch_size micro_batch_size
    microbatch_size mbs train_micro_batch_size_per_gpu
    | training.batch_size counts the samples of a step over all devices.
plan.microbatches: gradient_accumulation gradient_accumulation_steps grad_accum grad_accum_steps
    grad_accumulation accumulate_grad_batches accumulation_steps num_microbatches num_micro_batches
    micro_batches n_microbatches chunks
    | It is how many parts a step's batch goes through the pipeline in.
plan.recompute: gradient_checkpointing activation_checkpointing checkpoint_activations activation_recompute
    activation_recomputation recompute_activations recompute_granularity
    | It is "never", "where-needed", "layers" or "always".
plan.schedule: pipeline_schedule pipeline_parallel_schedule pp_schedule
# [cluster]
cluster.workers: gpus num_gpus n_gpus ngpus devices num_devices nproc nproc_per_node num_processes world_size
    cluster.num_workers training.workers
    | It is the number of processes on this machine, one for each GPU.
cluster.source: nodes num_nodes nnodes num_machines hosts hostfile
    | It names a cluster file; or start bireme train by torchrun on each machine.
cluster.device: accelerator device_type
cluster.backend: dist_backend distributed_backend ddp_backend
cluster.timeout_s: timeout ddp_timeout nccl_timeout dist_timeout
cluster.threads_per_worker: num_threads omp_num_threads threads
# [checkpoint]
checkpoint.every_steps: save_steps save_every save_every_steps save_interval checkpoint_every
    checkpoint_interval checkpoint_steps checkpointing_steps ckpt_interval
checkpoint.keep: save_total_limit keep_last keep_checkpoints max_checkpoints max_to_keep
: resume resume_from resume_from_checkpoint init_from load_checkpoint
    | `bireme resume RUN` continues a run.
# [log]
log.folder: output_dir out_dir output_folder save_dir run_dir runs_dir logdir log_dir logging_dir
    default_root_dir
log.name: run_name exp_name experiment experiment_name job_name
log.every_steps: logging_steps log_interval log_every log_every_n_steps log_steps log_freq print_every
log.tensorboard: report_to tensorboard_dir use_tensorboard
"""
"""Keys, the names that mean the same, and after a | what else there is to know. Names with a table are for it
only.
"""


@dataclass(frozen=True, slots=True)
class Synonyms:
    """Names that mean the same as some keys, or as none, and a sentence on them, empty if there is none."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    more: str


def _read(entry: str) -> Synonyms:
    words, _, more = entry.partition("|")
    keys, _, names = words.partition(":")
    return Synonyms(tuple(names.split()), tuple(keys.split()), " ".join(more.split()))


SYNONYMS = tuple(_read(entry) for entry in re.split(r"\n(?=\S)", _KNOWN.strip()) if entry[0] != "#")


def advice(path: Sequence[str]) -> str:
    """A hint for a key that is not known: by its name elsewhere, or in another table; empty if there is none.

    `path` is the table, if it is in one, and the name.
    """
    words = [part.lower().replace("-", "_") for part in path if not part.isdigit()]
    for name in (".".join(words), words[-1], words[0]):
        if name in _by_name():
            known = _by_name()[name]
            return " ".join(filter(None, (_asked(known.keys), known.more)))
    return _asked([known for known in known_keys() if known.rpartition(".")[2] == words[-1]])


def _asked(keys: Sequence[str]) -> str:
    return f"Did you mean {' or '.join(map(repr, keys))}?" if keys else ""


@cache
def _by_name() -> dict[str, Synonyms]:
    return {name: one for one in SYNONYMS for name in one.names}
