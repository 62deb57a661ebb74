"""The verbs of `bireme`, in groups, and what each is for. A verb is loaded when it is asked for."""

import importlib
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

__all__ = ["VERBS", "Verb", "Verbs"]


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: the group that the help shows it in, and the first line of its own help."""

    group: str
    summary: str


TRAIN, PLAN, LOOK = "Train a model", "Measure and plan", "Look closer"

VERBS = {
    "init": Verb(TRAIN, "Write a run file for `bireme train`, with every key explained and commented out."),
    "train": Verb(
        TRAIN,
        "Train a model over a pipeline. Without a run file: a small language model on Python's sources.",
    ),
    "evaluate": Verb(
        TRAIN, "Evaluate a model: its loss, perplexity, bits per byte of text, and tokens per second."
    ),
    "resume": Verb(TRAIN, "Resume a run from its most recent intact checkpoint."),
    "report": Verb(
        TRAIN,
        "Write one HTML page about a run: curves, timeline, memory, plan. It needs no network.",
    ),
    "ledger": Verb(
        TRAIN, "Check the ledger of a run: every sample in one committed round of each finished epoch."
    ),
    "export": Verb(
        TRAIN,
        "Export the latest model of a run: a transformers folder, or safetensors with the model's names.",
    ),
    "profile": Verb(PLAN, "Measure each unit of a model: seconds forward and backward, bytes kept and sent."),
    "cluster": Verb(PLAN, "Servers, devices and links: find, measure and show them."),
    "plan": Verb(
        PLAN,
        "Find the fastest plan that fits: where to cut a model, on which devices, with which schedule.",
    ),
    "place": Verb(PLAN, "Place the operators of a graph on accelerators and CPUs."),
    "schedule": Verb(LOOK, "Draw a schedule as a grid: one row per rank, time to the right."),
    "simulate": Verb(LOOK, "Predict the time and memory of a schedule before anything runs."),
    "memory": Verb(
        LOOK,
        "Trace a training iteration: what the peak consists of, which blocks are idle, "
        "what could be swapped.",
    ),
    "bench": Verb(LOOK, "Measure Bireme on this machine and compare it with its limits and peers."),
}

EXAMPLE = "Example: bireme init run.toml, then: bireme train run.toml"


class Verbs(TyperGroup):
    """The verbs as commands. To list them loads none, so that help comes at once."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands.update({name: TyperCommand(name, help=verb.summary) for name, verb in VERBS.items()})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb itself; None where there is none."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"bireme.cli.{cmd_name}")
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False)
            app.command(name=cmd_name)(getattr(module, cmd_name))
        command = get_command(app)
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Plain text: to load what draws boxes takes longer than all else together."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        options = [line for one in self.get_params(ctx) if (line := one.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(options)
        for group in dict.fromkeys(verb.group for verb in VERBS.values()):
            with formatter.section(group):
                formatter.write_dl([(name, one.summary) for name, one in VERBS.items() if one.group == group])
        formatter.write_paragraph()
        formatter.write_text(EXAMPLE)
