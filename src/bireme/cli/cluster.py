"""`bireme cluster`: the machines to train on, found here or described in a file."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bireme.cli.described import described
from bireme.cli.options import (
    check_suffix,
    check_writable,
    is_one_of_many,
    print_json,
    refuse,
    say_written,
)
from bireme.cli.options import show as show_in
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from rich.console import Console

    from bireme.cluster.cluster import Cluster
    from bireme.devices import Backend


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Servers, devices and links: find, measure and show them.",
)


@app.command()
@described
def discover(
    cpus: Annotated[int | None, {"max": 4096}] = None,
    output: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Find this machine's devices, memory and links, without measuring them.

    [dim]bireme cluster discover --output cluster.toml[/dim]

    Options:
        cpus: Number of devices to divide the CPU into; by default 1, or 0 if there are CUDA devices.
        output (--output, --to, -o FILE.toml): Write the cluster to a file.
    """
    from bireme.cluster.machine import discover as find

    _check_output(output, force=force)
    found = find(cpus)
    _show(found.cluster, found.notes, output, as_json=as_json)


@app.command()
@described
def show(cluster: str = "", names: bool = False, as_json: bool = False) -> None:
    """Show the servers, devices and links of a cluster, and which devices are equal.

    [dim]bireme cluster show two-unequal-servers[/dim]

    Arguments:
        cluster (FILE.toml|NAME): Cluster file, or name of a ready cluster (see `--list`).

    Options:
        names (--list): List the ready clusters.
    """
    from bireme.cluster.cluster_file import example_names, load_cluster

    if names == bool(cluster):
        raise BiremeError("Name a cluster to show, or pass --list to see the ready ones.")
    if not names:
        from bireme.cluster.cluster import link_notes

        found = load_cluster(cluster)
        _show(found, tuple(link_notes(found)), None, as_json=as_json)
    elif as_json:
        print_json({"clusters": list(example_names())})
    else:
        typer.echo("\n".join(example_names()))


@app.command()
@described
def devices(as_json: bool = False) -> None:
    """List the catalogue of devices: makers' figures, and what share of them training attains.

    [dim]bireme cluster devices --json[/dim]
    """
    from bireme.report.cluster_table import catalogue_document, print_catalogue

    show_in(catalogue_document, print_catalogue, as_json=as_json)


@app.command()
@described
def probe(
    context: typer.Context,
    model: Annotated[str, {"show_default": "a small GPT"}] = "",
    batch: Annotated[int, {"max": 2**20}] = 1,
    processes: Annotated[int | None, {"max": 1024, "show_default": "one per CUDA device, else 2"}] = None,
    device: Annotated[str | None, {"show_default": "cuda if there is one"}] = None,
    seconds: Annotated[float, {"max": 86_400.0}] = 20.0,
    disk: Path | None = None,
    output: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Measure devices and links on this machine or, under torchrun, on several.

    [dim]torchrun --nnodes 2 --nproc-per-node 4 … --no-python bireme cluster probe -o cluster.toml[/dim]

    Options:
        model (MODEL): Model to time the devices with: gpt:…, hf:FOLDER or file.py:function.
        batch (--batch, -b): Samples per timed micro-batch.
        processes (--processes, -n): Number of processes to start here, one per device; not under torchrun.
        device: Kind of device: cpu or cuda.
        seconds: Approximate time for measuring the links.
        disk (FOLDER): Folder on every machine whose disk to measure, and the way to the host.
        output (--output, --to, -o FILE.toml): Write the cluster to a file.
    """
    from bireme.report.terminal import progress_bar
    from bireme.runtime.measuring.probe import ProbeSetting, probe_here, probe_of_environment

    is_started = is_one_of_many()
    try:
        _check_output(output, force=force)
        if is_started and processes is not None:
            refuse(context, "torchrun has already started the processes", "processes")
        setting = ProbeSetting(batch=batch, seconds=seconds, disk=disk, **({"model": model} if model else {}))
        backend, here = _backend_and_devices(device)
        if is_started:
            found = probe_of_environment(setting, backend=backend, progress_bar=progress_bar)
        else:
            num_processes = here if processes is None else processes
            found = probe_here(num_processes, setting, backend=backend, progress_bar=progress_bar)
    except BiremeError:
        if is_started and os.environ["RANK"] != "0":
            raise typer.Exit(2) from None  # the first rank says it for all
        raise
    if found is None:
        return
    from bireme.report.cluster_table import probe_document

    measured = partial(probe_document, found.measurements, found.inferred)
    _show(found.inferred.cluster, found.notes, output, as_json=as_json, more=measured)


def _check_output(output: Path | None, *, force: bool) -> None:
    check_suffix(output, "cluster file", ".toml")
    check_writable(output, force=force)


def _backend_and_devices(device: str | None) -> "tuple[Backend, int]":
    """The backend that joins the ranks, and the number of devices of that kind here."""
    from bireme.devices import KINDS, num_accelerators

    if device is not None and device not in KINDS:
        raise BiremeError(f"There is no device {device!r} to probe; use {' or '.join(KINDS)}.")
    there = num_accelerators()
    if device == "cuda" and not there:
        raise BiremeError("There is no CUDA device here to probe. Leave out --device, or use cpu.")
    if device == "cpu" or not there:
        return "gloo", 2
    return "nccl", there


def _show(
    cluster: "Cluster",
    notes: tuple[str, ...],
    output: Path | None,
    *,
    as_json: bool,
    more: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Write a cluster to a file, and show it; its document has `more` of what was found."""
    from bireme.cluster.cluster_file import save_cluster
    from bireme.report.cluster_table import cluster_document, print_cluster

    def printed(console: "Console") -> None:
        print_cluster(cluster, console)
        if notes:
            console.print()
        for note in notes:
            console.print(note, style="dim", markup=False)

    if output is not None:
        save_cluster(cluster, output)
    noted = {"notes": list(notes)} if notes else {}
    show_in(lambda: cluster_document(cluster) | noted | more(), printed, as_json=as_json)
    if not as_json:
        say_written(output)
