"""The catalogue of devices: their makers' figures, and what share of them training attains.

`devices.toml` has the figures and, for each group of devices, their source. Figures that a maker does not
publish are left out or marked as derived. A cluster file, `--like` and `bireme fit` name devices by the
catalogue's words.
"""

import math
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from bireme.cluster.cluster import Cluster
from bireme.cluster.device import GIB, Device
from bireme.documents import read_json
from bireme.errors import BiremeError, closest

_FILE = Path(__file__).parent / "devices.toml"

FORMATS = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16"}
"""Number formats of matrices: the file's key, and the name that torch uses."""


@dataclass(frozen=True, slots=True)
class CatalogueDevice:
    """A device of the catalogue. `memory_bytes` is 0 if it is sold with several sizes of memory, `watts` if
    the maker publishes none.

    `flops_per_s` has the dense matrix rate of each number format that the device has hardware for; sums are
    in float32. `peer_bytes_per_s` is how fast it reaches others of its machine over NVLink, 0 if it has none.
    `derived` names the figures that the maker does not publish. `attained` is the
    least and the most share of the matrix rate that training was reported to attain, or an estimate.
    If it `shares_host`, its memory is that of its host.
    """

    word: str
    name: str
    kind: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    watts: float
    process_bytes: int | None
    peer_bytes_per_s: float
    derived: tuple[str, ...]
    source: str
    attained: tuple[float, float]
    attained_source: str
    shares_host: bool

    @property
    def likely_attained(self) -> float:
        """The geometric mean of the range of `attained`."""
        return math.sqrt(math.prod(self.attained))

    def rate(self, dtype: str) -> float:
        """Its matrix rate in a number format. Without hardware for the format it computes in float32."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])

    @property
    def device(self) -> Device:
        """The device as the planner knows it, which has one rate for both formats of sixteen bits."""
        sixteen_bits = (self.flops_per_s.get(dtype) for dtype in ("bfloat16", "float16", "float32"))
        return Device(
            self.name,
            self.kind,
            self.memory_bytes,
            self.memory_bytes_per_s,
            self.flops_per_s["float32"],
            next(rate for rate in sixteen_bits if rate),
            watts=self.watts,
            process_bytes=self.process_bytes,
        )


@cache
def catalogue() -> Mapping[str, CatalogueDevice]:
    """All devices of the catalogue by their words."""
    groups = tomllib.loads(_FILE.read_text(encoding="utf-8"))["group"]
    found = {}
    for group in groups:
        for word, figures in group["devices"].items():
            found[word] = CatalogueDevice(
                word=word,
                name=figures["name"],
                kind=group["kind"],
                memory_bytes=round(figures.get("gib", 0) * GIB + figures.get("gb", 0) * 1e9),
                memory_bytes_per_s=figures["gb_per_s"] * 1e9,
                flops_per_s={
                    dtype: round(figures[key] * 1e12) for key, dtype in FORMATS.items() if key in figures
                },
                watts=figures.get("watts", 0),
                process_bytes=group.get("process_bytes"),
                peer_bytes_per_s=group.get("peer_gb_per_s", 0) * 1e9,
                derived=tuple(figures.get("derived", ())),
                source=group["source"],
                attained=(group["attained"][0], group["attained"][1]),
                attained_source=group["attained_source"],
                shares_host=group["kind"] == "cpu"
                or group.get("shares_host", not {"gib", "gb"} & figures.keys()),
            )
    return found


def catalogued(text: str) -> CatalogueDevice:
    """The device of that word. Case, spaces and hyphens do not matter."""
    known = {_letters(word): one for word, one in catalogue().items()}
    if _letters(text) not in known:
        raise BiremeError(f"There is no device {text!r} in the catalogue. {closest(text, catalogue())}")
    return known[_letters(text)]


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


# Names that drivers give to devices.

_MAKERS_WORDS = frozenset({"nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "gpu", "generation"})
_CONNECTOR = re.compile(r"sxm\d?|hbm3e?")
_MEMORY = re.compile(r"\d+gb")


def namesake(name: str) -> Device | None:
    """The figures of the GPU with a driver's name, if there is no doubt. Those of a processor are of all its
    cores, and a machine may have fewer.
    """
    found = catalogued_as(name)
    return None if found is None or found.kind == "cpu" else found.device


def catalogued_as(name: str) -> CatalogueDevice | None:
    """The device of the catalogue with a driver's name, if there is no doubt. Words of the maker do not
    matter, nor does the memory unless both names give it.
    """
    own, own_memory = _words(name)
    found = []
    for one in catalogue().values():
        words, memory = _words(one.name)
        if words == own and (memory == own_memory or not (memory and own_memory)):
            found.append((memory == own_memory, one))
    same_memory = [one for is_same, one in found if is_same] or [one for _, one in found]
    return same_memory[0] if len(same_memory) == 1 else None


@cache
def _words(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """The words of a name that distinguish devices, and the words that give the memory."""
    words = frozenset(re.split(r"[^a-z0-9+]+", name.lower())) - _MAKERS_WORDS
    memory = frozenset(filter(_MEMORY.fullmatch, words))
    return frozenset(word for word in words - memory if not _CONNECTOR.fullmatch(word)), memory


# Devices by name, as options and cluster files give them.


class _DeviceDocument(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal[1] = 1
    name: str = Field(description="what to call the device")
    kind: Literal["cpu", "cuda"] = Field(description="cpu or cuda")
    memory_bytes: Annotated[int, Field(gt=0, description="the memory it has")]
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False, description="bandwidth of its memory")]
    float32_flops_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False, description="speed in float32")]
    bfloat16_flops_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False, description="speed in bfloat16")]


def device_named(text: str) -> Device:
    """The catalogue's device of that word, or the device described in a JSON file with the fields of
    `Device`.
    """
    if text.endswith(".json"):
        return Device(**read_json(Path(text), _DeviceDocument).model_dump(exclude={"format"}))
    if text not in catalogue():
        raise BiremeError(
            f"There is no device {text!r}. {closest(text, catalogue())} A device of your own goes into a "
            ".json file."
        )
    return catalogue()[text].device


# What a device can page to: its share of the host and of the disk, and how fast its chunks travel.
#
# What a cluster does not give is taken from makers' figures, of which 80 % arrive:
#
# * A GPU exchanges with its host over its PCIe bridge. Without one it has the PCIe 3.0 × 16 that every card
#   of the last ten years has at least: 16 lanes of 8 GT/s, 128 in 130 bits data, are 15.75 GB/s each way.
# * A processor device and its host are the same memory, and a copy crosses it three times: it is read, its
#   place is read, and that is written. A channel of DDR4-3200 carries 3,200 million times 8 bytes a second.
# * A disk reads and writes 3.3 GB/s, the slower of the two figures that Samsung announced the 970 EVO Plus
#   with, an NVMe disk on PCIe 3.0 × 4. When its cache is full it writes about half of that.

_ATTAINED = 0.8
PCIE_BYTES_PER_S = 15.75e9 * _ATTAINED
_CROSSINGS = 3
_COPY_BYTES_PER_S = 25.6e9 * _ATTAINED / _CROSSINGS
_DISK_BYTES_PER_S = 3.3e9 * _ATTAINED


@dataclass(frozen=True, slots=True)
class _TierShare:
    """What one of the devices in use gets of its server; bytes are None where the cluster does not say, and
    what copies and chunks take of themselves is 0 then.
    """

    host_bytes: int | None
    disk_bytes: int | None
    host_bytes_per_s: float
    disk_bytes_per_s: float
    copy_s: float = 0.0
    chunk_s: float = 0.0


def tier_share(cluster: Cluster, device: int, used: Collection[int]) -> _TierShare:
    """The share of a device where those devices are used, all of which page."""
    placed = cluster.devices()
    server, own = cluster.servers[placed[device].server], placed[device].device
    sharers = sum(placed[one].server == placed[device].server for one in used)
    return _TierShare(
        host_bytes=server.host_memory_bytes // sharers if server.host_memory_bytes else None,
        disk_bytes=server.disk_bytes // sharers if server.disk_bytes else None,
        host_bytes_per_s=_host_bytes_per_s(cluster, device, used),
        disk_bytes_per_s=(server.disk_bytes_per_s or _DISK_BYTES_PER_S) / sharers,
        copy_s=own.copy_s,
        chunk_s=own.chunk_s,
    )


def _host_bytes_per_s(cluster: Cluster, device: int, used: Collection[int]) -> float:
    own = cluster.devices()[device]
    if own.device.host_bytes_per_s:
        return own.device.host_bytes_per_s
    if own.device.kind != "cuda":
        return own.device.bytes_per_s / _CROSSINGS or _COPY_BYTES_PER_S
    places = {cluster.devices()[one].place for one in used if cluster.devices()[one].server == own.server}
    for bridge in cluster.servers[own.server].bridges:
        if own.place in bridge.devices:
            slower = min(bridge.link.bytes_per_s, bridge.link.into_bytes_per_s)
            return slower / len(places.intersection(bridge.devices))
    return PCIE_BYTES_PER_S
