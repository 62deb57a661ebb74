"""`bireme generate`: text that a model writes, token by token.

A folder of transformers that fits a device here writes with transformers' own `generate` and its cache of
keys and values. Every other model runs as stages, one after the other, each with its weights from the
checkpoint: those that fit stay in memory, the others are read again for each token. A captured graph has no
cache, so each token takes a forward over all tokens before it.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bireme.bounds import counted
from bireme.cluster.machine import available_bytes
from bireme.devices import ACCELERATOR, device_of_process, num_accelerators, properties_of
from bireme.errors import BiremeError
from bireme.model.graph import Graph, Reference, Value
from bireme.model.stage import StageFunction, stage_function
from bireme.model.units import units_of
from bireme.model.weights import Weights
from bireme.train.data.encoding import chat_form
from bireme.train.data.prepare import vocabulary_of
from bireme.train.data.tokenizer import FolderTokenizer, Tokenizer, load_tokenizer
from bireme.train.export import exported_step
from bireme.train.folder import RunFolder
from bireme.train.model import RunModel
from bireme.train.run_file import RunFile
from bireme.train.run_file.defaults import WEIGHTS, context_of, folder_of
from bireme.train.subject import Subject
from bireme.user_code import reason_of

Predict = Callable[[Sequence[int]], Tensor]
"""From token ids to the scores of the token after the last of them."""

Tell = Callable[[str], None]

_FILLED = 0.8
"""Share of the free memory that weights may take, so that there is room for what goes through them."""

_IDS, _LABELS, _LOGITS = "input_ids", "labels", "logits"


@dataclass(frozen=True, slots=True)
class Generated:
    """What a model wrote. `ended` is whether it ended the text itself; `by` is what ran it on `device`."""

    model: str
    step: int | None
    prompt: str
    text: str
    ids: tuple[int, ...]
    num_prompt_tokens: int
    ended: bool
    seconds: float
    by: str
    device: str

    def document(self) -> dict[str, Any]:
        """In the words of JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What to write: at most `num_tokens`, the likeliest if the temperature is 0, else drawn from `seed`.

    With `is_chat` the prompt is a message of the user's.
    """

    prompt: str
    num_tokens: int
    temperature: float
    seed: int
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class TextWriter:
    """A model that is loaded, and what it is to write."""

    subject: Subject
    asked: TextRequest
    tokenizer: Tokenizer
    first: tuple[int, ...]
    """The ids of the prompt."""
    ends: frozenset[int]
    engine: "_Transformers | _Stages"

    def write(self, tell: Tell) -> Generated:
        """Let the model write; `tell` gets each piece of the text as soon as it is there."""
        text, asked, begin_s = _Text(self.tokenizer, self.first, tell), self.asked, perf_counter()
        if isinstance(self.engine, _Transformers):
            ids = self.engine.write(self.first, asked, self.ends, text)
        else:
            made = continued(
                self.engine,
                self.first,
                asked,
                context=self.engine.length,
                num_tokens=self.tokenizer.num_tokens,
                ends=self.ends,
            )
            ids = [text.add(number) for number in made]
        return Generated(
            self.subject.name,
            self.subject.step,
            asked.prompt,
            text.end(),
            tuple(ids),
            len(self.first),
            len(ids) < asked.num_tokens,
            perf_counter() - begin_s,
            self.engine.name,
            self.engine.device.type,
        )


def writer_of(subject: Subject, asked: TextRequest, progress: Callable[[float, str], None]) -> TextWriter:
    """The model of a subject, loaded by transformers if a device has room for it, else as stages."""
    progress(0.0, "loading the model")
    run = subject.run
    changed = {  # nothing that packs documents, and a last layer that leaves its scores
        "data": run.data.model_copy(update={"packing": None}),
        "model": run.model.model_copy(update={"fused_loss": False}),
    }
    run = run.model_copy(update=changed)
    model = RunModel.of(run, 1)
    _check_writes(model, subject.name)
    made_from = folder_of(run.model.source)
    tokenizer = load_tokenizer(
        run.data.tokenizer,
        model_folder=made_from,
        model_vocabulary=vocabulary_of(model.source.base),
    )
    first, ends = _first(subject, tokenizer, asked)
    config: Any = model.source.base.config if made_from is not None else None
    context = None if config is None else context_of(config.to_dict())
    length = len(first) + asked.num_tokens
    folder = _folder_of(subject)
    device = None if folder is None or length > (context or length) else _room_for(model)
    engine: _Transformers | _Stages
    if folder is not None and device is not None:
        engine = _Transformers(model, folder, device)
    else:
        data = run.data.model_copy(update={"length": min(length, context or length)})
        model = RunModel.of(run.model_copy(update={"data": data}), 1)
        progress(0.0, "capturing the model")
        graph = model.evaluation.graph(1)
        subject.check(model, graph)
        progress(0.0, "loading the weights")
        engine = _Stages(graph, subject.weights(model, graph), _device(run), subject.name)
    return TextWriter(subject, asked, tokenizer, tuple(first), ends, engine)


def continued(
    predict: Predict,
    first: Sequence[int],
    asked: TextRequest,
    *,
    context: int,
    num_tokens: int,
    ends: frozenset[int],
) -> Iterator[int]:
    """Ids below `num_tokens`, one by one, each predicted from the last `context` before it, up to one of the
    `ends`.
    """
    generator = torch.Generator().manual_seed(asked.seed)
    ids = list(first)
    for _ in range(asked.num_tokens):
        scores = predict(ids[-context:]).float().cpu()
        scores[num_tokens:] = -torch.inf
        if asked.temperature:
            shares = torch.softmax(scores / asked.temperature, dim=-1)
            chosen = int(torch.multinomial(shares, 1, generator=generator))
        else:
            chosen = int(scores.argmax())
        if chosen in ends:
            return
        ids.append(chosen)
        yield chosen


def end_ids(run: RunFile, tokenizer: Tokenizer, answer: Sequence[int] = ()) -> frozenset[int]:
    """The ids after which a text is over: the tokenizer's end, those of the model's folder, and the special
    token at the end of an `answer`.
    """
    found = set() if tokenizer.end_of_text is None else {tokenizer.end_of_text}
    if (folder := folder_of(run.model.source)) is not None:
        for name in ("config.json", "generation_config.json"):
            try:
                own = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            except (OSError, ValueError, AttributeError):
                continue
            found.update(one for one in (own if isinstance(own, list) else [own]) if isinstance(one, int))
    if isinstance(tokenizer, FolderTokenizer):
        special = set(tokenizer.backend.all_special_ids)
        found.update([one for one in answer if one in special][-1:])
    return frozenset(found)


def _check_writes(model: RunModel, name: str) -> None:
    """Refuse models that do not predict the next token."""
    inputs, source = model.source.example_inputs, model.source.base
    can = getattr(source, "can_generate", None)
    config = getattr(source, "config", None)
    is_other = can is not None and (not can() or getattr(config, "is_encoder_decoder", False))
    if is_other or _IDS not in inputs or inputs.keys() - {_IDS, _LABELS}:
        raise BiremeError(
            f"{name} holds a {type(source).__name__}, which does not continue a text: it takes "
            f"{', '.join(inputs)}. Name a model that predicts the next token from input_ids alone."
        )


def _first(subject: Subject, tokenizer: Tokenizer, asked: TextRequest) -> tuple[list[int], frozenset[int]]:
    """The ids of the prompt, and those that end the text."""
    if asked.is_chat:
        form = chat_form(tokenizer)
        example = [{"role": "user", "content": asked.prompt}, {"role": "assistant", "content": "1"}]
        row = form.encode(example, "the prompt")
        return form.question(asked.prompt), end_ids(subject.run, tokenizer, row.ids[row.counts].tolist())
    ends = end_ids(subject.run, tokenizer)
    if isinstance(tokenizer, FolderTokenizer) and subject.step is None:
        # A model that Bireme did not train begins texts as its own tokenizer does.
        ids = [int(one) for one in tokenizer.backend(asked.prompt)["input_ids"]]
    else:
        ids = tokenizer.encode(asked.prompt)
    return ids or [tokenizer.end_of_text or 0], ends


class _Text:
    """The text after a prompt, of ids that come one by one. Some letters take several of them."""

    def __init__(self, tokenizer: Tokenizer, first: Sequence[int], tell: Tell) -> None:
        self._tokenizer, self._tell = tokenizer, tell
        self._ids = list(first)
        self._told = tokenizer.decode(first)
        self._begin = len(self._told)

    def add(self, number: int) -> int:
        """Take one more, and give it back."""
        self._ids.append(number)
        text = self._tokenizer.decode(self._ids)
        if not text.endswith("\ufffd"):
            self._tell(text[len(self._told) :])
            self._told = text
        return number

    def end(self) -> str:
        """The whole text."""
        text = self._tokenizer.decode(self._ids)
        self._tell(text[len(self._told) :])
        return text[self._begin :]


# A folder that transformers loads, in the memory of one device.


def _folder_of(subject: Subject) -> Path | None:
    """The folder of transformers with the weights of a subject; None if there is none."""
    if subject.is_run:
        folder: Path | None = RunFolder(Path(subject.name)).model
        is_newest = folder is not None and exported_step(folder) == subject.step
    else:
        folder = folder_of(subject.run.model.source)
        is_newest = subject.folder is None and subject.run.model.lora.rank is None
    if folder is None or not is_newest or not (folder / "config.json").is_file():
        return None
    return folder if any(any(folder.glob(one)) for one in WEIGHTS) else None


def _room_for(model: RunModel) -> torch.device | None:
    """The device that takes the whole model; None if none does."""
    needed = sum(one.numel() * one.element_size() for one in model.source.base.parameters())
    devices = (_device(model.run), torch.device("cpu"))
    return next((one for one in devices if needed <= _room(one)), None)


def _device(run: RunFile) -> torch.device:
    if num_accelerators() and run.cluster.device != "cpu":
        return device_of_process(ACCELERATOR, 0)
    return torch.device("cpu")


def _room(device: torch.device) -> float:
    """The bytes that weights may take on a device."""
    return _FILLED * (available_bytes() if device.type == "cpu" else properties_of(device).memory_bytes)


class _Transformers:
    """A folder that transformers has loaded, with its own `generate`."""

    name = "transformers, with a cache"

    def __init__(self, model: RunModel, folder: Path, device: torch.device) -> None:
        kind: Any = type(model.source.base)
        dtype = next(model.source.base.parameters()).dtype
        self.device = device
        with _quiet():
            try:
                loaded, found = kind.from_pretrained(
                    str(folder), dtype=dtype, local_files_only=True, output_loading_info=True
                )
            except Exception as error:  # its files are read by code that raises errors of any kind
                raise BiremeError(f"The model in {folder} cannot be loaded: {reason_of(error)}.") from error
        if found["missing_keys"]:
            raise BiremeError(
                f"{folder} lacks {min(found['missing_keys'])}, so the model is not whole. Fetch it again, or "
                "export it again."
            )
        self._model = loaded.to(device).eval()

    def write(
        self, first: Sequence[int], asked: TextRequest, ends: frozenset[int], text: "_Text"
    ) -> list[int]:
        """The ids after the first ones."""
        given = torch.tensor([list(first)], device=self.device)
        how: dict[str, Any] = {"do_sample": False}
        if asked.temperature:
            how = {"do_sample": True, "temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
        with _quiet(), torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(asked.seed)
            made = self._model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=asked.num_tokens,
                eos_token_id=sorted(ends) or None,
                pad_token_id=min(ends, default=0),
                streamer=_Streamer(text, ends),
                **how,
            )
        ids: list[int] = made[0, len(first) :].tolist()
        return ids[:-1] if ids and ids[-1] in ends else ids


class _Streamer:
    """Gets the prompt and then each id from transformers' `generate`."""

    def __init__(self, text: "_Text", ends: frozenset[int]) -> None:
        self._text, self._ends, self._is_prompt = text, ends, True

    def put(self, ids: Tensor) -> None:
        for number in () if self._is_prompt else ids.flatten().tolist():
            if number not in self._ends:
                self._text.add(number)
        self._is_prompt = False

    def end(self) -> None:
        pass


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars and the advice of transformers."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()


# Any model as stages, one after the other on one device.


class _Stages:
    """A model's graph as stages of a unit each, without gradients.

    Weights stay on the device as far as they fit; those of the other stages are read whenever they run.
    """

    def __init__(self, graph: Graph, weights: Weights, device: torch.device, name: str) -> None:
        ids = next(value for value in graph.inputs if value.name == _IDS)
        self.length = int(ids.shape[1])
        """The tokens that the graph reads."""
        self.device = device
        self._output = _logits_of(graph, self.length, name)
        self._weights = weights
        self._inputs = [value.name for value in graph.inputs]
        states = (*graph.parameters, *graph.buffers)
        self._dtypes = {state.name: getattr(torch, state.dtype) for state in states}
        sizes = {state.name: state.num_bytes for state in states}
        self._functions = [stage_function(graph, [unit], outputs=(self._output,)) for unit in units_of(graph)]
        self._kept: list[Mapping[str, Tensor] | None] = []
        room = _room(device)
        for function in self._functions:
            held = sum(sizes[name] for name in (*function.parameters, *function.buffers))
            room -= held
            self._kept.append(self._read(function) if room >= 0 else None)
        num_read = sum(one is None for one in self._kept)
        self.name = f"{counted(len(self._kept), 'stage')} without a cache"
        if num_read:
            self.name += f", {num_read} of them read for each token"

    @torch.no_grad()
    def __call__(self, ids: Sequence[int]) -> Tensor:
        """The scores of the next token. Attention is causal, so the padding after the ids is not seen."""
        given = torch.zeros((1, self.length), dtype=torch.int64, device=self.device)
        given[0, : len(ids)] = torch.tensor(list(ids))
        values = dict.fromkeys(self._inputs, given)
        for function, kept in zip(self._functions, self._kept, strict=True):
            weights = self._read(function) if kept is None else kept
            values |= function(weights, weights, values, device=self.device)
        return values[self._output][0, len(ids) - 1]

    def _read(self, function: StageFunction) -> dict[str, Tensor]:
        found = self._weights((*function.parameters, *function.buffers))
        return {name: one.to(self.device, self._dtypes[name]) for name, one in found.items()}


def _logits_of(graph: Graph, length: int, name: str) -> str:
    """The output with a score for each place and token."""
    values: dict[str, Value] = graph.values
    for output in sorted(graph.outputs, key=lambda one: one.name != _LOGITS):
        value = values.get(output.value.name) if isinstance(output.value, Reference) else None
        if value is not None and len(value.shape) == 3 and value.shape[1] == length:
            return output.name
    raise BiremeError(
        f"{name} holds a model that returns no scores for the next token. Let its forward return them as "
        "`logits`, beside its loss."
    )
