"""`bireme generate`: texts that a model writes, token by token, in one process or in a line of several.

A decoder of transformers writes with a cache of keys and values: each process has some of its layers. Any
other model runs as captured units without a cache, so each token takes a forward over all tokens before it.
"""

import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from io import FileIO
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import torch
from pydantic import TypeAdapter
from torch import Tensor

from bireme.bounds import counted
from bireme.devices import num_accelerators
from bireme.errors import BiremeError, Progress, printable, tell
from bireme.files import scratch_folder
from bireme.model.decoder import decoder_of, state_graph
from bireme.model.graph import Graph
from bireme.model.graph_file import load_graph, save_graph
from bireme.plan.plan_file import load_plan
from bireme.runtime.fabric import DistFabric
from bireme.runtime.token_line import TokenLine, continued
from bireme.runtime.world import World
from bireme.train.data.encoding import chat_form
from bireme.train.data.prepare import check_tokenizer, vocabulary_of
from bireme.train.data.tokenizer import FolderTokenizer, Tokenizer, load_tokenizer
from bireme.train.folder import RunFolder
from bireme.train.machines import machines_here
from bireme.train.model import RunModel
from bireme.train.rendezvous import Announcements
from bireme.train.run_file import RunFile
from bireme.train.run_file.defaults import context_of, folder_of
from bireme.train.shared_model import ModelWork, device_for, launched, shared_world, use_device
from bireme.train.subject import (
    IDS,
    DividedModel,
    Subject,
    check_count,
    num_bytes_of,
    num_gpus_for,
    places_of,
    room_on,
)

_LABELS = "labels"


@dataclass(frozen=True, slots=True)
class Generated:
    """What a model wrote. `ended` is whether it ended the text itself; `by` is what ran it on `device`. The
    first token was there after `first_s` of the `seconds`.
    """

    model: str
    step: int | None
    prompt: str
    text: str
    ids: tuple[int, ...]
    num_prompt_tokens: int
    ended: bool
    seconds: float
    first_s: float
    num_processes: int
    by: str
    device: str

    @property
    def speed(self) -> str:
        """The tokens per second, and the processes that made them."""
        count, rest_s = len(self.ids), self.seconds - self.first_s
        rate = f", then {(count - 1) / rest_s:,.1f} tokens/s" if count > 1 and rest_s > 0 else ""
        prompt = f"the first one after {self.first_s:.2f} s for a prompt of {self.num_prompt_tokens:,}"
        begin = f"{counted(count, 'token')}, {prompt}{rate}" if count else "no token"
        return f"{begin}; {self.by}, on {self.device}"


@dataclass(frozen=True, slots=True)
class WritingStyle:
    """How a text is written: at most `num_tokens`, the likeliest if the temperature is 0, else drawn from
    `seed` among the likeliest ones that have `top_p` of the probability together.

    With `is_chat` a prompt is a message of the user's.
    """

    num_tokens: int
    temperature: float
    seed: int
    is_chat: bool = False
    top_p: float = 1.0


Ask = Callable[..., Any]
"""Asks the command that a person has typed for the next `prompt`, which is None after the last one, or has it
show a `piece` of a text, or what was `written`. If several processes write, one of them asks. A prompt is
given again until its text is written.
"""


_READING = threading.Lock()
"""Held while a prompt is read: the thread that answers a process may still read when that process was killed
and the next one asks.
"""


@dataclass(slots=True)
class Terminal:
    """Prompts of the command line, or if there are none those of the lines of standard input, and their texts
    on standard output.
    """

    prompts: Sequence[str]
    is_chat: bool
    as_json: bool
    _num: int = 0
    _asked: str | None = None
    _input: FileIO | None = field(default=None, repr=False)

    def __call__(self, what: str, *words: Any) -> Any:
        """The answer to a question."""
        acts: dict[str, Ask] = {"piece": self._piece, "written": self._written}
        if what != "prompt":
            return acts[what](*words)
        with _READING:
            return self._prompt()

    def _prompt(self) -> str | None:
        if self._asked is not None:
            _show("\n" * (not self.as_json))  # its text begins again
        elif self.prompts:
            self._asked = self.prompts[self._num] if self._num < len(self.prompts) else None
            self._num += 1
        else:
            self._asked = self._typed()
        if self._asked is not None and not self.as_json and not self.is_chat:
            _show(self._asked)
        return self._asked

    def _typed(self) -> str | None:
        """The next line that is not empty; None at the end."""
        # Not sys.stdin, whose lock would keep a process from ending while a thread waits for a line.
        self._input = self._input or FileIO(0, closefd=False)
        while True:
            if sys.stdin.isatty():
                sys.stderr.write("> ")
                sys.stderr.flush()
            line = self._input.readline().decode(errors="replace")
            if text := line.rstrip("\r\n"):
                return text
            if not line:
                return None

    def _piece(self, text: str) -> None:
        if not self.as_json:
            _show(printable(text, "\n\t") if sys.stdout.isatty() else text)

    def _written(self, found: Generated) -> None:
        self._asked = None
        if self.as_json:
            _show(json.dumps(asdict(found), ensure_ascii=False) + "\n")
        else:
            _show("\n")
            tell(found.speed)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Choice:
    """Chooses the next token, an id below `num_tokens`, by the scores of all; None for one of the `ends`."""

    def __init__(self, style: WritingStyle, num_tokens: int, ends: frozenset[int]) -> None:
        self._style, self._num_tokens, self._ends = style, num_tokens, ends
        self._generator = torch.Generator().manual_seed(style.seed)

    def __call__(self, given: Tensor) -> int | None:
        """The next token of the text."""
        scores, style = given.float().cpu(), self._style
        scores[self._num_tokens :] = -torch.inf
        if style.temperature:
            shares = torch.softmax(scores / style.temperature, dim=-1)
            if style.top_p < 1:
                ordered, places = shares.sort(descending=True)
                shares[places[1:][ordered.cumsum(0)[:-1] >= style.top_p]] = 0
            chosen = int(torch.multinomial(shares, 1, generator=self._generator))
        else:
            chosen = int(scores.argmax())
        return None if chosen in self._ends else chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writing(ModelWork):
    """The work of all processes. The model has a context of `context` tokens, its tokenizer `num_tokens` ids.
    `cuts` are those of the run's plan, None if the processes divide the model by their memory.
    """

    reads_data: ClassVar = False

    style: WritingStyle
    num_tokens: int
    context: int
    is_cached: bool
    cuts: tuple[int, ...] | None


_WRITING = TypeAdapter(_Writing)


@dataclass(frozen=True, slots=True)
class TextWriter:
    """A model that is to write with `count` processes, with its captured graph unless it has a cache."""

    work: _Writing
    model: RunModel
    tokenizer: Tokenizer
    count: int
    device: torch.device
    """Of a process alone."""
    graph: Graph | None

    def write(self, ask: Ask) -> None:
        """Let the model write all texts that are asked for, in new processes if they are several: then `ask`
        must go through pickle.
        """
        with scratch_folder() as scratch:
            work = self.saved(scratch)
            if self.count > 1:
                run = work.run.with_keys("cluster", source=None, workers=self.count, backend="gloo")
                launched(_write_part, machines_here(run), self.count, run, work, ask)
                return
            with World.alone(device=self.device.type) as world:
                _write_part(world, work, ask, self.model)

    def saved(self, scratch: str) -> _Writing:
        """The work with the captured graph in a file."""
        if self.graph is None:
            return self.work
        path = Path(scratch) / "graph.json"
        save_graph(self.graph, path)
        return replace(self.work, graph=path)


def write_with_others(
    text: str, sets: Sequence[str], style: WritingStyle, prompts: Sequence[str], ask: Ask
) -> None:
    """Let the model that `text` names write, in processes that torchrun or `bireme join` has started: each of
    them calls this, and rank 0 asks. `prompts` are known before.
    """
    with shared_world(text) as (world, files), scratch_folder() as scratch:
        work = None
        if world.rank == 0:
            subject = files.find(sets, tell)
            writer = writer_of(subject, style, prompts, lambda _done, _what: None, world.size)
            work = writer.saved(scratch)
            if world.num_local < world.size:  # a plan that trains may leave a machine without room
                work = replace(work, cuts=None)
        work = files.share(work, _WRITING)
        use_device(world, work.run)
        _write_part(world, work, ask)


def writer_of(
    subject: Subject,
    style: WritingStyle,
    prompts: Sequence[str],
    progress: Progress,
    count: int | None = None,
) -> TextWriter:
    """The model of a subject, to write with `count` processes, by default as many as its weights need.
    `prompts` are those known before.
    """
    progress(0.0, "loading the model")
    # Nothing that packs documents, a last layer that leaves its scores, and none of the run's data.
    unused = {"mixture": None, "evaluation_source": None, "private": None, "packing": None}
    data = {**unused, "source": RunFile().data.source}
    run = subject.run.with_keys("data", **data).with_keys("model", fused_loss=False)
    model = RunModel.of(run, 1)
    _check_writes(model, subject.name)
    tokenizer = _tokenizer_of(model)
    begun = [_first(subject, model, tokenizer, style, prompt)[0] for prompt in prompts or [""]]
    config: Any = model.source.base.config if folder_of(run.model.source) is not None else None
    context = None if config is None else context_of(config.to_dict())
    decoder = decoder_of(model.source.model)
    states = _states(subject, model)
    num_bytes = num_bytes_of(states)
    needed, device = num_gpus_for(run, num_bytes), _device_for(run, num_bytes)
    count = count or (needed if needed <= num_accelerators() else 1)
    is_whole = count == 1 and num_bytes <= room_on(device)
    if decoder is not None and decoder.layers is None and not is_whole:
        decoder = None
    if decoder is None:
        length = max(map(len, begun)) + style.num_tokens if prompts else run.data.length
        run = run.with_keys("data", length=min(length, context or length))
        model = RunModel.of(run, 1)
        progress(0.0, "capturing the model")
        states = model.evaluation.graph(1)
    subject.check(model, states)
    whole = DividedModel(subject.name, states, decoder, context or sys.maxsize)
    check_count(count, len(whole.sizes()), "units" if decoder is None else "layers")
    work = _Writing(
        subject=subject,
        run=run,
        style=style,
        num_tokens=tokenizer.num_tokens,
        context=whole.context,
        is_cached=decoder is not None,
        cuts=_planned_cuts(subject, count, whole),
    )
    return TextWriter(work, model, tokenizer, count, device, states if decoder is None else None)


def _write_part(world: World, work: _Writing, ask: Ask, model: RunModel | None = None) -> None:
    """The work of each process: load its part of the model, and let the tokens of all texts through."""
    model, device, style = model or RunModel.of(work.run, 1), world.device, work.style
    line = TokenLine(DistFabric(world, wait_s=torch.inf), device)
    decoder = decoder_of(model.source.model) if work.is_cached else None
    states = _states(work.subject, model) if work.graph is None else load_graph(work.graph)
    whole = DividedModel(work.subject.name, states, decoder, work.context)
    weights = work.subject.weights(model, states)
    part = whole.part(weights, device, places_of(world), world.rank, work.cuts)
    tokenizer, talk, number = _tokenizer_of(model), Announcements(world.store), 0
    try:
        line.meet()
        while True:
            prompt, name = None, f"text/{number}"
            if world.rank == 0:
                prompt = ask("prompt")
                begin = None if prompt is None else _first(work.subject, model, tokenizer, style, prompt)
                talk.say(name, begin and [begin[0], [*begin[1]]])
            if (told := talk.hear(name)) is None:
                return
            first, ends = told
            text, begin_s, first_s = _Text(tokenizer, first, partial(ask, "piece")), perf_counter(), 0.0
            choice = Choice(style, work.num_tokens, frozenset(ends))
            for one in continued(part, first, choice, style.num_tokens, line):
                first_s = first_s or perf_counter() - begin_s
                if world.rank == 0:
                    text.add(one)
            if prompt is not None:
                found = Generated(
                    work.subject.name,
                    work.subject.step,
                    prompt,
                    text.end(),
                    (ids := tuple(text.ids[len(first) :])),
                    len(first),
                    len(ids) < style.num_tokens,
                    perf_counter() - begin_s,
                    first_s,
                    world.size,
                    f"{counted(world.size, 'process')} {part.how}",
                    device.type,
                )
                ask("written", found)
            number += 1
    except BrokenPipeError:  # the reader of the text has enough
        raise KeyboardInterrupt from None
    finally:
        line.close()


def _planned_cuts(subject: Subject, count: int, model: DividedModel) -> tuple[int, ...] | None:
    """The cuts of the run's plan, if its stages are as many as the processes."""
    if count == 1 or not subject.is_run or subject.graph is None:
        return None
    cuts = load_plan(RunFolder(Path(subject.name)).plan).plan.cuts
    if len(cuts) + 1 != count:
        return None
    if model.decoder is not None:
        return model.decoder.cuts(load_graph(subject.graph), cuts)
    return cuts if cuts[-1] < len(model.sizes()) else None


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
    if is_other or IDS not in inputs or inputs.keys() - {IDS, _LABELS}:
        raise BiremeError(
            f"{name} holds a {type(source).__name__}, which does not continue a text: it takes "
            f"{', '.join(inputs)}. Name a model that predicts the next token from input_ids alone."
        )


def _tokenizer_of(model: RunModel) -> Tokenizer:
    """The tokenizer of a run. The model has all tokens of ordinary text."""
    vocabulary = vocabulary_of(model.source.base)
    tokenizer = load_tokenizer(
        model.run.data.tokenizer,
        model_folder=folder_of(model.run.model.source),
        model_vocabulary=vocabulary,
    )
    check_tokenizer(tokenizer, vocabulary)
    return tokenizer


def _first(
    subject: Subject, model: RunModel, tokenizer: Tokenizer, style: WritingStyle, prompt: str
) -> tuple[list[int], frozenset[int]]:
    """The ids of a prompt, and those that end the text."""
    answer: list[int] = []
    if style.is_chat:
        form = chat_form(tokenizer)
        example = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "1"}]
        row = form.encode(example, "the prompt")
        ids, answer = form.question(prompt), row.ids[row.counts].tolist()
    elif isinstance(tokenizer, FolderTokenizer) and subject.step is None:
        # A model that Bireme did not train begins texts as its own tokenizer does.
        ids = [int(one) for one in tokenizer.backend(prompt)["input_ids"]]
    else:
        ids = tokenizer.encode(prompt)
    vocabulary = vocabulary_of(model.source.base)
    if vocabulary is not None and max(ids, default=0) >= vocabulary:
        raise BiremeError(
            f"The prompt has {tokenizer.marked([max(ids)])!r}, token {max(ids)} of the tokenizer, but the "
            f"model has only {vocabulary} tokens. Write the prompt without it."
        )
    return ids or [tokenizer.end_of_text or 0], end_ids(subject.run, tokenizer, answer)


class _Text:
    """The text after a prompt, of ids that come one by one. Some letters take several of them."""

    def __init__(self, tokenizer: Tokenizer, first: Sequence[int], show: Callable[[str], None]) -> None:
        self._tokenizer, self._show = tokenizer, show
        self.ids = list(first)
        self._told = tokenizer.decode(first)
        self._begin = len(self._told)

    def add(self, number: int) -> None:
        """Take one more."""
        self.ids.append(number)
        text = self._tokenizer.decode(self.ids)
        if not text.endswith("\ufffd"):
            self._show(text[len(self._told) :])
            self._told = text

    def end(self) -> str:
        """The whole text."""
        text = self._tokenizer.decode(self.ids)
        self._show(text[len(self._told) :])
        return text[self._begin :]


def _device_for(run: RunFile, num_bytes: int) -> torch.device:
    """The device of a process alone: one that has room for the weights, if there is one."""
    cpu, own = torch.device("cpu"), device_for(run, 0)
    return cpu if room_on(own) < num_bytes <= room_on(cpu) else own


def _states(subject: Subject, model: RunModel) -> Graph:
    """The states of a model. Which weights are in four bits only a captured graph has."""
    captured = None
    if model.run.model.frozen_dtype is not None:
        captured = model.evaluation.graph(1) if subject.graph is None else load_graph(subject.graph)
    return state_graph(model.source.model, captured)
