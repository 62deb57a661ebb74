"""`bireme cluster probe`: real processes measured over gloo, and what is refused before any is started."""

import errno
import json
import os
from pathlib import Path

import pytest
from torch import Tensor

from bireme.cluster.cluster_file import read_cluster
from bireme.errors import BiremeError
from bireme.memory.disk_tier import DiskTier
from bireme.runtime.measuring import probe
from bireme.runtime.measuring.probe import ProbeSetting, probe_here
from tests.support.command import bireme
from tests.support.copies import Copy
from tests.support.patience import patience_s
from tests.support.ranks import torchrun

TINY = "gpt:layers=1,width=16,heads=2,vocab=32,context=8"
Capture = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_processes_of_this_machine_are_probed(tmp_path: Path) -> None:
    found = probe_here(2, ProbeSetting(model=TINY, seconds=0.3, disk=tmp_path))
    told = found.measurements
    assert len(set(told.hosts)) == 1
    assert {one.flows for one in told.experiments} == {((0, 1),), ((1, 0),), ((0, 1), (1, 0))}
    cluster = found.inferred.cluster
    assert cluster.num_devices == 2
    assert cluster.devices()[0].device.speed == 1.0
    assert cluster.devices()[1].device.speed > 0
    for pair in ((0, 1), (1, 0)):
        # The most that was seen on a way is at least what a flow alone had, or near it where ways are alike.
        assert cluster.bandwidth(*pair) > 0.3 * told.alone(*pair)
        assert cluster.latency(*pair) == pytest.approx(told.latency_s[pair], rel=0.2)
    assert [one.num_devices for one in told.all_reduces] == [2]
    assert all(one.seconds > 0 for one in told.all_reduces)
    (server,) = cluster.servers
    assert server.disk_bytes > 0
    assert server.disk_bytes_per_s > 0
    assert all(device.host_bytes_per_s > 0 for device in server.devices)
    assert not list(tmp_path.iterdir())


def test_a_disk_is_as_fast_as_for_slots_that_were_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run writes to each slot again and again; only the first time the file system must find it room."""
    now_s, written = 0.0, set[int]()

    def write(_tier: DiskTier, slot: int, _data: Tensor) -> None:
        nonlocal now_s
        now_s += 0.002 if slot in written else 0.1
        written.add(slot)

    def read(_tier: DiskTier, _slot: int, _into: Tensor) -> None:
        nonlocal now_s
        now_s += 0.006

    monkeypatch.setattr(DiskTier, "write", write)
    monkeypatch.setattr(DiskTier, "read", read)
    monkeypatch.setattr(probe, "perf_counter", lambda: now_s)
    assert probe.measured_disk_bytes_per_s(tmp_path) == pytest.approx(2 * 4 * 2**20 / 0.008, rel=0.01)


def test_a_disk_that_cannot_be_measured_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_given: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("bireme.memory.disk_tier.os.pwritev", fail)
    with pytest.raises(BiremeError, match=r"The disk of .* cannot be measured: Input/output error\.$"):
        probe.measured_disk_bytes_per_s(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_probe_under_torchrun_writes_one_cluster(tmp_path: Path) -> None:
    output = tmp_path / "cluster.toml"
    words = ["cluster", "probe", "--model", TINY, "--seconds", "0.3", "--output", str(output), "--json"]
    process = Copy([*torchrun(2), "-m", "bireme", *words, "--device", "cpu"], tmp_path)
    try:
        out, errors = process.communicate(timeout=patience_s())
    finally:
        process.close()
    assert process.returncode == 0, errors
    document = json.loads(out)
    assert document["num_devices"] == 2
    assert len(document["pairs"]) == 2
    assert read_cluster(output).num_devices == 2


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--output", "cluster.yaml"), "must end in .toml"),
        (("--output", "no/such/folder/cluster.toml"), "there is no folder"),
        (("--model", "gpt:layers=none"), "whole number"),
        (("--processes", "0"), "it takes 1 to"),
        (("--seconds", "-1"), "it must be 0.1 to"),
        (("--batch", "0"), "at least 1"),
        (("--disk", "no/such/folder"), "which is not a folder"),
        (("--device", "tpu"), "cpu or cuda"),
    ],
)
def test_wrong_input_is_one_sentence(capsys: Capture, words: tuple[str, ...], part: str) -> None:
    result = bireme(capsys, "cluster", "probe", *words)
    assert result.status == 2
    assert result.out == ""
    assert part in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_processes_are_torchruns_matter_under_torchrun(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    result = bireme(capsys, "cluster", "probe", "--processes", "2")
    assert result.status == 2
    assert "leave out --processes" in result.err
    monkeypatch.setenv("RANK", "1")
    result = bireme(capsys, "cluster", "probe", "--processes", "2")
    assert (result.status, result.err) == (2, "")


def test_a_setting_is_checked() -> None:
    with pytest.raises(BiremeError, match="it must be"):
        ProbeSetting(seconds=0.0)
