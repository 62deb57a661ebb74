"""What is known of devices where there is no accelerator, and how processes share one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bireme import devices
from bireme.cluster.catalogue import device_named
from bireme.cluster.cluster import Server, link_notes
from bireme.cluster.device import Device
from bireme.devices import device_called, device_of_process, num_accelerators
from bireme.errors import BiremeError
from bireme.runtime.world import World
from bireme.train import machines
from bireme.train.machines import cluster_of, machines_of
from bireme.train.run_file import RunFile, load_run_file
from tests.support.ranks import run_script

T4 = device_named("t4")


def asked(**cluster: object) -> RunFile:
    return load_run_file(None, [f"cluster.{key}={value}" for key, value in cluster.items()])


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "server_here", lambda _device, count: Server("box", (T4,) * count))


def test_a_device_that_stands_for_several_is_planned_for_and_not_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('format = 1\n[[server]]\n[[server.device]]\nlike = "t4"\nmembers = 2\n')
    run = asked(source=file)
    assert machines_of(run, num_cuda=0, num_cores=8, computes=False).cluster.num_devices == 1
    with pytest.raises(BiremeError, match=r"server0/gpu0 stands for 2 devices"):
        machines_of(run, num_cuda=0, num_cores=8)


@pytest.mark.usefixtures("gpus")
def test_over_gloo_processes_share_a_device_in_parts() -> None:
    found = machines_of(asked(device="cuda", backend="gloo", workers=3), num_cuda=2, num_cores=8)
    half, whole = replace(T4, memory_bytes=T4.memory_bytes // 2, speed=0.5, watts=35.0), T4
    assert found.cluster.servers[0].devices == (half, whole, half)
    assert (found.device, found.backend) == ("cuda", "gloo")


@pytest.mark.usefixtures("gpus")
def test_nccl_and_auto_give_each_process_a_device_of_its_own() -> None:
    found = machines_of(asked(), num_cuda=2, num_cores=8)
    assert (found.cluster.num_devices, found.device, found.backend) == (2, "cuda", "nccl")
    with pytest.raises(BiremeError, match="to gloo to share devices"):
        machines_of(asked(device="cuda", workers=3), num_cuda=2, num_cores=8)


@pytest.mark.usefixtures("gpus")
def test_processes_compute_on_the_gpus_that_the_plan_names() -> None:
    """Ranks count from the first GPU on, whichever the plan names."""
    cluster = machines_of(asked(), num_cuda=3, num_cores=8).cluster
    first, second, third = (placed.name for placed in cluster.devices())

    def visible(now: str | None, *names: str) -> str | None:
        return machines.visible_gpus(names, cluster, now, num_cuda=3)

    assert visible(None, second) == "1"
    assert visible("5,6,7", third, first) == "7,5"
    assert visible(None, first, second) is None
    assert visible(None, "elsewhere/gpu1") is None


def test_the_processes_of_a_machine_take_its_devices_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_accelerators", lambda _kind: 2)
    found = [str(device_of_process("cuda", local_rank)) for local_rank in range(3)]
    assert found == ["cuda:0", "cuda:1", "cuda:0"]
    assert device_of_process("cpu", 3) == torch.device("cpu")


@pytest.mark.skipif(num_accelerators() > 0, reason="there is a device to share")
def test_a_world_on_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(BiremeError, match="no CUDA device here for process 0"), World.alone(device="cuda"):
        pass


@pytest.mark.parametrize(("backend", "device"), [("gloo", "tpu"), ("nccl", "mps"), ("nccl", "cpu")])
def test_a_world_says_which_devices_there_are(backend: devices.Backend, device: str) -> None:
    world = World.alone(backend=backend, device=device)
    with (
        pytest.raises(BiremeError, match=f"A rank computes on cpu, cuda, xpu, mps, .* not on '{device}'"),
        world,
    ):
        pass


def test_a_device_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(BiremeError, match="There is no device 'tpu' here"):
        device_called("tpu")
    assert device_called(torch.device("cpu")) == torch.device("cpu")


OTHER = """
import sys
import torch
for name in [name for name in sys.modules if name.partition(".")[0] == "bireme"]:
    del sys.modules[name]
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("mps")
torch.accelerator.device_count = lambda: 1
import bireme.devices, bireme.runtime.pipeline, bireme.train.launched_process, bireme.cli.main
assert bireme.devices.num_accelerators() == 0
bireme.devices.synchronize(torch.device("cpu"))
assert bireme.devices.default_generator(torch.device("cpu")) is torch.default_generator
"""


@pytest.mark.slow
def test_an_accelerator_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    """On a Mac torch's accelerator is mps: nothing may ask it for anything when Bireme is imported."""
    done = run_script(OTHER, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_cluster_file_of_gpus_is_refused_on_cpus_unless_processes_stand_for_them() -> None:
    with pytest.raises(BiremeError, match=r"names 8 CUDA devices .*Set cluster.device to cpu"):
        machines_of(asked(source="one-server-of-8"), num_cuda=0, num_cores=8)
    found = machines_of(asked(source="one-server-of-8", device="cpu"), num_cuda=0, num_cores=8)
    assert (found.cluster.num_devices, found.device) == (8, "cpu")


def test_links_between_hosts_that_are_unknown_are_assumed_and_reported() -> None:
    found, note = cluster_of([Server("one", (T4,)), Server("two", (T4,))])
    assert found.bandwidth(0, 1) == 1.25e8
    assert found.latency(0, 1) == 5e-4
    assert "assumes 1 Gbit/s and 0.5 ms" in note
    assert "one, two" in link_notes(found)[0]


def test_a_run_on_a_device_that_nobody_has_tested_goes_over_sockets_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused."""
    gpu = Device("M9", "mps", 2**34)
    monkeypatch.setattr(machines, "num_accelerators", lambda kind: int(kind == "mps"))
    monkeypatch.setattr(machines, "server_here", lambda _device, count: Server("here", (gpu,) * count))
    machines._tell_untested.cache_clear()
    found = machines_of(asked(device="mps", workers=2), num_cuda=0, num_cores=2)

    assert (found.device, found.backend, found.cluster.num_devices) == ("mps", "gloo", 2)
    assert capsys.readouterr().err.count("Training on mps has not been tested") == 1
    with pytest.raises(BiremeError, match="there are 0 xpu devices for 2 processes"):
        machines_of(asked(device="xpu", workers=2), num_cuda=0, num_cores=2)
