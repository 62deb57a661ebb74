"""Run `bireme plan`: search, write, show."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bireme.cli.measuring import Measuring, captures_of, measure
from bireme.cli.options import print_json, refuse
from bireme.cli.plan_options import AskedSums, Exporting
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.cluster.cluster import Cluster
    from bireme.plan.agreements import AgreementForecast
    from bireme.plan.explain import Help
    from bireme.plan.forecast import Answer
    from bireme.plan.plan_request import PlanRequest
    from bireme.plan.search.draft_paging import PagedStageMemory
    from bireme.profile.profile import Profile


# What `bireme plan` starts from: a profile, or a model to measure, and a cluster.

LARGEST_MEASURED = 16
"""Samples of the largest micro-batch that is measured by default."""


def sizes_of(
    batch_size: int, largest: int | None, micro_batch: int | None, given: list[int] | None
) -> list[int]:
    """The micro-batch sizes to measure: those given, the one asked for, or powers of two."""
    if given:
        return given
    if micro_batch is not None:
        return [micro_batch]
    most = min(LARGEST_MEASURED, max(batch_size, largest or 0))
    return [1 << power for power in range(most.bit_length())] if most > 0 else [1]


def measuring_of(
    context: typer.Context, model: str | None, profile: Path | None, sizes: list[int], **how: Any
) -> Measuring | None:
    """What to measure, or to know beside a profile; None where there is a profile alone."""
    if profile is None:
        if model is None:
            raise BiremeError("Give the model with --model, or its profile with --profile.")
        if how["device"] != "meta":
            refuse(context, f"--measure-on {how['device']} measures and does not estimate", "like")
    else:
        refuse(
            context,
            "--profile brings what was measured",
            "measure_batch",
            "measure_on",
            "like",
            "optimizer",
            "fresh",
        )
        if model is None:
            own = ("length", "dtype", "train", "freeze", "lora_rank", "lora_target")
            refuse(context, "--profile brings what was measured", *own)
    if model is None:
        return None
    # The two halves of a backward are what zero-bubble schedules are made of.
    return Measuring(model, sizes, halves=True, **how)


def cluster_of(text: str | None) -> "Cluster":
    """The cluster that --cluster names; this machine if it names none."""
    if text == "":
        raise BiremeError("--cluster is empty. Give a file or the name of a ready cluster, or leave it out.")
    if text is not None:
        from bireme.cluster.cluster_file import load_cluster

        return load_cluster(text)
    from bireme.cluster.machine import discover

    return discover().cluster


def profile_of(path: Path | None, asked: Measuring | None) -> "Profile":
    """The profile of the file, or what is measured now."""
    if path is not None:
        from bireme.profile.profile import load_profile

        return load_profile(path)
    assert asked is not None
    from bireme.report.terminal import progress_bar

    with progress_bar("capturing the model") as progress:
        return measure(asked, progress)


class PlanRun:
    """A search and its output."""

    def __init__(
        self,
        profile: "Profile",
        cluster: "Cluster",
        request: "PlanRequest",
        asked: Measuring | None,
        sums: AskedSums,
        *,
        is_given: bool,
    ) -> None:
        self.profile = profile
        self.cluster = cluster
        self.request = request
        self.asked = asked
        self.sums = sums
        self.is_given = is_given
        """Whether the profile comes from a file, so the model might be another one."""

    def show(self, output: Path | None, exports: list[Exporting], *, explained: bool, as_json: bool) -> None:
        """Search, then write the files, then print."""
        if self.asked is not None and self.is_given:
            from bireme.plan.plan_file import check_profile_fits

            check_profile_fits(self.profile, captures_of(self.asked).graph(self.profile.micro_batches[0]))
        answer, planning_s = self._answer()
        texts = self._exports(answer, exports)
        helps = self._helps(answer) if explained else None
        answer = self._with_single_ways(answer) if explained else answer
        agreed = self._agreements(answer) if explained else ()
        stages = self._stages(answer) if explained else ()
        self._write(answer, output, exports, texts)
        from bireme.report.plan_document import plan_notes

        notes = plan_notes(self.profile, self.cluster)
        if as_json:
            from bireme.report.plan_document import explanation_document, plan_document, sync_document

            document = plan_document(answer, self.profile, planning_s)
            document |= {"sync": sync_document(self.request), "notes": notes, "exports": texts}
            document |= self._gradient()
            print_json(
                document | ({} if helps is None else explanation_document(answer, helps, agreed, stages))
            )
            return
        from rich.console import Console

        from bireme.report.plan_table import print_explanation, print_plan

        console = Console()
        print_plan(answer, self.profile, planning_s, console, sums=self.request.sums.codec)
        if helps is not None:
            print_explanation(answer, helps, agreed, stages, console)
        for note in notes:
            console.print(f"\n{note}", style="yellow", markup=False, highlight=False)
        for export in exports:
            if export.path is None:
                typer.echo(f"\n{texts[export.name]}", nl=False)
        for path in (output, *(export.path for export in exports)):
            if path is not None:
                typer.echo(f"Wrote {path}.")

    def _gradient(self) -> dict[str, object]:
        """What gradients take that are not kept whole."""
        if self.asked is None or self.sums.form is None:
            return {}
        from bireme.profile.optimizers import kept_gradients

        graph = self.sums.graph(self.profile, self.asked)
        return {"gradient": kept_gradients(graph, self.sums.form).document(graph)}

    def _answer(self) -> "tuple[Answer, float]":
        from time import perf_counter

        from bireme.plan.forecast import Answer
        from bireme.plan.search.search import find_plan
        from bireme.report.terminal import progress_bar

        with progress_bar("planning") as progress:
            begin_s = perf_counter()
            found = find_plan(
                self.profile, self.cluster, self.request, progress=lambda done: progress(done, "planning")
            )
            planning_s = perf_counter() - begin_s
        if not isinstance(found, Answer):
            raise BiremeError(str(found))
        return found, planning_s

    def _helps(self, answer: "Answer") -> "tuple[Help, ...]":
        from bireme.plan.explain import explain
        from bireme.plan.search.search import find_plan
        from bireme.report.terminal import progress_bar

        with progress_bar("planning again") as progress:
            search = partial(find_plan, advises=False)
            return explain(self.profile, self.cluster, self.request, answer, search, tell=progress)

    def _with_single_ways(self, answer: "Answer") -> "Answer":
        from bireme.plan.explain import with_single_ways
        from bireme.plan.search.search import find_resident

        return with_single_ways(self.profile, self.cluster, self.request, answer, find_resident)

    def _agreements(self, answer: "Answer") -> "tuple[AgreementForecast, ...]":
        from bireme.plan.agreements import agreements

        return agreements(answer.best, self.profile, self.cluster, self.request)

    def _stages(self, answer: "Answer") -> "tuple[PagedStageMemory, ...]":
        from bireme.plan.search.draft_paging import stage_memory

        return stage_memory(answer.best.plan, self.profile, self.cluster, self.request)

    def _exports(self, answer: "Answer", exports: list[Exporting]) -> dict[str, str]:
        """Make all texts before writing any file, so that a refused export leaves no files."""
        from bireme.plan.export import Material, export_named

        if not exports:
            return {}
        graph = None
        if self.asked is not None and any(export_named(export.name).needs_graph for export in exports):
            from bireme.plan.plan_file import check_plan_fits, planned_units

            graph = captures_of(self.asked).graph(self.profile.micro_batches[0])
            check_plan_fits(answer.origin, graph, planned_units(self.profile))
        csv = next((str(one.path) for one in exports if one.name == "torch-csv" and one.path), "")
        names = tuple(unit.name for unit in self.profile.units)
        material = Material(answer.best, names, graph, csv)
        return {export.name: export_named(export.name).text(material) for export in exports}

    def _write(
        self, answer: "Answer", output: Path | None, exports: list[Exporting], texts: dict[str, str]
    ) -> None:
        if output is not None:
            from bireme.plan.plan_file import planned_units, write_plan

            write_plan(output, answer, planned_units(self.profile))
        for export in exports:
            if export.path is not None:
                from bireme.files import write_text_atomically

                write_text_atomically(export.path, texts[export.name])
