"""A run of training for people: what it will do, and at its end predictions and measurements."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bireme.bounds import against_predicted, bytes_text, counted, seconds_text
from bireme.cluster.cluster import Cluster
from bireme.errors import printable
from bireme.plan.forecast import Answer, Candidate
from bireme.plan.penalties import DEFAULT_DELAY_WARMUP
from bireme.plan.plan_file import SavedPlan
from bireme.profile.profile import Profile
from bireme.report.plan_document import shard_note, ways_note
from bireme.report.plan_table import LEGEND, kinds_table, stages_table
from bireme.schedule.program import Rule
from bireme.sync.coordinator.recoveries import Recovery

_LONGEST_SAMPLE = 1200

_WORTH_TELLING = 0.03
"""By how much a machine must be slower or faster before the summary says so."""

_MOST_WARNINGS = _MOST_RECOVERIES = 3
"""Of a long run the last ones; the log has all."""


def print_prepared(
    model: str,
    cluster: Cluster,
    saved: SavedPlan,
    profile: Profile | None,
    folder: Path,
    console: Console,
    *,
    answer: Answer | None,
    first_delayed_step: int,
    learns: Mapping[str, Any],
    is_brief: bool = False,
) -> None:
    """Print what the run `learns` from, in the words of its document, the devices, and the plan with its
    predictions.
    """
    say = console.print
    say(f"[bold]{escape(model)}[/bold]", soft_wrap=True)
    for line in _about_learning(learns):
        say(escape(line), soft_wrap=True)
    devices = list(cluster.devices())
    for name in dict.fromkeys(placed.device.name for placed in devices):
        own = [placed for placed in devices if placed.device.name == name]
        one = own[0].device
        each = " each" if len(own) > 1 else ""
        cores = f", {counted(one.num_cores, 'core')}{each}" if one.num_cores else ""
        say(
            f"{len(own)} × {escape(name)}: {bytes_text(one.memory_bytes)}{cores} "
            f"({escape(', '.join(placed.name for placed in own[:4]))}{', …' if len(own) > 4 else ''})"
        )
    plan, forecast = saved.plan, saved.forecast
    which = "stage" if len(plan.recompute) == 1 else "stages"
    recompute = f", recomputing {which} {', '.join(map(str, plan.recompute))}" if plan.recompute else ""
    say(
        f"\nPlan: [bold]{plan.schedule}[/bold], {counted(plan.num_stages, 'stage')}{plan.replicas_text}, "
        f"{counted(plan.num_microbatches, 'micro-batch')}{recompute}"
    )
    if plan.source.rule is not Rule.SYNCHRONOUS:
        say(_about_delay(first_delayed_step))
    if forecast is not None:
        names = [] if profile is None else [unit.name for unit in profile.units]
        say(stages_table(Candidate(plan, forecast), names, console.width))
        say(
            f"Predicted: {seconds_text(forecast.batch_s)} per step, {forecast.samples_per_s:,.1f} samples/s; "
            f"limited by {escape(forecast.bottleneck)}."
        )
    if is_brief and profile is not None:
        say(
            "The run is short, so it was measured and planned briefly: measurements of a unit lie up to "
            f"{profile.spread:.0%} apart."
        )
    if answer is not None:
        say(kinds_table(answer))
        say(LEGEND, style="dim")
        for note in (*shard_note(answer), *ways_note(answer)[:1]):
            say(note)
    _tell(console, f"Run: {folder}\n")


def _about_learning(learns: Mapping[str, Any]) -> Iterator[str]:
    """What a run learns from, how it is made into samples, and how much of the model learns."""
    samples, evaluation = learns["num_samples"], learns["num_evaluation_samples"]
    nouns = {"num_files": "file", "num_tokens": "token"}
    sizes = [counted(learns[key], noun) for key, noun in nouns.items() if learns[key] is not None]
    if samples is not None:
        sizes.append(f"{counted(samples, 'sample')} to train on")
    if evaluation is not None:
        sizes.append(f"{evaluation:,} to evaluate with")
    yield f"Learns from {', '.join(learns['sources'])}: {', '.join(sizes) or 'a stream'}"
    words = [] if learns["tokenizer"] is None else [f"tokenizer: {learns['tokenizer']}"]
    words += [] if learns["length"] is None else [f"{learns['length']:,} tokens in a sample"]
    words.append(f"loss on {learns['loss_on']}")
    epochs = learns["epochs"]
    are = "" if epochs is None else f" are {epochs:.3g} epoch{'s' * (epochs != 1)}"
    words.append(counted(learns["steps"], "step") + are)
    yield "; ".join(words)
    whole, part = learns["num_parameters"], learns["num_learning_parameters"]
    share = "all of which learn" if part == whole else f"of which {part:,} learn ({part / whole:.2%})"
    yield (
        f"{counted(whole, 'parameter')}, {share}; {learns['dtype']}, learning rate "
        f"{learns['learning_rate']:g}"
    )


def _about_delay(first_delayed_step: int) -> str:
    if first_delayed_step:
        return f"Updates are delayed after step {first_delayed_step}; until then the stages run under 1f1b."
    return (
        "Updates are delayed from the first step, which costs loss early in a run; "
        f"plan.delay_warmup_fraction = {DEFAULT_DELAY_WARMUP:g} avoids most of it."
    )


def print_summary(
    document: dict[str, Any], console: Console, *, resume: str = "", is_lost: bool = False
) -> None:
    """Print the results of a run. If it was stopped, `resume` tells how to go on; if its result `is_lost`,
    nothing is printed about a model.
    """
    say, tell = console.print, partial(_tell, console)
    steps, folder = document["steps"], document["run_dir"]
    table = Table("", "predicted", "measured", "than predicted", box=None, header_style="dim")
    predicted, measured = document["predicted_batch_s"], document["measured_batch_s"]
    speed = _speed(document)

    def row(name: str, before: float | None, found: float | None, text: Callable[[float], str]) -> None:
        against = ""
        if text is not _percent:
            against = against_predicted(found, before, is_time=text is seconds_text)
        table.add_row(name, _known(before, text), _known(found, text), against)

    row("a step", predicted, measured, seconds_text)
    if speed is not None and predicted is not None:
        row("a step at that speed", predicted / speed, measured, seconds_text)
    for rank in document["ranks"]:
        peaks = rank["predicted_peak_bytes"], rank["measured_peak_bytes"]
        row(f"rank {rank['rank']}, memory", *peaks, bytes_text)
    if shared := document.get("sync", {}).get("shared"):
        for name, key in (("weights gathered", "gathered_bytes"), ("gradients summed", "summed_bytes")):
            row(name, shared[f"predicted_{key}"], shared[key], bytes_text)
    shown = set()
    for stage in document["stages"]:
        if stage["rank"] not in shown:
            shown.add(stage["rank"])
            row(f"rank {stage['rank']}, busy", stage["predicted_busy_share"], stage["busy_share"], _percent)
    row("bubble", document["predicted_bubble"], document["bubble"], _percent)
    say()
    say(table)
    if tiers := document.get("tiers"):
        say(_tiers(tiers))
    if speed is not None:
        tell(f"The machine ran at {speed:.2f} of the speed that it was profiled at.")
    loss = [f"{name} loss {document[key]:.4f}" for name, key in _LOSSES if document[key] is not None]
    rate, perplexity = document["tokens_per_s"], document.get("eval_perplexity")
    loss += [] if perplexity is None else [f"perplexity {perplexity:,.4g}"]
    parts = [counted(steps, "step"), *loss, *([f"{rate:,.0f} tokens/s"] if rate else [])]
    say("\n" + ", ".join(parts) + ".")
    if (through := document.get("eval_loss_through_codecs")) is not None:
        tell(_about_codecs(document["links"], through))
    if (joules := document.get("joules_per_sample")) is not None:
        tell(f"By the watts of its devices a sample took {joules:.3g} J.")
    for recovery in document.get("sync", {}).get("recoveries", ())[-_MOST_RECOVERIES:]:
        tell(Recovery(**recovery).text)
    for warning in document["warnings"][-_MOST_WARNINGS:]:
        tell(f"Warning: {warning}")
    if resume:
        tell(f"Stopped ({document['reason']}). {resume}")
    elif not is_lost:
        tell(_about_model(folder, steps, document.get("checkpoint")))
    tell(f"For a page with all results: bireme report {shlex.quote(folder)}")
    if document["sample"]:
        say("\n[dim]A sample of its text:[/dim]")
        say(escape(printable(document["sample"][:_LONGEST_SAMPLE], "\n\t")))


def _about_model(folder: str, steps: int, checkpoint: int | None) -> str:
    """Where the model of a run is that has done its steps."""
    if Path(folder, "model").is_dir():
        is_older = checkpoint is not None and checkpoint < steps
        older = f" It is that of step {checkpoint}, because checkpoint.at_end is false." if is_older else ""
        return f"The model is in {folder}/model.{older}"
    if checkpoint is not None:
        export = f"bireme export {shlex.quote(folder)} --to FOLDER"
        return f"No model was written, because export.at_end is false. To write it: {export}"
    return "There is no checkpoint and so no model, because checkpoint.at_end is false."


def _tiers(tiers: Sequence[Mapping[str, Any]]) -> Table:
    """What chunks took of each tier, and what was copied into it in the whole run."""
    table = Table("rank", "tier", "budget", "chunks at most", "copied in", box=None, header_style="dim")
    for tier in tiers:
        budget, moved = _known(tier["budget_bytes"], bytes_text), bytes_text(tier["bytes_moved"])
        table.add_row(str(tier["rank"]), tier["tier"], budget, bytes_text(tier["peak_bytes"]), moved)
    return table


def _about_codecs(links: Sequence[Mapping[str, Any]], through: float) -> str:
    """What codecs on boundaries saved, and what the evaluation loss is through them."""
    raw, sent = (sum(link[name] for link in links) for name in ("raw_bytes", "sent_bytes"))
    return (
        f"Codecs sent {bytes_text(sent)} between stages instead of {bytes_text(raw)}. The evaluation loss "
        f"above is without them, as the model is exported; through them it is {through:.4f}."
    )


def _tell(console: Console, text: str) -> None:
    """A line with a path or a command, which must not be broken: people copy it."""
    console.print(text, markup=False, soft_wrap=True)


_LOSSES = (("training", "train_loss"), ("evaluation", "eval_loss"))


def _speed(document: dict[str, Any]) -> float | None:
    """The machine's speed relative to when the model was profiled, where that explains anything."""
    control = document["control"]
    return None if control is None or abs(control["speed"] - 1) < _WORTH_TELLING else float(control["speed"])


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return "–" if value is None else text(value)


def _percent(value: float) -> str:
    return f"{value:.0%}"
