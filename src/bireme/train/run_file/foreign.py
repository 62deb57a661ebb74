"""Configurations of axolotl and LLaMA-Factory as settings of a run file.

Every key of theirs is translated, has no effect here, or is refused because it would change the trained
model. Where their defaults differ from those of a run file, the settings have theirs. Nothing here looks at
models; of data only LLaMA-Factory's list of datasets is read.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bireme.documents import read_json_object, toml_value
from bireme.errors import BiremeError
from bireme.files import read_text
from bireme.train.run_file.text import entries_in
from bireme.user_code import optional_package

_UNKNOWN = "it is unknown here and may change the model"

_FEW_BITS = ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "paged_adamw_8bit", "adamw_torch_4bit")
_ADAMW = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_apex_fused",
    "paged_adamw_32bit",
    *_FEW_BITS,
)
_OPTIMIZERS = {"sgd": "sgd", **dict.fromkeys(_ADAMW, "adamw")}
_SCHEDULES = {one: one.partition("_")[0] for one in ("cosine", "linear", "constant", "constant_with_warmup")}
_SPEAKERS = {"human", "user", "gpt", "assistant", "system", "tool", "observation", "function_call"}
_MESSAGES = ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
"""The names of a message's speaker and text that are recognized."""

_LIST_OF_DATASETS = "dataset_info.json"


@dataclass(frozen=True, slots=True)
class _Dialect:
    """A program, what it calls the keys that axolotl has too, and the defaults of keys by axolotl's names."""

    program: str
    names: Mapping[str, str]
    defaults: Mapping[str, Any]


_AXOLOTL = _Dialect(
    "axolotl", {}, {"num_epochs": 1.0, "lr_scheduler": "cosine", "warmup_ratio": 0.03, "sequence_len": 512}
)
_FACTORY = _Dialect(
    "LLaMA-Factory",
    {
        "base_model": "model_name_or_path",
        "optimizer": "optim",
        "lr_scheduler": "lr_scheduler_type",
        "num_epochs": "num_train_epochs",
        "micro_batch_size": "per_device_train_batch_size",
        "sequence_len": "cutoff_len",
        "lora_r": "lora_rank",
        "lora_target_modules": "lora_target",
        "val_set_size": "val_size",
        "train_on_inputs": "train_on_prompt",
        "peft_use_dora": "use_dora",
        "peft_use_rslora": "use_rslora",
    },
    {
        "num_epochs": 3.0,
        "lr_scheduler": "linear",
        "warmup_ratio": 0.0,
        "sequence_len": 2048,
        "micro_batch_size": 8,
        "learning_rate": 5e-5,
        "lora_target_modules": "all",
    },
)


@dataclass(slots=True)
class Translation:
    """The settings of a run file, by key, with a remark on each, and why some keys have no effect here.

    It takes the keys of a configuration one by one. Those that are left at the end have no effect, or are
    refused.
    """

    path: Path
    dialect: _Dialect
    left: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> list[str]:
        """The same as `--set` has them."""
        return [f"{key}={toml_value(value)}" for key, value in self.values.items()]

    def lines(self, origin: str) -> Iterator[str]:
        """What became of the file, for people."""
        yield f"{origin} is a configuration of {self.dialect.program}. It means:"
        yield from (
            f"  {key} = {toml_value(value)}  ({self.remarks[key]})" for key, value in self.values.items()
        )
        for why in dict.fromkeys(self.idle.values()):
            names = (name for name, reason in self.idle.items() if reason == why)
            yield f"  Without effect: {', '.join(names)} ({why})"

    def name(self, key: str) -> str:
        """What the program calls a key of axolotl."""
        return self.dialect.names.get(key, key)

    def take(self, key: str, otherwise: Any = None) -> Any:
        """The value of a key, by axolotl's name, or its default."""
        return self.left.pop(self.name(key), self.dialect.defaults.get(key, otherwise))

    def number(self, key: str, otherwise: float | None = None) -> float | None:
        """The same for a number, which YAML takes for a text if it is written like 2e-4."""
        value = self.take(key, otherwise)
        try:
            found = None if value is None else float(value)
        except (TypeError, ValueError):
            found = math.nan
        if found is not None and not math.isfinite(found):
            raise BiremeError(f"{self.path}: {self.name(key)} is {value!r}; it must be a number.")
        return found

    def whole(self, key: str, otherwise: int = 0) -> int:
        """The same for a whole number."""
        return int(self.number(key, otherwise) or 0)

    def put(self, key: str, value: Any, remark: str) -> None:
        """Set a key of the run file. The remark is the name of a key of theirs, or a sentence."""
        self.values[key], self.remarks[key] = value, self.name(remark)

    def refuse(self, name: str, why: str) -> None:
        """Refuse a key when all have been read."""
        self.refused[name] = why

    def chosen(self, key: str, words: Mapping[str, str], otherwise: str) -> str:
        """A word of ours for a word of theirs, which is refused if there is none."""
        word = str(self.take(key, otherwise))
        if word not in words:
            self.refuse(f"{self.name(key)} = {word}", f"Bireme has only {', '.join(words)}")
        return words.get(word, word)

    def ended(self) -> "Translation":
        """The whole translation; a `BiremeError` if some key is refused."""
        reasons, refusals = (_by_key(name) for name in ("foreign_idle.txt", "foreign_refused.txt"))
        for name, value in self.left.items():
            if name in reasons:
                self.idle[name] = reasons[name]
            elif name.startswith(("lora_", "peft_")) and "model.lora.rank" not in self.values:
                self.idle[name] = "there is no adapter"
            elif value not in (False, "", [], {}, 0, "none", "no"):
                self.refuse(f"{name} = {_short(value)}", refusals.get(name, _UNKNOWN))
        if self.refused:
            named = "; ".join(f"{name} ({why})" for name, why in self.refused.items())
            raise BiremeError(
                f"{self.path} has keys of {self.dialect.program} that would train another model here: "
                f"{named}. Take them out of the file to train without them."
            )
        return self


def translated(path: Path) -> Translation:
    """The configuration in a YAML file of axolotl or LLaMA-Factory; a `BiremeError` names what is refused."""
    content = {key: value for key, value in _read(path).items() if value is not None}
    if "base_model" in content:
        reader = Translation(path, _AXOLOTL, content)
        _read_axolotl(reader)
    elif "model_name_or_path" in content:
        reader = Translation(path, _FACTORY, content)
        _read_factory(reader)
    else:
        raise BiremeError(
            f"{path} is neither a configuration of axolotl, which has the key base_model, nor one of "
            "LLaMA-Factory, which has model_name_or_path. `bireme init` writes a run file."
        )
    _read_common(reader)
    return reader.ended()


def _read(path: Path) -> dict[str, Any]:
    yaml = optional_package("yaml", "hf", str(path))
    try:
        found = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise BiremeError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise BiremeError(f"{path} is not a table of keys in YAML.")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value
    return text if len(text) <= 40 else f"{text[:39]}…"


def _by_key(name: str) -> dict[str, str]:
    """The reason of each key, from a file."""
    found = (entry.partition(":") for entry in entries_in(name))
    return {name: reason for reason, _, names in found for name in names.split()}


# What both programs take over from the trainer of transformers.


def _read_common(reader: Translation) -> None:
    reader.put("model.source", f"hf:{reader.take('base_model')}", "base_model")
    halves = [reader.take(name) for name in ("bf16", "bfloat16", "pure_bf16")]
    is_half = any(one in (True, "true", "auto", "full") for one in halves)
    reader.put("model.dtype", "bfloat16" if is_half else "float32", "bf16")
    reader.put("data.length", reader.whole("sequence_len"), "sequence_len")
    held = reader.number("val_set_size", 0.0) or 0.0
    if held >= 1:
        reader.refuse(f"{reader.name('val_set_size')} = {held:g}", "it must be a share of the data, below 1")
    elif "data.evaluation_source" not in reader.values:
        reader.put("data.evaluation_fraction", held, "val_set_size")
    if reader.take("train_on_inputs"):
        reader.put("data.loss_on", "all", "train_on_inputs")
    parts = max(reader.whole("gradient_accumulation_steps", 1), 1)
    size = reader.whole("batch_size", reader.whole("micro_batch_size", 1) * parts)
    micro_batch = reader.name("micro_batch_size")
    reader.put("training.batch_size", size, f"{micro_batch} and accumulation, for one GPU")
    steps, epochs = reader.whole("max_steps"), reader.number("num_epochs")
    if steps > 0:
        reader.put("training.steps", steps, "max_steps")
    else:
        reader.put("training.epochs", epochs, "num_epochs")
    seed = reader.whole("seed", 42)
    for key, value in (("model", seed), ("training", seed), ("data", reader.whole("data_seed", seed))):
        reader.put(f"{key}.seed", value, "seed")
    _read_rate(reader)
    _read_logs(reader)


def _read_rate(reader: Translation) -> None:
    rate = reader.number("learning_rate")
    if rate is None:
        reader.refuse("learning_rate", "it is missing")
    reader.put("training.learning_rate", rate, "learning_rate")
    theirs = str(reader.left.get(reader.name("lr_scheduler"), ""))
    reader.put("training.schedule", reader.chosen("lr_scheduler", _SCHEDULES, "linear"), "lr_scheduler")
    final = reader.number("cosine_min_lr_ratio", 0.0)
    reader.put("training.final_fraction", final, "lr_scheduler")
    has_ratio = "warmup_ratio" in reader.left
    steps, share = reader.number("warmup_steps"), reader.number("warmup_ratio")
    if theirs == "constant":
        reader.put("training.warmup_steps", 0, "lr_scheduler")
    elif steps is not None and (steps >= 1 or not (steps or has_ratio)):
        reader.put("training.warmup_steps", int(steps), "warmup_steps")
    else:  # a share of the steps, under either name
        reader.put("training.warmup_fraction", steps or share, "warmup_ratio")
    is_short = reader.left.get(reader.name("optimizer")) in _FEW_BITS
    optimizer = reader.chosen("optimizer", _OPTIMIZERS, "adamw_torch")
    reader.put("training.optimizer", optimizer, "its state in 32 bits" if is_short else "optimizer")
    betas = [reader.number("adam_beta1", 0.9), reader.number("adam_beta2", 0.999)]
    if optimizer == "adamw":
        reader.put("training.betas", betas, "adam_beta2")
    else:
        reader.put("training.momentum", 0.0, "optimizer")
    if reader.number("adam_epsilon", 1e-8) != 1e-8:
        reader.refuse("adam_epsilon", "it is 1e-8 here")
    reader.put("training.weight_decay", reader.number("weight_decay", 0.0), "weight_decay")
    reader.put("training.clip_norm", reader.number("max_grad_norm", 1.0), "max_grad_norm")


def _read_logs(reader: Translation) -> None:
    every = {
        "save_steps": "checkpoint.every_steps",
        "save_total_limit": "checkpoint.keep",
        "eval_steps": "training.evaluate_every",
        "logging_steps": "log.every_steps",
    }
    for name, key in every.items():
        count = reader.number(name)
        if count is not None and count >= 1:
            reader.put(key, int(count), name)
    output = reader.take("output_dir")
    if output is not None:
        folder = Path(str(output))
        reader.put("log.folder", str(folder.parent), "output_dir")
        reader.put("log.name", folder.name, "output_dir")
    named = _listed(reader.take("report_to"))
    named += ["wandb"] if (project := reader.take("wandb_project")) else []
    named += ["tensorboard"] if reader.take("use_tensorboard") else []
    named += ["mlflow"] if reader.take("use_mlflow") else []
    for tracker in ("wandb", "tensorboard", "mlflow"):
        if tracker in named:
            reader.put(f"log.{tracker}", True, "the curves")
    if project:
        reader.put("log.project", str(project), "wandb_project")


def _put_adapter(reader: Translation) -> None:
    """The adapter, whose targets must be known."""
    rank = reader.whole("lora_r", 8)
    reader.put("model.lora.rank", rank, "lora_r")
    reader.put("model.lora.alpha", reader.number("lora_alpha", 2.0 * rank), "lora_alpha")
    reader.put("model.lora.dropout", reader.number("lora_dropout", 0.0), "lora_dropout")
    for name in ("use_dora", "use_rslora"):
        if reader.take(f"peft_{name}"):
            reader.put(f"model.lora.{name}", True, f"peft_{name}")
    named = reader.take("lora_target_modules")
    if reader.take("lora_target_linear") or named in ("all", "all-linear"):
        return
    if not named:
        reader.refuse("lora_target_modules", "it is missing; name the modules, or set lora_target_linear")
    reader.put("model.lora.targets", _listed(named), "lora_target_modules")


def _listed(value: Any) -> list[str]:
    """The names in a list, or in a text with commas."""
    names = value if isinstance(value, list) else str(value or "").split(",")
    return [str(name).strip() for name in names if name]


# axolotl's own keys.


def _read_axolotl(reader: Translation) -> None:
    adapter, in_4_bits = reader.take("adapter"), bool(reader.take("load_in_4bit"))
    if adapter in ("lora", "qlora"):
        _put_adapter(reader)
        if adapter == "qlora" or in_4_bits:
            reader.put("model.frozen_dtype", "nf4", "load_in_4bit")
    elif adapter or in_4_bits:
        reader.refuse(f"adapter = {adapter}", "Bireme trains lora, qlora or all weights")
    template = str(reader.take("chat_template", "tokenizer_default"))
    if not template.startswith("tokenizer_default"):
        reader.refuse(
            f"chat_template = {template}", "conversations get the template in the tokenizer's folder"
        )
    tokens = reader.left.get("special_tokens")
    if isinstance(tokens, dict) and set(tokens) <= {"pad_token"}:
        reader.idle["special_tokens"] = "padding does not count"
        del reader.left["special_tokens"]
    kernels = [str(one) for one in reader.left.get("plugins") or ()]
    if all("liger" in one.lower() or "cut_cross_entropy" in one for one in kernels):
        reader.idle |= dict.fromkeys(["plugins"] if reader.take("plugins") else (), "kernels are chosen here")
    if tokenizer := reader.take("tokenizer_config"):
        reader.put("data.tokenizer", str(tokenizer), "tokenizer_config")
    datasets = reader.take("datasets") or []
    if not isinstance(datasets, list) or len(datasets) != 1 or not isinstance(datasets[0], dict):
        raise BiremeError(
            f"{reader.path}: datasets lists {len(datasets)} datasets, and exactly one can be translated. Put "
            "the rows into one file, or write a run file with data.mixture, whose sources have weights."
        )
    if packs := bool(reader.take("sample_packing")):
        reader.put("data.packing", "documents", "sample_packing")
    _read_dataset(reader, {key: one for key, one in datasets[0].items() if one is not None}, packs=packs)


def _read_dataset(reader: Translation, dataset: dict[str, Any], *, packs: bool) -> None:
    path, files = str(dataset.pop("path", "")), dataset.pop("data_files", None)
    kind = str(dataset.pop("ds_type", ""))
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if files is not None and not (
        isinstance(files, str) and (path in ("json", "csv", "parquet", "text") or kind)
    ):
        reader.refuse("datasets.data_files", "name one local file as path")
    source = files if isinstance(files, str) else path
    reader.put(
        "data.source", _source(source, dataset.pop("name", None), dataset.pop("split", None)), "datasets"
    )
    form = str(dataset.pop("type", ""))
    if form in ("chat_template", "sharegpt", "chat_template.default"):
        column = str(dataset.pop("field_messages", "messages" if form != "sharegpt" else "conversations"))
        reader.put("data.text_column", column, "datasets.field_messages")
        _check_messages(dataset)
    elif form == "completion":
        reader.put("data.text_column", str(dataset.pop("field", "text")), "datasets.field")
        if not packs:
            reader.refuse("datasets.type = completion", "long rows would lose their ends; set sample_packing")
    else:
        reader.refuse(
            f"datasets.type = {form}",
            "Bireme reads chat_template and completion, and puts no text of its own around a row; "
            "a run file of `bireme init` reads rows of alpaca as conversations",
        )
    for name, value in dataset.items():
        reader.refuse(f"datasets.{name} = {_short(value)}", _UNKNOWN)


def _check_messages(dataset: dict[str, Any]) -> None:
    """Take the keys that have the meaning that Bireme gives to messages; others stay."""
    usual = {"chat_template": "tokenizer_default", "roles_to_train": ["assistant"], "train_on_eos": "turn"}
    for name, value in usual.items():
        if dataset.get(name) == value:
            del dataset[name]
    names = {
        "role": dataset.get("message_field_role", "role"),
        "content": dataset.get("message_field_content", "content"),
    }
    if {**names, **(dataset.get("message_property_mappings") or {})} in _MESSAGES:
        for name in ("message_field_role", "message_field_content", "message_property_mappings"):
            dataset.pop(name, None)
    roles = dataset.get("roles")
    if isinstance(roles, dict) and all(_SPEAKERS.issuperset(_listed(many)) for many in roles.values()):
        del dataset["roles"]


def _source(path: str, config: Any = None, split: Any = None, most: int = 0) -> str:
    """A file or folder that is there or looks like one, else a dataset of the Hub; only its first `most` rows
    if that is not 0.
    """
    is_file = Path(path).exists() or path.startswith((".", "/", "~")) or bool(Path(path).suffix)
    if is_file and not (config or most):
        return path
    split = f"{split or 'train'}[:{most}]" if most else split
    options = (("config", config), ("split", split))
    return ",".join([f"hf:{path}", *(f"{name}={value}" for name, value in options if value)])


# LLaMA-Factory's own keys.


def _read_factory(reader: Translation) -> None:
    stage, kind = str(reader.take("stage", "sft")), str(reader.take("finetuning_type", "lora"))
    if stage not in ("sft", "pt"):
        reader.refuse(f"stage = {stage}", "Bireme trains the next token: sft or pt")
    if kind == "lora":
        _put_adapter(reader)
    elif kind != "full":
        reader.refuse(
            f"finetuning_type = {kind}", "Bireme trains lora or full; name parameters in model.train"
        )
    bits = reader.whole("quantization_bit")
    usual = {"quantization_method": ("bnb", "bitsandbytes"), "quantization_type": ("nf4",)}
    for name, words in usual.items():
        if str(reader.left.get(name, words[0])) in words:
            reader.take(name)
    if bits == 4 and reader.take("double_quantization", True) is True:
        reader.put("model.frozen_dtype", "nf4", "quantization_bit")
    elif bits:
        reader.refuse(f"quantization_bit = {bits}", "frozen weights have 4 bits, doubly quantized, or all")
    if (template := reader.take("template")) is not None:
        reader.idle[f"template = {template}"] = "conversations get the template in the tokenizer's folder"
    folder = Path(str(reader.take("dataset_dir", "data")))
    names, most = str(reader.take("dataset", "")), reader.whole("max_samples")
    _read_entry(reader, folder, names, stage, "data.source", most)
    if (held := reader.take("eval_dataset")) is not None:
        _read_entry(reader, folder, str(held), stage, "data.evaluation_source", most)
    if reader.take("neat_packing"):
        reader.take("packing")
        reader.put("data.packing", "documents", "neat_packing")
    elif stage == "pt":
        packs = reader.take("packing", True)
        reader.put("data.packing", "stream" if packs else "none", "packing")


def _read_entry(reader: Translation, folder: Path, name: str, stage: str, key: str, most: int) -> None:
    """A dataset by its name in LLaMA-Factory's list."""
    entry = _entry(reader.path, folder, name)
    place = entry.pop("file_name", None)
    hub, subset, split = (entry.pop(one, None) for one in ("hf_hub_url", "subset", "split"))
    source = _source(str(folder / place), most=most) if place else _source(str(hub), subset, split, most)
    rows = f", its first {most:,} rows (max_samples)" if most else ""
    reader.put(key, source, f"dataset {name} of {folder / _LIST_OF_DATASETS}{rows}")
    form, columns = str(entry.pop("formatting", "alpaca")), dict(entry.pop("columns", None) or {})
    if stage == "pt":
        reader.put("data.text_column", str(columns.pop("prompt", "text")), "columns.prompt")
    elif form == "sharegpt":
        reader.put("data.text_column", str(columns.pop("messages", "conversations")), "columns.messages")
        tags = entry.get("tags") or {}
        pair = {"role": tags.get("role_tag", "from"), "content": tags.get("content_tag", "value")}
        if (
            pair in _MESSAGES
            and {value for tag, value in tags.items() if tag not in ("role_tag", "content_tag")} <= _SPEAKERS
        ):
            entry.pop("tags", None)
    else:
        usual = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
        columns = {one: column for one, column in columns.items() if usual.get(one) != column}
        reader.remarks[key] += "; an empty line, not a line end, between instruction and input"
    for one, value in (*entry.items(), *columns.items()):
        if value:
            reader.refuse(f"{one} = {_short(value)} of dataset {name}", _UNKNOWN)


def _entry(path: Path, folder: Path, name: str) -> dict[str, Any]:
    listing = folder / _LIST_OF_DATASETS
    if not listing.is_file():
        raise BiremeError(
            f"{path}: dataset_dir is {folder}, and there is no file {listing}. Call bireme in the folder in "
            "which LLaMA-Factory is called."
        )
    found = read_json_object(listing).get(name)
    if not isinstance(found, dict):
        several = "several datasets cannot be translated; put the rows into one file"
        why = several if "," in name else "it is not there"
        raise BiremeError(f"{path}: dataset is {name!r}, a name in {listing}: {why}.")
    return found
