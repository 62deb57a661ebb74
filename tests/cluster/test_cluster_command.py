"""`bireme cluster`: what is found on a machine, real or made up, and what is shown of a cluster."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bireme.cluster import machine
from bireme.cluster import machine as nvml
from bireme.cluster.cluster import Link, Mesh
from bireme.cluster.cluster_file import example_names, read_cluster
from tests.support.command import bireme

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]


class Driver:
    """NVIDIA's library on a machine that does not exist."""

    class NVMLError(Exception):
        pass

    NVML_TOPOLOGY_MULTIPLE = 20
    NVML_NVLINK_MAX_LINKS = 4
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    def __init__(
        self, names: list[str], *, switch: str = "", nvlinks: dict[tuple[int, int], int] | None = None
    ):
        self.names, self.switch, self.nvlinks, self.is_on = names, switch, nvlinks or {}, False

    def nvmlInit(self) -> None:  # noqa: N802
        self.is_on = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_on = False

    def __getattr__(self, name: str) -> Any:
        answers = {
            "GetCount": lambda: len(self.names),
            "GetHandleByIndex": lambda index: index,
            "GetUUID": lambda device: f"GPU-{device}aa",
            "GetName": lambda device: self.names[device],
            "GetMemoryInfo": lambda device: SimpleNamespace(total=(device + 1) * 2**30),
            "GetPciInfo": lambda device: SimpleNamespace(busId=f"0000:0{device}:00.0"),
            "GetMaxPcieLinkGeneration": lambda device: 4,
            "GetMaxPcieLinkWidth": lambda device: 16,
            "GetTopologyCommonAncestor": lambda a, b: 10 if a // 2 == b // 2 else 50,
            "GetNvLinkState": lambda device, link: int(link < len(self.ends(device))),
            "GetNvLinkVersion": lambda device, link: 4,
            "GetNvLinkRemoteDeviceType": lambda device, link: 2 if self.switch else 0,
            "GetNvLinkRemotePciInfo": lambda device, link: SimpleNamespace(
                busId=f"0000:0{self.ends(device)[link]}:00.0".encode()
            ),
        }
        try:
            assert self.is_on
            return answers[name.removeprefix("nvmlDevice")]
        except KeyError:
            raise AttributeError(name) from None

    def ends(self, device: int) -> list[int]:
        """What is at the other end of each of a device's links."""
        if self.switch:
            return [9, 9]
        return [
            other
            for pair, count in self.nvlinks.items()
            for end, other in (pair, pair[::-1])
            if end == device
            for _ in range(count)
        ]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a made-up driver in the place of this machine's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(made: Driver) -> Driver:
        monkeypatch.setattr(nvml, "import_module", lambda _: made)
        return made

    return put


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ImportError

    monkeypatch.setattr(nvml, "import_module", missing)


def put_cards(folder: Path, monkeypatch: pytest.MonkeyPatch, cards: dict[str, tuple[str, str, str]]) -> None:
    for name, (speed, duplex, state) in cards.items():
        (folder / name / "device").mkdir(parents=True)
        for file, text in (("speed", speed), ("duplex", duplex), ("operstate", state)):
            (folder / name / file).write_text(f"{text}\n")
    (folder / "lo").mkdir(parents=True)
    (folder / "lo" / "operstate").write_text("up\n")
    monkeypatch.setattr(machine, "CARDS", folder)


# --- discover ----------------------------------------------------------------------------------------------


def test_this_machine_is_a_cluster(capsys: Capture) -> None:
    document = bireme(capsys, "cluster", "discover", "--json").document
    assert document["num_servers"] == 1
    assert document["num_devices"] >= 1
    assert document["servers"][0]["devices"][0]["memory_bytes"] > 2**20


@pytest.mark.usefixtures("no_cuda")
def test_a_machine_without_nvidia_s_library_is_its_processor(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bireme.cluster.machine.num_cores", lambda: 8)
    monkeypatch.setattr("bireme.cluster.machine.memory_bytes", lambda: 16 * 2**30)
    put_cards(tmp_path / "net", monkeypatch, {})
    path = tmp_path / "cluster.toml"
    result = bireme(capsys, "cluster", "discover", "--cpus", "4", "--output", str(path), "--json")
    assert result.status == 0
    devices = result.document["servers"][0]["devices"]
    assert [(device["kind"], device["num_cores"], device["memory_bytes"]) for device in devices] == [
        ("cpu", 2, 4 * 2**30)
    ] * 4
    assert [device.device.num_cores for device in read_cluster(path).devices()] == [2] * 4
    notes = " ".join(result.document["notes"])
    assert "Install bireme[gpu]" in notes
    assert "No network card reports its speed" in notes


def test_a_machine_with_the_library_and_no_driver_says_so(driver: Any, capsys: Capture) -> None:
    class Without(Driver):
        def nvmlInit(self) -> None:  # noqa: N802
            raise Driver.NVMLError("NVML Shared Library Not Found")

    driver(Without([]))
    result = bireme(capsys, "cluster", "discover")
    assert result.status == 0
    assert "No CUDA devices: NVML Shared Library Not Found." in result.out


@pytest.mark.usefixtures("no_cuda")
def test_the_fastest_network_card_that_is_up_is_taken(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cards = {
        "eth0": ("1000", "half", "up"),
        "eth1": ("10000", "full", "up"),
        "eth2": ("40000", "full", "down"),
        "virtual": ("-1", "unknown", "up"),
    }
    put_cards(tmp_path, monkeypatch, cards)
    document = bireme(capsys, "cluster", "discover", "--json").document
    (link,) = document["servers"][0]["links"]
    assert link["name"].endswith("/eth1")
    assert (link["bytes_per_s"], link["duplex"]) == (1.25e9, "full")
    assert any("there is also eth0" in note for note in document["notes"])


def test_cuda_devices_are_listed_with_what_is_known_of_their_kind(driver: Any, capsys: Capture) -> None:
    made = driver(Driver(["NVIDIA A100-SXM4-80GB", "NVIDIA A10G", "Tesla T4", "NVIDIA GeForce RTX 4090"]))
    document = bireme(capsys, "cluster", "discover", "--json").document
    devices = document["servers"][0]["devices"]
    assert [device["memory_bytes"] // 2**30 for device in devices] == [1, 2, 3, 4]
    assert [device.get("bfloat16_flops_per_s") for device in devices] == [312e12, None, 65e12, 165e12]
    assert [device["name"].split("/")[1] for device in devices] == ["gpu0", "gpu1", "gpu2", "gpu3"]
    bridges = [link for link in document["servers"][0]["links"] if link["kind"] == "bridge"]
    assert [len(link["devices"]) for link in bridges] == [2, 2]
    assert bridges[0]["bytes_per_s"] == pytest.approx(31.5e9, rel=0.01)
    assert not made.is_on


def test_processors_are_listed_with_cuda_devices_only_if_asked_for(driver: Any, capsys: Capture) -> None:
    driver(Driver(["Tesla T4"]))
    kinds = [
        [device["kind"] for device in bireme(capsys, *words).document["servers"][0]["devices"]]
        for words in (["cluster", "discover", "--json"], ["cluster", "discover", "--json", "--cpus", "1"])
    ]
    assert kinds == [["cuda"], ["cuda", "cpu"]]


def test_nvlinks_are_a_mesh_cables_or_ports(driver: Any) -> None:
    names = ["Tesla V100-SXM2-16GB"] * 3
    driver(Driver(names, nvlinks={(0, 1): 1, (1, 2): 1, (0, 2): 1}))
    assert nvml.find_cuda_devices().meshes == (Mesh("nvlink", (0, 1, 2), Link(25e9)),)
    driver(Driver(names, nvlinks={(0, 1): 2, (1, 2): 1}))
    assert nvml.find_cuda_devices().meshes == (
        Mesh("nvlink0", (0, 1), Link(50e9)),
        Mesh("nvlink1", (1, 2), Link(25e9)),
    )
    driver(Driver(names, switch="there is one"))
    assert nvml.find_cuda_devices().meshes == (Mesh("nvlink", (0, 1, 2), Link(50e9), switched=True),)


@pytest.mark.parametrize(
    ("chosen", "found"),
    [("2,0", [3, 1]), ("GPU-1", [2]), ("1,7,0", [2]), ("", []), ("-1", [])],
)
def test_only_visible_devices_are_listed(
    driver: Any, monkeypatch: pytest.MonkeyPatch, chosen: str, found: list[int]
) -> None:
    driver(Driver(["Tesla T4"] * 3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    devices = nvml.find_cuda_devices()
    assert [device.memory_bytes // 2**30 for device in devices.devices] == found
    assert bool(devices.note) == (not found)


def test_limits_of_a_container_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CORES_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr(machine, "MEMORY_LIMIT", tmp_path / "memory.max")
    free = machine.num_cores(), machine.memory_bytes()
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (machine.num_cores(), machine.memory_bytes()) == free
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert (machine.num_cores(), machine.memory_bytes()) == (1, 2**20)


# --- show --------------------------------------------------------------------------------------------------


def test_a_cluster_is_shown_as_tables(capsys: Capture) -> None:
    out = bireme(capsys, "cluster", "show", "two-unequal-servers").out
    assert "8 devices in 2 servers; 2 kinds" in out
    assert re.search(r"slow/gpu0…3 +NVIDIA GeForce RTX 3090 +24.0 GiB +×0.46", out)
    assert re.search(r"fast/bridge1 +gpu2, gpu3 +25 GB/s each way +5 µs +by all", out)
    assert "speed" not in bireme(capsys, "cluster", "show", "four-servers-of-4").out
    assert re.search(
        r"server0/emulated7 +emulated +1.00 GiB +×0.5",
        bireme(capsys, "cluster", "show", "emulated-8-one-slow").out,
    )


def test_a_cluster_is_shown_as_a_document(capsys: Capture) -> None:
    document = bireme(capsys, "cluster", "show", "four-servers-of-4", "--json").document
    assert (document["num_servers"], document["num_devices"]) == (4, 16)
    assert document["switch"] == {"bytes_per_s": None, "latency_s": 5e-6}
    assert document["servers"][3]["links"][2]["devices"][0] == "server3/gpu0"
    assert [len(group) for group in document["alike"]] == [16]


def test_a_document_has_all_known_figures_of_a_device(capsys: Capture, tmp_path: Path) -> None:
    known = {"memory_bytes": 2**30, "speed": 1.0, "copy_s": 2e-5, "chunk_s": 3e-5, "process_bytes": 0}
    figures = "\n".join(f"{name} = {value}" for name, value in known.items())
    path = tmp_path / "cluster.toml"
    path.write_text(f'[[server]]\n[[server.device]]\nkind = "cpu"\n{figures}\n')
    (server,) = bireme(capsys, "cluster", "show", str(path), "--json").document["servers"]
    assert server["devices"] == [{"name": "server0/cpu0", "kind": "cpu", "model": "cpu", **known}]


def test_the_ready_clusters_are_listed(capsys: Capture) -> None:
    assert bireme(capsys, "cluster", "show", "--list").out.split() == list(example_names())
    assert bireme(capsys, "cluster", "show", "--list", "--json").document == {
        "clusters": list(example_names())
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show"], "Name a cluster to show"),
        (["show", "laptop", "--list"], "Name a cluster to show"),
        (["show", "labtop"], "Did you mean 'laptop'?"),
        (["show", "missing.toml"], "There is no file missing.toml."),
        (["discover", "--cpus", "-1"], "cannot be divided into -1 devices"),
        (["discover", "--output", "c.json"], "must end in .toml"),
        (["discover", "--output", "/nowhere/c.toml"], "there is no folder /nowhere"),
        (["discovr"], "No such command"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(capsys: Capture, words: list[str], said: str) -> None:
    result = bireme(capsys, "cluster", *words)
    assert result.status == 2
    assert said in result.err
    assert result.out == ""
    assert len(result.err.splitlines()) == 1


def test_the_code_of_the_document_works(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "cluster.md").read_text()
    (file,) = re.findall(r"^```toml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    Path("ours.toml").write_text(file)
    assert read_cluster(Path("ours.toml")).num_devices == 16
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    exec(compile(code, "cluster.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "(1, 2, 4)"
    together, across = (float(line.rsplit(" ", 1)[1]) for line in printed[:2])
    assert together < across


def test_the_catalogue_is_listed_with_the_sources_of_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    result = bireme(capsys, "cluster", "devices")
    assert result.status == 0
    assert "rtx4060-laptop" in result.out
    document = json.loads(bireme(capsys, "cluster", "devices", "--json").out)
    (found,) = [one for one in document["devices"] if one["word"] == "a100"]
    assert found["flops_per_s"]["bfloat16"] == 312e12
    assert "Narayanan" in found["attained_source"]
    assert all(one["source"] for one in document["devices"])
