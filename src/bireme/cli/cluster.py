"""`bireme cluster`: the machines to train on, found here or described in a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bireme.cli.options import Json, print_json
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.cluster.cluster import Cluster

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Servers, devices and links: find them, look at them.")


@app.command()
def discover(
    cpus: Annotated[
        int | None,
        typer.Option(
            help="Devices to cut the processor into; 1 if left out, 0 where there are CUDA devices.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.toml", help="Write the cluster to a file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find this machine's devices, memory and links, without measuring them.

    [dim]bireme cluster discover --output cluster.toml[/dim]
    """
    from bireme.cluster.discover import discover as find

    if output is not None and output.suffix != ".toml":
        raise BiremeError(f"A cluster is written to a .toml file, and {output} is none.")
    found = find(cpus)
    if output is not None:
        from bireme.cluster.cluster_file import save_cluster

        save_cluster(found.cluster, output)
    _show(found.cluster, found.notes, output, as_json=as_json)


@app.command()
def show(
    cluster: Annotated[
        str, typer.Argument(metavar="FILE.toml|NAME", help="A file, or a ready cluster; see `--list`.")
    ] = "",
    names: Annotated[bool, typer.Option("--list", help="Name the ready clusters.")] = False,
    as_json: Json = False,
) -> None:
    """Show a cluster: its servers, devices and links, and which devices are alike.

    [dim]bireme cluster show two-unequal-servers[/dim]
    """
    from bireme.cluster.cluster_file import example_names, load_cluster

    if names == bool(cluster):
        raise BiremeError("Name one cluster to show, or give --list for those that are ready.")
    if not names:
        _show(load_cluster(cluster), (), None, as_json=as_json)
    elif as_json:
        print_json({"clusters": list(example_names())})
    else:
        typer.echo("\n".join(example_names()))


def _show(cluster: "Cluster", notes: tuple[str, ...], written: Path | None, *, as_json: bool) -> None:
    if as_json:
        from bireme.report.cluster_table import cluster_document

        print_json(cluster_document(cluster) | ({"notes": list(notes)} if notes else {}))
        return
    from rich.console import Console

    from bireme.report.cluster_table import print_cluster

    console = Console()
    print_cluster(cluster, console)
    if notes:
        console.print()
    for note in notes:
        console.print(note, style="dim", markup=False, highlight=False)
    if written is not None:
        console.print(f"Wrote {written}.", markup=False, highlight=False, soft_wrap=True)
