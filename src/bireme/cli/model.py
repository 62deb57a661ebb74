"""`bireme data`, `evaluate`, `generate`, `export` and `merge`: what a model reads and has learned."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from bireme.cli.options import is_one_of_many, print_json, settings_of, show
from bireme.cli.train import INTERRUPTED_STATUS
from bireme.errors import BiremeError, tell

# `bireme data`: samples as the model will see them, token by token, and what counts in the loss.


_WITHOUT_MODEL = 1024
"""Tokens of a sample if neither a model nor an option says."""


def data(
    source: str,
    model: str | None = None,
    samples: Annotated[int, {"min": 0, "max": 1000}] = 3,
    length: int | None = None,
    set_: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Show samples as the model will see them, token by token, and what counts in the loss.

    [dim]bireme data chats.jsonl --model Llama-3.2-1B-Instruct[/dim]

    Arguments:
        source (FILE|RUN.toml): Data, as in data.source, or a run file, or the folder of a run.

    Options:
        model (FOLDER): Folder of the transformers model that is to learn the data.
        samples (N): Samples to show of each source.
        length (N): Tokens of a sample; by default as in the run or as for the model, else 1,024.
    """
    from bireme.report.terminal import progress_bar

    sets = [*settings_of(("--length", "data.length", length)), *(set_ or ())]
    with progress_bar("loading the data") as progress:
        from bireme.train.data.viewing import view_of
        from bireme.train.folder import load_asked
        from bireme.train.model import RunModel
        from bireme.train.run_data import data_of, tokenizer_name, with_length_of_data
        from bireme.train.run_file import load_run_file

        path = Path(source)
        run_file = path / "run.toml" if (path / "run.toml").is_file() else path
        is_run = run_file.suffix == ".toml"
        own = settings_of(
            ("--model", "model.source", None if model is None else f"hf:{model.removeprefix('hf:')}"),
            ("SOURCE", "data.source", None if is_run else source),
            ("SOURCE", "data.evaluation_fraction", None if is_run else 0.0),
        )
        default = [] if is_run or model is not None else [f"data.length={_WITHOUT_MODEL}"]
        sets = [*default, *own, *sets]
        run = load_asked(run_file, sets) if is_run else load_run_file(None, sets)
        run = with_length_of_data(run, progress)
        # One sample is enough to be shown, however large the batches of the run are.
        run = run.with_keys("training", batch_size=1)
        has_model = is_run or model is not None or any(text.startswith("model.") for text in sets)
        found = data_of(run, RunModel.of(run, 1) if has_model else None, progress)
        view = view_of(found, tokenizer_name(found.tokenizer), run.data.length, samples)
    for warning in view.warnings:
        tell(warning)
    from bireme.report.data_table import print_data

    show(view.document, partial(print_data, view), as_json=as_json)


# `bireme evaluate`: the loss of a run, or of any model in a folder, on some data.


def evaluate(
    model: str,
    data: str | None = None,
    length: int | None = None,
    tokenizer: str | None = None,
    batch_size: int | None = None,
    batches: Annotated[int | None, {"min": 0}] = None,
    workers: Annotated[int | None, {"min": 1}] = None,
    machines: str = "",
    listen: str = "",
    set_: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Evaluate a model: its loss, perplexity, bits per byte of text, and tokens per second.

    With --machines the model is on this machine and on those that type `bireme join`.

    [dim]bireme evaluate runs/first-run --data book.txt[/dim]

    Arguments:
        model (RUN|MODEL): The folder of a run, of an exported model, or of any transformers model.

    Options:
        data (SOURCE): Data, as in data.source; by default what the run held out for evaluation.
        length: Tokens per sample; by default as in training, else of the longest row if only answers
            count, or the model's context, at most 1,024.
        tokenizer (FOLDER|bytes): Tokenizer; by default the model's own.
        batch_size (--batch-size, -B): Samples that run at a time.
        batches (N): Most batches, 0 for all; by default all of --data, and of a run's own data as many as it
            evaluates itself.
        workers (N): Processes that share the model as a pipeline; by default as many as its weights need.
    """
    own = settings_of(
        ("--length", "data.length", length),
        ("--tokenizer", "data.tokenizer", tokenizer),
        ("--batch-size", "training.batch_size", batch_size),
    )
    sets = [*(set_ or ()), *own]
    from bireme.cli.coordinate import coordinate_work
    from bireme.report.terminal import progress_bar
    from bireme.train.evaluating import check_data, evaluate_with_others
    from bireme.train.evaluating import evaluate as evaluated
    from bireme.train.shared_model import is_on_machines
    from bireme.train.subject import subject_of

    def answer(_what: str, found: dict[str, Any]) -> None:
        for warning in found["warnings"]:
            tell(warning)
        if as_json:
            print_json(found)
        else:
            _show(found)

    ask = _asks(workers, machines, listen, answer)
    with _failures():
        if ask is not None:
            evaluate_with_others(model, sets, data, batches, ask)
        elif machines or listen:
            if not is_on_machines(model):
                with progress_bar("loading the model") as progress:
                    check_data(subject_of(model, sets, tell), data, batches, progress)
            given = {"data": data, "batches": batches}
            words = [f"--{name}={value}" for name, value in given.items() if value is not None]
            coordinate_work(
                "evaluate", model, [*words, *(f"--set={text}" for text in sets)], listen, machines, answer
            )
        else:
            with progress_bar("loading the model") as progress:
                subject = subject_of(model, sets, tell)
                found = evaluated(subject, data, most_batches=batches, workers=workers, progress=progress)
            answer("written", found)


# `bireme evaluate` and `bireme generate` over several machines, or in one process of several.


def _asks(
    workers: int | None, machines: str, listen: str, answer: Callable[..., Any]
) -> Callable[..., Any] | None:
    """Asks the command that coordinates the work of this process, or `answer`. None if this process is not
    one of several that torchrun or `bireme join` has started. Refuses options that exclude each other.
    """
    several = "--machines" if machines else "--listen" if listen else ""
    if workers is not None and several:
        raise BiremeError(f"--workers is for one machine, and {several} for several. Leave one of them out.")
    if not is_one_of_many():
        return None
    if given := "--workers" if workers is not None else several:
        raise BiremeError(f"{given} is for one process, but torchrun started several. Leave it out.")
    from bireme.machines.orders import phase_of
    from bireme.train.joined_processes import Attended

    if phase_of(os.environ):  # a stop is in order, and there is nothing to save
        signal.signal(signal.SIGTERM, lambda *_: os._exit(INTERRUPTED_STATUS))
    attended = Attended.of(os.environ)
    return answer if attended is None else attended.ask


@contextmanager
def _failures(before: str = "") -> Iterator[None]:
    """End with a sentence and a status if processes fail or are interrupted."""
    from bireme.runtime.board import RankFailed

    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_STATUS) from None
    except RankFailed as error:
        typer.echo(f"{before}bireme: {error}", err=True)
        raise typer.Exit(1) from None


def _show(found: dict[str, Any]) -> None:
    step = "" if found["step"] is None else f" after step {found['step']}"
    typer.echo(f"{found['model']}{step}, on {found['data']}")
    parts = [f"loss {found['loss']:.4f}"]
    if found["perplexity"] is not None:
        parts.append(f"perplexity {found['perplexity']:,.4g}")
    if found["bits_per_byte"] is not None:
        parts.append(f"{found['bits_per_byte']:.4f} bits per byte")
    typer.echo(", ".join(parts))
    samples, tokens, rate = found["num_samples"], found["tokens"], found["tokens_per_s"]
    of_samples = "" if found["samples_given"] in (None, samples) else f" of {found['samples_given']:,}"
    counted = f"{samples:,}{of_samples} samples"
    if tokens is not None and rate is not None:
        given = "" if found["tokens_given"] is None else f" of {found['tokens_given']:,}"
        counted = f"{tokens:,}{given} tokens in {counted}, {rate:,.0f} tokens/s"
    typer.echo(counted)
    words = [] if found["tokenizer"] is None else [f"tokenizer: {found['tokenizer']}"]
    words += [] if found["length"] is None else [f"{found['length']:,} tokens in a sample"]
    typer.echo("; ".join([*words, f"loss on {found['loss_on']}"]))


# `bireme generate`: let a model write.


def generate(
    model: str,
    prompts: list[str] | None = None,
    tokens: Annotated[int, {"min": 1, "max": 10**6}] = 128,
    temperature: Annotated[float, {"min": 0.0, "max": 100.0}] = 0.8,
    top_p: Annotated[float, {"min": 0.0, "max": 1.0}] = 1.0,
    seed: Annotated[int, {"min": 0}] = 0,
    chat: bool = False,
    workers: Annotated[int | None, {"min": 1}] = None,
    machines: str = "",
    listen: str = "",
    set_: list[str] | None = None,
    as_json: bool = False,
) -> None:
    """Let a model write: continue prompts, or answer them.

    The model may be larger than the memory of this machine: with --machines it is on this one and those that
    type `bireme join`.

    [dim]bireme generate runs/first-run "def "[/dim]

    Arguments:
        model (RUN|FOLDER): The folder of a run, of an exported model, or of any transformers model.
        prompts ([PROMPT]...): Texts to continue, or with --chat messages; - is all of standard input. Without
            any, each line of standard input is a prompt.

    Options:
        tokens (N): Most tokens to write.
        temperature (T): Randomness; 0 always takes the likeliest token.
        top_p (P): Draw among the likeliest tokens that together have this probability.
        seed (S): Random seed of the draws.
        chat: Give the prompt as a message of a user, by the chat template.
        workers (N): Processes of this machine, each with a part of the model; by default as many as the
            weights need. Under torchrun the processes are those that it starts.
        as_json (--json): Print a JSON document for each text, in a line.
    """
    if workers is not None:
        from bireme.runtime.processes import serve_from_here

        serve_from_here("bireme.train.generating")  # so that none of the processes imports it
    from bireme.cli.coordinate import coordinate_work
    from bireme.report.terminal import progress_bar
    from bireme.train.generating import Terminal, WritingStyle, write_with_others, writer_of
    from bireme.train.shared_model import is_on_machines
    from bireme.train.subject import subject_of

    answer = Terminal([], chat, as_json)
    ask, is_coordinated = _asks(workers, machines, listen, answer), bool(machines or listen)
    is_read = not prompts or (ask is not None and "-" in prompts)
    none_read = BiremeError("Several processes read no prompts from standard input. Give the prompts.")
    if is_read and ask is answer and os.environ["RANK"] == "0":
        raise none_read
    texts = [sys.stdin.read().removesuffix("\n") if one == "-" else one for one in prompts or ()]
    answer.prompts, sets = texts, list(set_ or ())
    style = WritingStyle(tokens, temperature, seed, chat, top_p)
    with _failures("\n" if ask is None else ""):  # on a line after the text
        if ask is not None:
            write_with_others(model, sets, style, texts, ask)
            return
        if not (is_coordinated and is_on_machines(model)):
            with progress_bar("loading the model") as progress:
                subject = subject_of(model, sets, tell)
                writer = writer_of(subject, style, texts, progress, 2 if is_coordinated else workers)
            if not is_coordinated:
                if is_read and writer.count > 1:
                    raise none_read
                writer.write(answer)
                return
            if writer.graph is not None:  # which reads as much as the longest text has
                sets.append(f"data.length={writer.work.run.data.length}")
        options = {"tokens": tokens, "temperature": temperature, "top-p": top_p, "seed": seed}
        words = [f"--{name}={value}" for name, value in options.items()] + ["--chat"] * chat
        coordinate_work(
            "generate", model, [*words, *(f"--set={text}" for text in sets)], listen, machines, answer
        )


# `bireme export`: the most recent weights of a run as a model folder.


class ExportFormat(StrEnum):
    """A format of exported weights."""

    SAFETENSORS = "safetensors"
    DCP = "dcp"


def export(
    run_dir: Path,
    to: Path,
    merged: bool = False,
    form: ExportFormat = ExportFormat.SAFETENSORS,
    as_json: bool = False,
) -> None:
    """Export the latest model of a run: a transformers folder, or safetensors with the model's names.

    Of a run with model.lora it is the adapter, as the peft library loads it.

    [dim]bireme export runs/first-run --to model[/dim]

    Arguments:
        run_dir (RUN): Folder of the run.

    Options:
        to (FOLDER): New or empty folder for the model.
        merged: Add the adapter of model.lora to its base, and export the whole model.
        form (--format): Files of the weights: safetensors, or dcp for torch.distributed.checkpoint.
    """
    from bireme.model.graph_file import load_graph
    from bireme.train.checkpoint.checkpoint import newest_good
    from bireme.train.export import export_checkpoint
    from bireme.train.folder import RunFolder

    folder = RunFolder.of(run_dir)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        what = "a folder that is not empty" if to.is_dir() else "a file"
        raise BiremeError(f"{to} is {what}. Name a new folder.")
    run = folder.load_run()
    if merged and run.model.lora.rank is None:
        raise BiremeError(
            f"{run_dir} has trained no adapter, so there is nothing to merge. Export the model as it is: "
            f"bireme export {shlex.quote(str(run_dir))} --to {shlex.quote(str(to))}"
        )
    as_dcp = form is ExportFormat.DCP
    if as_dcp and run.model.lora.rank is not None and not merged and not run.model.lora.merge:
        raise BiremeError(
            f"{run_dir} has trained an adapter, which peft reads from safetensors. Leave out --format dcp, "
            "or add --merged to export the whole model."
        )
    checkpoint = newest_good(folder.checkpoints(run), on_bad=tell)
    if checkpoint is None:
        raise BiremeError(
            f"{run_dir} has no checkpoint yet, so there is nothing to export. Train until there is one: "
            f"bireme resume {shlex.quote(str(run_dir))}"
        )
    graph = load_graph(folder.graph)
    export_checkpoint(run, graph, checkpoint, to.resolve(), merged=merged or None, as_dcp=as_dcp)
    step = checkpoint.manifest.step
    if as_json:
        print_json({"step": step, "folder": str(to), "files": sorted(path.name for path in to.iterdir())})
        return
    typer.echo(f"Wrote the model after step {step} to {to}.")


# `bireme merge`: the adapter of a run added to its base, as a model folder.


def merge(run_dir: Path, to: Path, as_json: bool = False) -> None:
    """Add the adapter of a run to its base, and export the whole model: `bireme export --merged`.

    [dim]bireme merge runs/chats --to model[/dim]

    Arguments:
        run_dir (RUN): Folder of a run with model.lora.

    Options:
        to (FOLDER): New or empty folder for the model.
    """
    export(run_dir, to, merged=True, as_json=as_json)
