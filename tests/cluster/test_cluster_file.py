"""`cluster.toml`: what is written is read back, and every mistake is one sentence."""

from pathlib import Path

import pytest
from hypothesis import given
from pydantic import BaseModel

from bireme.cluster.cluster import Cluster
from bireme.cluster.cluster_file import (
    DeviceTable,
    MeshTable,
    RouteTable,
    ServerTable,
    SwitchTable,
    cluster_hash,
    cluster_text,
    example_names,
    load_cluster,
    read_cluster,
    save_cluster,
)
from bireme.cluster.named_machines import machines_of
from bireme.errors import BiremeError
from tests.support.clusters import clusters
from tests.support.extent import examples

ROOT = Path(__file__).parents[2]
BOUNDED = examples(60)


@BOUNDED
@given(cluster=clusters())
def test_a_written_cluster_is_read_back_as_it_was(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("clusters") / "cluster.toml"
    save_cluster(cluster, path)
    again = read_cluster(path)
    assert again == cluster
    assert cluster_hash(again) == cluster_hash(cluster)


@pytest.mark.parametrize("name", example_names())
def test_every_example_is_loaded_by_name_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    assert cluster == load_cluster(str(ROOT / "examples" / "clusters" / f"{name}.toml"))
    save_cluster(cluster, tmp_path / "again.toml")
    assert read_cluster(tmp_path / "again.toml") == cluster


def test_the_examples_are_those_there_should_be() -> None:
    shapes = {
        name: [len(server.devices) for server in load_cluster(name).servers] for name in example_names()
    }
    assert shapes == {
        "one-server-of-8": [8],
        "two-unequal-servers": [4, 4],
        "four-servers-of-4": [4, 4, 4, 4],
        "laptop": [4],
        "emulated-8-equal": [8],
        "emulated-8-one-slow": [8],
        "emulated-two-servers": [4, 4],
        "emulated-two-memories": [8],
    }


def test_equal_servers_and_devices_are_written_once() -> None:
    text = cluster_text(load_cluster("four-servers-of-4"))
    assert text.count("[[server]]") == text.count("[[server.device]]") == 1
    assert text.count("count = 4") == 2
    assert "bytes_per_s = 1.2e9  # 9.6 Gbit/s" in text
    assert "latency_s = 2.5e-5  # 25 µs" in text


def test_a_hash_changes_with_the_cluster_and_not_with_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    text = (ROOT / "examples" / "clusters" / "laptop.toml").read_text()
    path.write_text("# more words\n" + text.replace("4e9\nduplex", "4000000000\nduplex"))
    assert cluster_hash(read_cluster(path)) == cluster_hash(load_cluster("laptop"))
    path.write_text(text.replace("latency_s = 30e-6", "latency_s = 31e-6"))
    assert cluster_hash(read_cluster(path)) != cluster_hash(load_cluster("laptop"))


def test_a_count_names_servers_by_their_place_or_after_their_name(tmp_path: Path) -> None:
    device = '[[server.device]]\nlike = "t4"\n[[server.card]]\nbytes_per_s = 1e9\n'
    path = tmp_path / "c.toml"
    path.write_text(
        f'[[server]]\ncount = 2\n{device}[[server]]\ncount = 2\nname = "old"\n{device}[[server]]\n{device}'
    )
    assert [server.name for server in read_cluster(path).servers] == [
        "server0",
        "server1",
        "old0",
        "old1",
        "server4",
    ]


SERVER = "[[server]]\n"
DEVICE = '[[server.device]]\nkind = "cpu"\nmemory_bytes = 1e9\n'

MISTAKES = [
    ("format = 2\n" + SERVER + DEVICE, "format is 2; it must be 1."),
    ("serve = 1\n", "unknown key 'serve'. Did you mean 'server'?"),
    ("", "lacks server (the servers: a table [[server]] for each; `bireme cluster discover"),
    ("server = []\n", "server is empty"),
    ("[server]\nname = 'x'\n", "two pairs of brackets, [[server]]."),
    (SERVER, "lacks server[0].device (its devices)."),
    (SERVER + "[server.device]\nkind = 'cpu'\n", "brackets, [[server.device]]."),
    (
        SERVER + DEVICE.replace("memory_bytes", "memory"),
        "'server[0].device[0].memory'. Did you mean 'memory_bytes'?",
    ),
    (
        SERVER + "[[server.device]]\nkind = 'cpu'\n",
        "server[0].device[0]: memory_bytes is missing (the memory",
    ),
    (SERVER + "[[server.device]]\nmemory_bytes = 1\n", "server[0].device[0]: kind is missing"),
    (
        SERVER + "[[server.device]]\nlike = 'a1000'\n",
        "like is 'a1000', which is not in the catalogue. Did you mean 'a100'?",
    ),
    (
        SERVER + DEVICE.replace("cpu", "tpu"),
        "server[0].device[0].kind is \"tpu\"; it must be 'cpu', 'cuda', 'xpu', 'mps' or",
    ),
    (SERVER + DEVICE + "speed = 0\n", "server[0].device[0].speed is 0; it must be greater than 0."),
    (
        SERVER + DEVICE + "count = 0\n",
        "server[0].device[0].count is 0; it must be greater than or equal to 1.",
    ),
    (SERVER + DEVICE + "count = 1.5\n", "server[0].device[0].count is 1.5; it must be a valid integer."),
    (
        SERVER + DEVICE.replace("1e9", "1.5"),
        "server[0].device[0].memory_bytes is 1.5; it must be a valid integer",
    ),
    (SERVER + DEVICE.replace("1e9", "inf"), "server[0].device[0].memory_bytes is Infinity"),
    (SERVER + DEVICE + "count = 60000\n[[server.device]]\nlike='t4'\ncount = 60000\n", "120000 devices"),
    (SERVER + "name = 'a/b'\n" + DEVICE, "server[0]: 'a/b' is not a name for a server"),
    (
        SERVER + DEVICE + "[[server.bridge]]\nlatency_s = 1\n",
        "lacks server[0].bridge[0].bytes_per_s (bytes a second",
    ),
    (
        SERVER + DEVICE + "[[server.bridge]]\nbytes_per_s = 1e9\ndevices = ['gpu0']\n",
        "bridge[0]: devices names 'gpu0'",
    ),
    (
        SERVER + DEVICE + "[[server.card]]\nbytes_per_s = '10 Gbit'\n",
        'card[0].bytes_per_s is "10 Gbit"; it must be a',
    ),
    (SERVER + DEVICE + "[[server.card]]\nbytes_per_s = 1e9\nduplex = 'both'\n", 'card[0].duplex is "both"'),
    (SERVER + DEVICE + "[[server.card]]\nbytes_per_s = 1e9\noverlap = 'half'\n", 'card[0].overlap is "half"'),
    (SERVER + DEVICE + "[[server.mesh]]\nbytes_per_s = 1e9\n", "server[0].mesh[0]: mesh0 joins 1 devices"),
    (SERVER + DEVICE + "[[server.card]]\nbytes_per_s = 1e9\nlatency_s = -1\n", "card[0].latency_s is -1"),
    (SERVER + DEVICE + SERVER + DEVICE, "server0/cpu0 is on no network card"),
    (
        SERVER + DEVICE + ("[[server.card]]\nbytes_per_s = 1e9\n" * 2),
        "server[0]: server0/cpu0 is on two cards",
    ),
    ("[switch]\nbytes_per_s = 0\n" + SERVER + DEVICE, "switch.bytes_per_s is 0; it must be greater than 0."),
    ("[switch]\nlatency = 0\n" + SERVER + DEVICE, "unknown key 'switch.latency'. Did you mean 'latency_s'?"),
    ("format = \n", "is not TOML: Invalid value (at line 1"),
    ("format = 1\nformat = 1\n", "is not TOML: Cannot overwrite a value (at line 2"),
]


@pytest.mark.parametrize(("text", "said"), MISTAKES)
def test_every_mistake_in_a_file_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(BiremeError) as caught:
        load_cluster(str(path))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert said in message
    assert message.endswith((".", "?"))
    assert "\n" not in message


def test_a_cluster_that_is_not_there_is_told_from_a_name_that_is_not() -> None:
    with pytest.raises(BiremeError, match=r"There is no file nowhere\.toml\."):
        load_cluster("nowhere.toml")
    with pytest.raises(BiremeError, match="Did you mean 'laptop'"):
        load_cluster("labtop")


def test_every_key_of_the_file_is_explained() -> None:
    text = (ROOT / "docs" / "cluster.md").read_text()
    tables: dict[str, type[BaseModel]] = {
        "server.device": DeviceTable,
        "server.mesh": MeshTable,
        "server": ServerTable,
        "switch": SwitchTable,
        "route": RouteTable,
    }
    keys = {key for table in tables.values() for key in table.model_fields}
    keys -= {"device", "bridge", "mesh", "card"}
    assert sorted(key for key in keys if f"`{key}`" not in text) == []
    assert all(f"[{table}]" in text for table in (*tables, "server.bridge", "server.card"))


@pytest.mark.parametrize(
    "text", ["2x rtx3090", "rtx3090:10GB", "rtx3090+64GB", "a100, t4 @ 1.25GB/s", "a100,t4"]
)
def test_a_cluster_can_be_machines_in_words(text: str, tmp_path: Path) -> None:
    found = load_cluster(text)
    assert found == machines_of(text).cluster()
    save_cluster(found, tmp_path / "again.toml")
    assert read_cluster(tmp_path / "again.toml") == found


def test_a_ready_cluster_comes_before_the_device_of_its_name() -> None:
    assert load_cluster("laptop") != machines_of("laptop").cluster()


@pytest.mark.parametrize("text", ["lab,home.toml", "2x.toml", "me@lab.toml"])
def test_a_missing_file_is_missing_and_no_machine(text: str) -> None:
    with pytest.raises(BiremeError, match=f"no file {text}"):
        load_cluster(text)
