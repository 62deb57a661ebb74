"""`bireme generate`: text that a model writes, token by token, in one process or in a line of several.

A decoder of transformers writes with a cache of keys and values: each process has some of its layers. Any
other model runs as captured units without a cache, so each token takes a forward over all tokens before it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bireme.bounds import counted
from bireme.devices import ACCELERATOR, device_of_process, num_accelerators
from bireme.errors import BiremeError, Progress, Tell
from bireme.model.decoder import decoder_of, state_graph
from bireme.model.graph import Graph
from bireme.model.graph_file import load_graph, save_graph
from bireme.plan.plan_file import load_plan
from bireme.runtime.fabric import DistFabric
from bireme.runtime.launch import launch
from bireme.runtime.token_line import TokenLine, continued
from bireme.runtime.world import World
from bireme.train.data.encoding import chat_form
from bireme.train.data.prepare import check_tokenizer, vocabulary_of
from bireme.train.data.tokenizer import FolderTokenizer, Tokenizer, load_tokenizer
from bireme.train.folder import RunFolder
from bireme.train.machines import machines_here
from bireme.train.model import RunModel
from bireme.train.run_file import RunFile
from bireme.train.run_file.defaults import context_of, folder_of
from bireme.train.subject import (
    IDS,
    CapturedPart,
    DecoderPart,
    DividedModel,
    PartPlace,
    Subject,
    num_bytes_of,
    num_gpus_for,
    reading_speed,
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

    def document(self) -> dict[str, Any]:
        """In the words of JSON."""
        return asdict(self)

    @property
    def speed(self) -> str:
        """The tokens per second, and the processes that made them."""
        count, rest_s = len(self.ids), self.seconds - self.first_s
        rate = f", then {(count - 1) / rest_s:,.1f} tokens/s" if count > 1 and rest_s > 0 else ""
        prompt = f"the first one after {self.first_s:.2f} s for a prompt of {self.num_prompt_tokens:,}"
        begin = f"{counted(count, 'token')}, {prompt}{rate}" if count else "no token"
        return f"{begin}; {self.by}, on {self.device}"


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What to write: at most `num_tokens`, the likeliest if the temperature is 0, else drawn from `seed`
    among the likeliest ones that have `top_p` of the probability together.

    With `is_chat` the prompt is a message of the user's.
    """

    prompt: str
    num_tokens: int
    temperature: float
    seed: int
    is_chat: bool = False
    top_p: float = 1.0


class Choice:
    """Chooses the next token, an id below `num_tokens`, by the scores of all; None for one of the `ends`."""

    def __init__(self, asked: TextRequest, num_tokens: int, ends: frozenset[int]) -> None:
        self._asked, self._num_tokens, self._ends = asked, num_tokens, ends
        self._generator = torch.Generator().manual_seed(asked.seed)

    def __call__(self, given: Tensor) -> int | None:
        """The next token of the text."""
        scores, asked = given.float().cpu(), self._asked
        scores[self._num_tokens :] = -torch.inf
        if asked.temperature:
            shares = torch.softmax(scores / asked.temperature, dim=-1)
            if asked.top_p < 1:
                ordered, places = shares.sort(descending=True)
                shares[places[1:][ordered.cumsum(0)[:-1] >= asked.top_p]] = 0
            chosen = int(torch.multinomial(shares, 1, generator=self._generator))
        else:
            chosen = int(scores.argmax())
        return None if chosen in self._ends else chosen


@dataclass(frozen=True, slots=True)
class _Task:
    """The work of all processes: the model of `run` with its weights, and the text to write with it.

    `cuts` are those of the run's plan, None if the processes divide the model by their memory. `graph` is a
    file with the captured model, None if each process captures it.
    """

    subject: Subject
    run: RunFile
    asked: TextRequest
    first: tuple[int, ...]
    """The ids of the prompt."""
    ends: frozenset[int]
    num_tokens: int
    """The ids that the tokenizer knows."""
    context: int
    is_cached: bool
    num_processes: int
    cuts: tuple[int, ...] | None = None
    graph: Path | None = None

    def choice(self) -> Choice:
        """Chooses the tokens of the text."""
        return Choice(self.asked, self.num_tokens, self.ends)


@dataclass(frozen=True, slots=True)
class TextWriter:
    """A model that is ready to write: loaded, if it writes in this process alone."""

    task: _Task
    tokenizer: Tokenizer
    part: DecoderPart | CapturedPart | None = None
    graph: Graph | None = None

    def write(self, tell: Tell) -> Generated:
        """Let the model write; `tell` gets each piece of the text as soon as it is there. If several
        processes write, one of them calls it, so it must be importable.
        """
        if self.part is not None:
            return _written(self.task, self.tokenizer, self.part, None, tell)
        task, run = self.task, self.task.run
        here = run.with_keys("cluster", source=None, workers=task.num_processes, backend="gloo")
        machines = machines_here(here)
        with TemporaryDirectory() as scratch:
            if self.graph is not None:
                path = Path(scratch) / "graph.json"
                save_graph(self.graph, path)
                task = replace(task, graph=path)
            found = launch(
                _write_part,
                task.num_processes,
                task,
                tell,
                timeout_s=run.cluster.timeout_s,
                threads_per_process=machines.threads,
                device=machines.device,
            )[0]
        assert found is not None
        return found

    def write_with_others(self, tell: Tell) -> Generated | None:
        """The same in processes that torchrun has started, each of which calls this; None but on rank 0."""
        device = _device(self.task.run).type
        with World.from_environment(timeout_s=self.task.run.cluster.timeout_s, device=device) as world:
            return _write_part(world, self.task, tell)


def show(text: str) -> None:
    """Write a piece of a text to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def hide(_text: str) -> None:
    """Show nothing of a text before it is whole."""


def writer_of(
    subject: Subject,
    asked: TextRequest,
    progress: Progress,
    *,
    workers: int | None = None,
    is_of_many: bool = False,
) -> TextWriter:
    """The model of a subject, ready to write in as many processes, by default as many as its weights need.
    With `is_of_many` other programs have started them, and each makes a writer.
    """
    progress(0.0, "loading the model")
    # Nothing that packs documents, and a last layer that leaves its scores.
    run = subject.run.with_keys("data", packing=None).with_keys("model", fused_loss=False)
    model = RunModel.of(run, 1)
    _check_writes(model, subject.name)
    tokenizer = _tokenizer_of(model)
    first, ends = _first(subject, tokenizer, asked)
    config: Any = model.source.base.config if folder_of(run.model.source) is not None else None
    context = None if config is None else context_of(config.to_dict())
    decoder = decoder_of(model.source.model)
    states = _states(subject, model)
    num_bytes = num_bytes_of(states)
    needed, device = num_gpus_for(run, num_bytes), _device_for(run, num_bytes)
    count = workers or (needed if needed <= num_accelerators() else 1)
    is_whole = count == 1 and num_bytes <= room_on(device)
    if decoder is not None and decoder.layers is None and not is_whole:
        decoder = None
    if decoder is None:
        length = len(first) + asked.num_tokens
        run = run.with_keys("data", length=min(length, context or length))
        model = RunModel.of(run, 1)
        progress(0.0, "capturing the model")
        states = model.evaluation.graph(1)
    subject.check(model, states)
    whole = DividedModel(subject.name, states, decoder, context or sys.maxsize)
    num_parts = len(whole.sizes())
    if count > num_parts:
        what = "units" if decoder is None else "layers"
        raise BiremeError(
            f"The model has {num_parts} {what}, which are too few for {count} processes: each needs one. Ask "
            "for fewer."
        )
    cuts = _planned_cuts(subject, count, whole)
    known = (tokenizer.num_tokens, whole.context, decoder is not None, count, cuts)
    task = _Task(subject, run, asked, tuple(first), ends, *known)
    if count > 1 or is_of_many:
        return TextWriter(task, tokenizer, graph=None if is_of_many or decoder is not None else states)
    progress(0.0, "loading the weights")
    part = whole.part(subject.weights(model, states), device, [PartPlace(room_on(device))])
    return TextWriter(task, tokenizer, part)


def _written(
    task: _Task,
    tokenizer: Tokenizer,
    part: DecoderPart | CapturedPart,
    line: TokenLine | None,
    tell: Tell,
) -> Generated:
    """The text, on rank 0."""
    text, begin_s = _Text(tokenizer, task.first, tell), perf_counter()
    ids, first_s = list[int](), 0.0
    for number in continued(part, task.first, task.choice(), task.asked.num_tokens, line):
        first_s = first_s or perf_counter() - begin_s
        ids.append(text.add(number))
    how = f"{counted(task.num_processes, 'process')} {part.how}"
    return Generated(
        task.subject.name,
        task.subject.step,
        task.asked.prompt,
        text.end(),
        tuple(ids),
        len(task.first),
        len(ids) < task.asked.num_tokens,
        perf_counter() - begin_s,
        first_s,
        task.num_processes,
        how,
        part.device.type,
    )


def _write_part(world: World, task: _Task, tell: Tell) -> Generated | None:
    """The work of each process: load its part of the model, and let the tokens through."""
    model, device = RunModel.of(task.run, 1), world.device
    line = TokenLine(DistFabric(world, wait_s=torch.inf), device)
    decoder = decoder_of(model.source.model) if task.is_cached else None
    if decoder is not None:
        states = _states(task.subject, model)
    else:
        states = model.evaluation.graph(1) if task.graph is None else load_graph(task.graph)
    whole = DividedModel(task.subject.name, states, decoder, task.context)
    weights = task.subject.weights(model, states)
    part = whole.part(weights, device, _places(world), world.rank, task.cuts)
    try:
        line.meet()
        if world.rank == 0:
            return _written(task, _tokenizer_of(model), part, line, tell)
        for _ in continued(part, task.first, task.choice(), task.asked.num_tokens, line):
            pass
    except BrokenPipeError:  # the reader of the text has enough
        raise KeyboardInterrupt from None
    finally:
        line.close()
    return None


def _places(world: World) -> list[PartPlace]:
    """The places of all ranks. Processes of one machine have equal speeds."""
    sharing = 1 if world.device.type == "cpu" else num_accelerators()
    own = room_on(world.device) / max(1.0, world.num_local / sharing)
    speed = reading_speed(world.device) if world.num_local < world.size else 1.0
    world.store.set(f"place/{world.rank}", f"{own} {speed}")
    found = [world.store.get(f"place/{rank}").decode().split() for rank in range(world.size)]
    return [PartPlace(float(room), float(speed)) for room, speed in found]


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
    """The tokenizer of a run, all of whose tokens the model knows."""
    vocabulary = vocabulary_of(model.source.base)
    tokenizer = load_tokenizer(
        model.run.data.tokenizer,
        model_folder=folder_of(model.run.model.source),
        model_vocabulary=vocabulary,
    )
    check_tokenizer(tokenizer, vocabulary)
    return tokenizer


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


def _device_for(run: RunFile, num_bytes: int) -> torch.device:
    """The device of a process alone: one that has room for the weights, if there is one."""
    cpu, own = torch.device("cpu"), _device(run)
    return cpu if room_on(own) < num_bytes <= room_on(cpu) else own


def _device(run: RunFile) -> torch.device:
    if num_accelerators() and run.cluster.device != "cpu":
        return device_of_process(ACCELERATOR, 0)
    return torch.device("cpu")


def _states(subject: Subject, model: RunModel) -> Graph:
    """The states of a model. Which weights are in four bits only a captured graph has."""
    captured = None
    if model.run.model.frozen_dtype is not None:
        captured = model.evaluation.graph(1) if subject.graph is None else load_graph(subject.graph)
    return state_graph(model.source.model, captured)
