"""`cluster.toml`: a cluster as a file that people write, and the folder of ready ones.

Every mistake is one sentence with the file and the key. What a file says briefly (`count`, `like`, links of
all devices) is written out here, so a `Cluster` knows nothing of it.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from bireme.cluster.catalogue import catalogue
from bireme.cluster.cluster import (
    LONGEST_S,
    MOST_BYTES_PER_S,
    MOST_DEVICES,
    Bridge,
    Card,
    Cluster,
    Link,
    Mesh,
    Overlap,
    Route,
    Server,
    Switch,
    device_names,
)
from bireme.cluster.device import FASTEST, Device
from bireme.cluster.named_machines import machines_of
from bireme.documents import as_toml, toml_value
from bireme.errors import BiremeError, closest, errors_of
from bireme.files import read_text, write_text_atomically

# A cluster as the text of `cluster.toml`: equal devices and servers counted, a word on every unit.

_HEAD = """\
# A cluster: servers, their devices, and the links that join them. docs/cluster.md explains every key.
# Bytes are bytes, not bits: 10 Gbit/s are 1.25e9 bytes_per_s. Seconds are seconds: 50 µs are 50e-6 latency_s.
# A full duplex link carries bytes_per_s each way at once, a half duplex one in all.
"""


def cluster_text(cluster: Cluster) -> str:
    """The file; who reads it gets the same cluster back."""
    plain = _plain_cluster(cluster)
    lines = [_HEAD + f"format = {plain['format']}"]
    if "switch" in plain:
        lines += ["", "[switch]", *_values(plain["switch"], "link")]
    for route in plain.get("route", ()):
        lines += ["", "[[route]]", *_values(route, "link")]
    for server in plain["server"]:
        lines += ["", "[[server]]", *_values(server, "server")]
        for key in ("device", "bridge", "mesh", "card"):
            for table in server.get(key, ()):
                lines += ["", f"[[server.{key}]]", *_values(table, "device" if key == "device" else "link")]
    return "\n".join(lines) + "\n"


def _plain_cluster(cluster: Cluster) -> dict[str, Any]:
    """A cluster as the file says it, as briefly as it can be said."""
    plain: dict[str, Any] = {"format": 1}
    if cluster.switch is not None:
        plain["switch"] = _filled(
            bytes_per_s=cluster.switch.bytes_per_s, latency_s=cluster.switch.latency_s or None
        )
    if cluster.routes:
        plain["route"] = [
            _filled(servers=list(one.servers), **_plain_link(one.link)) for one in cluster.routes
        ]
    plain["server"] = []
    for _, equal in groupby(enumerate(cluster.servers), lambda one: replace(one[1], name="server")):
        servers = list(equal)
        while servers:
            begin, first = servers[0]
            count, name = _counted([server.name for _, server in servers], begin)
            head = _filled(name=name, count=count if count > 1 else None)
            plain["server"].append(head | _plain_parts(first))
            del servers[:count]
    return plain


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
    usual = {one.name: one.default for one in fields(Device)} | {"name": device.kind, "count": 1}
    plain = {key: count if key == "count" else getattr(device, key) for key in _FIGURES}
    shown = {key: value for key, value in plain.items() if value is not None and value != usual[key]}
    return {key: float(value) if key in _FLOATS else value for key, value in shown.items()}


def _plain_group(server: Server, kind: str, index: int, group: Bridge | Mesh | Card) -> dict[str, Any]:
    names = [server.device_names[place] for place in group.devices]
    return _filled(
        name=None if group.name == f"{kind}{index}" else group.name,
        devices=None if names == list(server.device_names) else names,
        switched=True if isinstance(group, Mesh) and group.switched else None,
        **_plain_link(group.link),
    )


def _plain_link(link: Link) -> dict[str, Any]:
    return _filled(
        bytes_per_s=float(link.bytes_per_s),
        latency_s=link.latency_s or None,
        duplex=None if link.full_duplex else "half",
        back_bytes_per_s=link.back_bytes_per_s,
        overlap=None if link.overlap is Overlap.FULL else str(link.overlap),
        curve=[list(point) for point in link.curve] or None,
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
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return _float(value) if isinstance(value, float) else toml_value(value)


def _float(value: float) -> str:
    """The shortest text that is the same number: 1.25e9, 0.5."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return repr(value)
    return f"{Decimal(repr(value)).normalize():e}".replace("e+", "e")


def _comment(what: str, key: str, value: Any) -> str:
    match key:
        case "memory_bytes" | "host_memory_bytes" | "disk_bytes" | "process_bytes":
            return f"  # {value / 2**30:.4g} GiB"
        case "curve":
            return "  # bytes of a message, and its seconds"
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
        case "speed" | "update_speed" | "host_speed":
            return "  # 1.0 is as profiled"
    return ""


_EXAMPLES = (Path(__file__).parent / "examples", Path(__file__).parents[3] / "examples" / "clusters")
"""Where the ready files lie: in an installed package, and in the repository."""

_MOST_BYTES = 2**60

_Group = TypeVar("_Group", Bridge, Mesh, Card)


def _list_of_tables(name: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
            raise ValueError(f"tables under two pairs of brackets, [[{name}]]")
        return value

    return BeforeValidator(check)


def _whole(value: Any) -> Any:
    """Let 16e9 be the whole number it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _point(value: Any) -> Any:
    """Let a list of two numbers be the point of a curve that it is."""
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("two numbers, bytes and seconds, such as [65536, 0.0004]")
    return value[0], float(value[1]) if isinstance(value[1], int) else value[1]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_Rate = Annotated[float, Field(gt=0, le=MOST_BYTES_PER_S, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=LONGEST_S, allow_inf_nan=False)]
_Flops = Annotated[float, Field(gt=0, le=1e24, allow_inf_nan=False)]
_Speed = Annotated[float, Field(gt=0, le=FASTEST, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
_Cores = Annotated[int, Field(ge=1, le=2**20)]
_CopySeconds = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Bytes = Annotated[int, Field(gt=0, le=_MOST_BYTES), BeforeValidator(_whole)]


class DeviceTable(_Table):
    """`[[server.device]]`: equal devices of a server. docs/cluster.md explains every key."""

    kind: Literal["cpu", "cuda", "xpu", "mps", "emulated"] | None = Field(
        None, description="cpu, cuda, xpu, mps or emulated"
    )
    count: _Count = 1
    like: str | None = None
    name: str | None = None
    memory_bytes: Bytes | None = Field(None, description="the memory it has")
    speed: _Speed = 1.0
    num_cores: _Cores | None = None
    bytes_per_s: _Rate | None = None
    float32_flops_per_s: _Flops | None = None
    bfloat16_flops_per_s: _Flops | None = None
    watts: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    host_bytes_per_s: _Rate | None = None
    copy_s: _CopySeconds | None = None
    chunk_s: _CopySeconds | None = None
    update_speed: _Speed | None = None
    host_speed: _Speed | None = None
    process_bytes: Annotated[int, Field(ge=0, le=_MOST_BYTES), BeforeValidator(_whole)] | None = None
    members: _Count = 1


_FIGURES = tuple(key for key in DeviceTable.model_fields if key != "like")
_FLOATS = frozenset(("speed", "watts", "host_bytes_per_s", "copy_s", "chunk_s", "update_speed", "host_speed"))
"""Those that are written with a point even if the device has them as whole numbers."""


_Point = Annotated[tuple[Bytes, Seconds], BeforeValidator(_point)]


class _LinkTable(_Table):
    bytes_per_s: _Rate = Field(description="bytes a second: 10 Gbit/s are 1.25e9")
    latency_s: Seconds = 0.0
    duplex: Literal["full", "half"] = "full"
    back_bytes_per_s: _Rate | None = None
    overlap: Literal["none", "receiver", "full"] = "full"
    curve: list[_Point] = []


class _GroupTable(_LinkTable):
    name: str | None = None
    devices: list[str] | None = None


class RouteTable(_LinkTable):
    """`[[route]]`: a limit on messages between two servers beside their cards and the switch."""

    servers: Annotated[list[str], Field(min_length=2, max_length=2)] = Field(
        description="the names of the two servers; bytes_per_s is away from the first one"
    )


class MeshTable(_GroupTable):
    """`[[server.mesh]]`: NVLink."""

    switched: bool = False


class ServerTable(_Table):
    """`[[server]]`: equal servers."""

    name: str | None = None
    count: _Count = 1
    num_cores: _Cores | None = None
    host_memory_bytes: Bytes | None = None
    disk_bytes: Bytes | None = None
    disk_bytes_per_s: _Rate | None = None
    device: Annotated[list[DeviceTable], _list_of_tables("server.device")] = Field(description="its devices")
    bridge: Annotated[list[_GroupTable], _list_of_tables("server.bridge")] = []
    mesh: Annotated[list[MeshTable], _list_of_tables("server.mesh")] = []
    card: Annotated[list[_GroupTable], _list_of_tables("server.card")] = []


class SwitchTable(_Table):
    """`[switch]`: what joins the servers."""

    bytes_per_s: _Rate | None = None
    latency_s: Seconds = 0.0


class _ClusterFile(_Table):
    """The whole file."""

    format: Literal[1] = 1
    switch: SwitchTable | None = None
    route: Annotated[list[RouteTable], _list_of_tables("route")] = []
    server: Annotated[list[ServerTable], _list_of_tables("server")] = Field(
        description="the servers: a table [[server]] for each; `bireme cluster discover --output` writes them"
    )


def load_cluster(text: str) -> Cluster:
    """The cluster in a file, the ready one of that name, or that of machines in words."""
    names = example_names()
    if text.endswith(".toml") or Path(text).exists():
        return read_cluster(Path(text))
    if text in names:
        return read_cluster(_examples() / f"{text}.toml")
    if text in catalogue() or re.search(r"[,@:+]|^\d+ *[x×*]", text):
        return machines_of(text).cluster()
    if "/" in text:
        return read_cluster(Path(text))
    raise BiremeError(
        f"There is no cluster {text!r}. {closest(text, names)} A cluster of your own goes into a .toml "
        "file, or is written as machines, such as 2x rtx3090."
    )


def example_names() -> tuple[str, ...]:
    """The names of the ready clusters."""
    return tuple(sorted(path.stem for path in _examples().glob("*.toml")))


def read_cluster(path: Path) -> Cluster:
    """The cluster in a file."""
    return cluster_in(read_text(path), str(path))


def cluster_in(text: str, source: str) -> Cluster:
    """The cluster in the text of a file; `source` is what to call it in an error."""
    file = as_toml(text, _ClusterFile, source)
    with errors_of(source):
        return _cluster(file)


def save_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster to a file, with a word on every unit."""
    write_text_atomically(path, cluster_text(cluster))


def cluster_hash(cluster: Cluster) -> str:
    """What is the same for equal clusters only, however their files are written."""
    return hashlib.sha256(json.dumps(_plain_cluster(cluster)).encode()).hexdigest()[:16]


def _examples() -> Path:
    return next((folder for folder in _EXAMPLES if folder.is_dir()), _EXAMPLES[0])


def _cluster(file: _ClusterFile) -> Cluster:
    if not file.server:
        raise BiremeError("server is empty; a cluster has at least one [[server]].")
    total = sum(table.count * sum(one.count for one in table.device) for table in file.server)
    if total > MOST_DEVICES:
        raise BiremeError(f"server has {total} devices, the counts multiplied; {MOST_DEVICES} are the most.")
    servers: list[Server] = []
    for index, table in enumerate(file.server):
        for number in range(table.count):
            name = f"server{len(servers)}" if table.name is None else table.name
            if table.name is not None and table.count > 1:
                name += str(number)
            like = replace(servers[-1], name=name) if number else None
            servers.append(like or _server(table, name, f"server[{index}]"))
    with errors_of("switch"):
        switch = None if file.switch is None else Switch(file.switch.bytes_per_s, file.switch.latency_s)
    routes = []
    for index, route in enumerate(file.route):
        with errors_of(f"route[{index}]"):
            one, other = route.servers
            routes.append(Route((one, other), _link(route)))
    return Cluster(tuple(servers), switch, tuple(routes))


def _server(table: ServerTable, name: str, place: str) -> Server:
    devices: list[Device] = []
    for index, one in enumerate(table.device):
        with errors_of(f"{place}.device[{index}]"):
            devices += [_device(one)] * one.count
    names = device_names(devices)
    bridges = _groups(place, "bridge", Bridge, table.bridge, names)
    meshes = _groups(place, "mesh", Mesh, table.mesh, names)
    cards = _groups(place, "card", Card, table.card, names)
    with errors_of(place):
        return Server(
            name,
            tuple(devices),
            bridges,
            meshes,
            cards,
            table.num_cores or 0,
            table.host_memory_bytes or 0,
            table.disk_bytes or 0,
            table.disk_bytes_per_s or 0.0,
        )


def _groups(
    place: str,
    kind: str,
    make: Callable[..., _Group],
    tables: Sequence[_GroupTable],
    names: Sequence[str],
) -> tuple[_Group, ...]:
    found = []
    for index, table in enumerate(tables):
        with errors_of(f"{place}.{kind}[{index}]"):
            title = f"{kind}{index}" if table.name is None else table.name
            switched = (table.switched,) if isinstance(table, MeshTable) else ()
            found.append(make(title, _places(table, names), _link(table), *switched))
    return tuple(found)


def _device(table: DeviceTable) -> Device:
    given = table.model_dump(exclude_none=True, exclude={"count", "like"})
    if table.like is not None:
        if table.like not in catalogue():
            raise BiremeError(
                f"like is {table.like!r}, which is not in the catalogue. {closest(table.like, catalogue())}"
            )
        return replace(catalogue()[table.like].device.together(table.members), **given)
    for key in ("kind", "memory_bytes"):
        if key not in given:
            meaning = DeviceTable.model_fields[key].description
            raise BiremeError(f'{key} is missing ({meaning}). Give it, or like = "a100" and the like.')
    return Device(**({"name": given["kind"]} | given))


def _link(table: _LinkTable) -> Link:
    return Link(
        table.bytes_per_s,
        table.latency_s,
        table.duplex == "full",
        table.back_bytes_per_s,
        Overlap(table.overlap),
        tuple(table.curve),
    )


def _places(table: _GroupTable, names: Sequence[str]) -> tuple[int, ...]:
    if table.devices is None:
        return tuple(range(len(names)))
    number = {name: place for place, name in enumerate(names)}
    for name in table.devices:
        if name not in number:
            raise BiremeError(f"devices names {name!r}, which the server lacks. {closest(name, names)}")
    return tuple(number[name] for name in table.devices)
