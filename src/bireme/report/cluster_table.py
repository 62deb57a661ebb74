"""A cluster for people, as tables in the terminal, and for programs, as one JSON document."""

import string
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bireme.bounds import bytes_text, counted, rate_text, seconds_text
from bireme.cluster.catalogue import FORMATS, CatalogueDevice, catalogue
from bireme.cluster.cluster import Bridge, Card, Cluster, Link, Mesh, Overlap, Server
from bireme.cluster.cluster_file import cluster_hash
from bireme.cluster.device import GIB, Device
from bireme.cluster.inference import Inferred
from bireme.cluster.probed import Measurements
from bireme.cluster.symmetry import Symmetry
from bireme.report.terminal import columns

_DEVICES = (
    *("device", "model", "memory", "speed", "float32", "bfloat16", "cores"),
    *("to its host", "host memory", "disk", "disk reads and writes"),
)
_LINKS = ("link", "joins", "bandwidth", "latency", "shared")
_WORDS = ("device", "model", "link", "joins", "bandwidth", "shared")
"""The columns that hold no numbers alone."""


def probe_document(found: Measurements, inferred: Inferred) -> dict[str, Any]:
    """What was measured, as plain data."""
    names = [placed.name for placed in inferred.cluster.devices()]
    return {
        "error": inferred.error,
        "notes": list(inferred.notes),
        "speeds": {name: one.speed for name, one in zip(names, found.devices, strict=True)},
        "pairs": [
            {
                "from": names[a],
                "to": names[b],
                "bytes_per_s": found.alone(a, b),
                "latency_s": found.latency_s[a, b],
                "by_size": [list(point) for point in found.by_size.get((min(a, b), max(a, b)), ())],
            }
            for a, b in found.latency_s
        ],
        "experiments": [
            {
                "flows": [[names[a], names[b]] for a, b in one.flows],
                "bytes_per_s": list(one.bytes_per_s),
            }
            for one in found.experiments
        ],
        "all_reduces": [asdict(one) for one in found.all_reduces],
    }


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """A cluster with all defaults filled in; unknown figures are left out."""
    return {
        "num_servers": len(cluster.servers),
        "num_devices": cluster.num_devices,
        "hash": cluster_hash(cluster),
        "servers": [
            {
                "name": server.name,
                **{name: figure for name in _TIERS if (figure := getattr(server, name))},
                "devices": [
                    {"name": f"{server.name}/{name}", **_plain_device(device)}
                    for name, device in zip(server.device_names, server.devices, strict=True)
                ],
                "links": [_plain_link(server, group) for group in server.groups],
            }
            for server in cluster.servers
        ],
        "switch": None
        if cluster.switch is None
        else {"bytes_per_s": cluster.switch.bytes_per_s, "latency_s": cluster.switch.latency_s},
        "routes": [{"servers": list(one.servers), **_plain_figures(one.link)} for one in cluster.routes],
        "alike": [
            [cluster.devices()[number].name for number in group] for group in Symmetry(cluster).classes()
        ],
    }


def print_cluster(cluster: Cluster, console: Console) -> None:
    """Servers with their devices, then the links, equal ones together."""
    kinds = len(Symmetry(cluster).classes())
    console.print(
        f"{counted(cluster.num_devices, 'device')} in {counted(len(cluster.servers), 'server')}; "
        + ("all are alike" if kinds == 1 else f"{kinds} kinds that differ in themselves or in their links")
    )
    devices, links = [], []
    for names, server in _runs(cluster):
        place = 0
        for device, equal in groupby(server.devices):
            count = len(list(equal))
            label = _range(server.device_names[place], server.device_names[place + count - 1])
            title = f"{device.name}, {device.members} as one" if device.members > 1 else device.name
            devices.append([f"{names}/{label}", title, *_figures(device), *_tiers(server, device)])
            place += count
        for group in server.groups:
            links.append(
                [f"{names}/{group.name}", _joined(server, group), *_link_row(group.link, _sharing(group))]
            )
    if cluster.switch is not None:
        rate = cluster.switch.bytes_per_s
        total = "" if rate is None else f"{rate_text(rate)} in all"
        links.append(["switch", "the servers", total, seconds_text(cluster.switch.latency_s), ""])
    for route in cluster.routes:
        links.append([route.name, "these servers", *_link_row(route.link)])
    for headings, rows in ((_DEVICES, devices), (_LINKS, links)):
        if rows:
            console.print()
            console.print(_table(headings, rows))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without its empty columns."""
    kept = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    table = columns([headings[column] for column in kept], words=_WORDS, wrapped=("model", "joins"))
    for row in rows:
        table.add_row(*(escape(row[column]) for column in kept))
    return table


def _runs(cluster: Cluster) -> list[tuple[str, Server]]:
    """Equal servers that follow each other, as one with the names of the first and the last."""
    alike = groupby(cluster.servers, key=lambda one: replace(one, name="server"))
    runs = [list(equal) for _, equal in alike]
    return [(_range(run[0].name, run[-1].name), run[0]) for run in runs]


def _range(first: str, last: str) -> str:
    """Such as gpu0…3, or both names in full where they do not differ by a number at the end alone."""
    stem = first.rstrip(string.digits)
    if first == last:
        return first
    return f"{first}…{last.removeprefix(stem) if stem == last.rstrip(string.digits) else last}"


def _tiers(server: Server, device: Device) -> list[str]:
    return [
        rate_text(device.host_bytes_per_s) if device.host_bytes_per_s else "",
        bytes_text(server.host_memory_bytes) if server.host_memory_bytes else "",
        bytes_text(server.disk_bytes) if server.disk_bytes else "",
        rate_text(server.disk_bytes_per_s) if server.disk_bytes_per_s else "",
    ]


def _figures(device: Device) -> list[str]:
    return [
        bytes_text(device.memory_bytes),
        f"×{device.speed:g}" if device.speed != 1 else "",
        *(
            f"{flops / 1e12:.4g} TFLOP/s" if flops else ""
            for flops in (device.float32_flops_per_s, device.bfloat16_flops_per_s)
        ),
        str(device.num_cores or ""),
    ]


def _joined(server: Server, group: Bridge | Mesh | Card) -> str:
    if len(group.devices) == len(server.devices):
        return _range(server.device_names[0], server.device_names[-1])
    return ", ".join(server.device_names[place] for place in group.devices)


def _sharing(group: Bridge | Mesh | Card) -> str:
    if isinstance(group, Mesh):
        return "one port per device" if group.switched else "one cable per pair"
    return "by all" if len(group.devices) > 1 else ""


def _link_row(link: Link, shared: str = "") -> list[str]:
    back = f", {rate_text(link.back_bytes_per_s)} back" if link.back_bytes_per_s is not None else ""
    duplex = "each way" if link.full_duplex and not back else "" if back else "in all"
    rate = f"{rate_text(link.bytes_per_s)}{back} {duplex}".strip()
    waits = "" if link.overlap is Overlap.FULL else f"{link.overlap.words} for messages"
    slower = "slower for small messages" if link.curve else ""
    return [rate, seconds_text(link.latency_s), ", ".join(filter(None, (shared, waits, slower)))]


_TIERS = ("host_memory_bytes", "disk_bytes", "disk_bytes_per_s")


def _plain_device(device: Device) -> dict[str, Any]:
    """The memory and speed of a device, and its figures that are known."""
    plain = asdict(device)
    known = {one.name: plain[one.name] for one in fields(device) if plain[one.name] != one.default}
    model = {"kind": device.kind, "model": known.pop("name")}
    return model | {"memory_bytes": device.memory_bytes, "speed": device.speed} | known


def _plain_link(server: Server, group: Bridge | Mesh | Card) -> dict[str, Any]:
    return {
        "kind": type(group).__name__.lower(),
        "name": f"{server.name}/{group.name}",
        "devices": [f"{server.name}/{server.device_names[place]}" for place in group.devices],
        "switched": isinstance(group, Mesh) and group.switched,
        **_plain_figures(group.link),
    }


def _plain_figures(link: Link) -> dict[str, Any]:
    curve = {"curve": [list(point) for point in link.curve]} if link.curve else {}
    return {
        "bytes_per_s": link.bytes_per_s,
        "back_bytes_per_s": link.into_bytes_per_s,
        "latency_s": link.latency_s,
        "duplex": "full" if link.full_duplex else "half",
        "overlap": str(link.overlap),
        **curve,
    }


# The catalogue of devices.


def catalogue_document() -> dict[str, Any]:
    """All devices of the catalogue, with the sources of their figures."""
    return {"devices": [asdict(one) for one in catalogue().values()]}


def print_catalogue(console: Console) -> None:
    """A row for each device. An asterisk marks figures that its maker does not publish."""
    table = columns(("name", "GiB", "GB/s", *FORMATS, "watts", "attained"), words=("name",))

    def figure(one: CatalogueDevice, key: str, value: float) -> str:
        return f"{value:,.4g}{'*' if key in one.derived else ''}" if value else ""

    for one in catalogue().values():
        low, high = one.attained
        table.add_row(
            one.word,
            figure(one, "memory", one.memory_bytes / GIB),
            figure(one, "bandwidth", one.memory_bytes_per_s / 1e9),
            *(figure(one, key, one.flops_per_s.get(dtype, 0) / 1e12) for key, dtype in FORMATS.items()),
            figure(one, "watts", one.watts),
            f"{100 * low:.0f}–{high:.0%}{'*' if one.attained_source.startswith('estimate') else ''}",
        )
    console.print(table)
    console.print(
        "fp32 to fp16: TFLOP/s of dense matrices; attained: the share of them that training attains. * is "
        "not published: derived, or estimated. --json gives the sources.",
        style="dim",
    )
