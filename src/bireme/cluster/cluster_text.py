"""A cluster as the text of `cluster.toml`: equal devices and servers counted, a word on every unit."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from bireme.cluster.cluster import Cluster
from bireme.cluster.device import Device
from bireme.cluster.links import Bridge, Card, Link, Mesh
from bireme.cluster.server import Server

__all__ = ["cluster_text", "plain_cluster"]

HEAD = """\
# A cluster: servers, their devices, and the links that join them. docs/cluster.md explains every key.
# Bytes are bytes, not bits: 10 Gbit/s are 1.25e9 bytes_per_s. Seconds are seconds: 50 µs are 50e-6 latency_s.
# A full duplex link carries bytes_per_s each way at once, a half duplex one in all.
"""


NAMELESS = "server"


def cluster_text(cluster: Cluster) -> str:
    """The file; who reads it gets the same cluster back."""
    plain = plain_cluster(cluster)
    lines = [HEAD + f"format = {plain['format']}"]
    if "switch" in plain:
        lines += ["", "[switch]", *_values(plain["switch"], "link")]
    for server in plain["server"]:
        lines += ["", "[[server]]", *_values(server, "server")]
        for key in ("device", "bridge", "mesh", "card"):
            for table in server.get(key, ()):
                lines += ["", f"[[server.{key}]]", *_values(table, "device" if key == "device" else "link")]
    return "\n".join(lines) + "\n"


def plain_cluster(cluster: Cluster) -> dict[str, Any]:
    """A cluster as the file says it, as briefly as it can be said."""
    plain: dict[str, Any] = {"format": 1}
    if cluster.switch is not None:
        plain["switch"] = _filled(
            bytes_per_s=cluster.switch.bytes_per_s, latency_s=cluster.switch.latency_s or None
        )
    plain["server"] = []
    begin = 0
    while begin < len(cluster.servers):
        end = begin + 1
        while end < len(cluster.servers) and _parts(cluster.servers[end]) == _parts(cluster.servers[begin]):
            end += 1
        names = [server.name for server in cluster.servers[begin:end]]
        count, name = _counted(names, begin)
        head = _filled(name=name, count=count if count > 1 else None)
        plain["server"].append(head | _plain_parts(cluster.servers[begin]))
        begin += count
    return plain


def _parts(server: Server) -> Server:
    """All of it but the name."""
    return replace(server, name=NAMELESS)


def _counted(names: Sequence[str], begin: int) -> "tuple[int, str | None]":
    """How many of these servers one table can say, from the first on, and under which name."""
    unnamed = next(
        (place for place, name in enumerate(names) if name != f"server{begin + place}"), len(names)
    )
    if unnamed:
        return unnamed, None
    if names[0].endswith("0"):
        prefix = names[0][:-1]
        run = next((place for place, name in enumerate(names) if name != f"{prefix}{place}"), len(names))
        if prefix and run > 1:
            return run, prefix
    return 1, names[0]


def _plain_parts(server: Server) -> dict[str, Any]:
    devices = [(device, len(list(equal))) for device, equal in groupby(server.devices)]
    plain = _filled(
        num_cores=server.num_cores or None,
        host_memory_bytes=server.host_memory_bytes or None,
        disk_bytes=server.disk_bytes or None,
        disk_bytes_per_s=float(server.disk_bytes_per_s) or None,
    )
    plain["device"] = [_plain_device(device, count) for device, count in devices]
    kinds: dict[str, Sequence[Bridge | Mesh | Card]] = {
        "bridge": server.bridges,
        "mesh": server.meshes,
        "card": server.cards,
    }
    for key, groups in kinds.items():
        if groups:
            plain[key] = [_plain_group(server, key, index, group) for index, group in enumerate(groups)]
    return plain


def _plain_device(device: Device, count: int) -> dict[str, Any]:
    return _filled(
        kind=device.kind,
        count=count if count > 1 else None,
        name=None if device.name == device.kind else device.name,
        memory_bytes=device.memory_bytes,
        speed=None if device.speed == 1 else float(device.speed),
        num_cores=device.num_cores or None,
        bytes_per_s=device.bytes_per_s or None,
        float32_flops_per_s=device.float32_flops_per_s or None,
        bfloat16_flops_per_s=device.bfloat16_flops_per_s or None,
        watts=float(device.watts) if device.watts else None,
        host_bytes_per_s=float(device.host_bytes_per_s) or None,
        copy_s=float(device.copy_s) or None,
        chunk_s=float(device.chunk_s) or None,
    )


def _plain_group(server: Server, kind: str, index: int, group: Bridge | Mesh | Card) -> dict[str, Any]:
    names = [server.device_names[place] for place in group.devices]
    link: Link = group.link
    return _filled(
        name=None if group.name == f"{kind}{index}" else group.name,
        devices=None if names == list(server.device_names) else names,
        switched=True if isinstance(group, Mesh) and group.switched else None,
        bytes_per_s=float(link.bytes_per_s),
        latency_s=link.latency_s or None,
        duplex=None if link.full_duplex else "half",
        back_bytes_per_s=link.back_bytes_per_s,
    )


def _filled(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _values(table: dict[str, Any], what: str) -> list[str]:
    return [
        f"{key} = {_value(value)}{_comment(what, key, value)}"
        for key, value in table.items()
        if key not in ("device", "bridge", "mesh", "card")
    ]


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return _float(value)
        case list():
            return f"[{', '.join(map(_value, value))}]"
    # JSON writes strings as TOML reads them, but for one letter.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _float(value: float) -> str:
    """The shortest text that is the same number: 1.25e9, 0.5."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return repr(value)
    mantissa, _, exponent = f"{value:.{_digits(value)}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _digits(value: float) -> int:
    return next(digits for digits in range(18) if float(f"{value:.{digits}e}") == value)


def _comment(what: str, key: str, value: Any) -> str:
    match key:
        case "memory_bytes" | "host_memory_bytes" | "disk_bytes":
            return f"  # {value / 2**30:.4g} GiB"
        case "latency_s" | "copy_s" | "chunk_s" if value:
            return f"  # {value * 1e6:.4g} µs"
        case "bytes_per_s" | "back_bytes_per_s" if what == "link":
            return f"  # {value * 8 / 1e9:.4g} Gbit/s"
        case "bytes_per_s":
            return f"  # {value / 1e9:.4g} GB/s of its own memory"
        case "host_bytes_per_s" | "disk_bytes_per_s":
            return f"  # {value / 1e9:.4g} GB/s"
        case "float32_flops_per_s" | "bfloat16_flops_per_s":
            return f"  # {value / 1e12:.4g} TFLOP/s"
        case "speed":
            return "  # 1.0 is as profiled"
    return ""
