"""`bireme train` over several hosts, each with a network of its own: one run, wherever its ranks are.

Nothing here is about speed. Ranks that took the wrong network card would not find each other at all.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from bireme.cluster.cluster_file import read_cluster
from tests.support.hosts import enter_without, hosts
from tests.support.torchrun_runs import paced_run, torchrun_train
from tests.support.training import TEXT, Ended, losses, settings, write_run

pytestmark = pytest.mark.slow

PORT = "29400"
"""A host of these has all ports to itself."""

CLUSTER = """
format = 1

[[server]]
name = "host-1"

[[server.device]]
kind = "cpu"
memory_bytes = 1e9

[[server.card]]
bytes_per_s = 2.5e6
latency_s = 1e-4

[[server]]
name = "host-0"

[[server.device]]
kind = "cpu"
memory_bytes = 1e9

[[server.card]]
bytes_per_s = 1e9
latency_s = 1e-4
"""


def train_on(
    address: str, machines: Sequence[Callable[[], None]], run: Path, words: Sequence[str]
) -> list[Ended]:
    """Run torchrun on every host, with a rank each; what came of each. The first has that address."""
    master = ("--master-addr", address, "--master-port", PORT)
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                torchrun_train(
                    run,
                    *words,
                    ranks=1,
                    options=("--nnodes", str(len(machines)), "--node-rank", str(number), *master),
                    first=enter,
                )
            )
            for number, enter in enumerate(machines)
        ]
        return [one.ended() for one in started]


def planned(**values: object) -> list[str]:
    """A run that is planned for what there is, and not by hand."""
    return settings(plan__file="", plan__schedule="1f1b", plan__microbatches=2, cluster__workers="", **values)


def test_two_hosts_train_one_model_over_a_slow_link(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    words = [str(paced_run(tmp_path)), "--json", *planned()]
    with hosts(2, slow=1) as machines:
        first, second = train_on(machines[0].address, [host.enter for host in machines], run, words)

    document = first.document
    assert document["steps"] == 12
    assert [stage["device"] for stage in document["stages"]] == ["host-0/cpu0", "host-1/cpu0"]
    assert first.err.count("The links of 2 of 2 machines are unknown") == 1
    assert "Lines between hosts are encrypted. Set one BIREME_KEY" in first.err
    assert (second.status, second.out) == (0, "")
    # Torch warns that these addresses have no names, and, with a trace, if the first host's store ends first.
    trace = r"Exception raised from |frame #\d+: |<omitting python frames>"
    launcher = r"E\d{4} \S+ \d+ \S*torch/distributed/elastic/"
    torch_warns = rf"(\[rank\d\]:)?\[W|{trace}|{launcher}"
    lines = second.err.splitlines()
    assert not [line for line in lines if line and not re.match(torch_warns, line)]
    of_launcher = [line for line in lines if re.match(launcher, line)]
    assert not of_launcher or "Error waiting on exit barrier" in of_launcher[0]
    assert sorted(losses(run)) == list(range(1, 13))
    assert [server.name for server in read_cluster(run / "cluster.toml").servers] == ["host-0", "host-1"]


def test_a_plan_puts_its_stages_on_the_hosts_that_it_names(tmp_path: Path) -> None:
    """The cluster names the second host first, and so does the plan: that host is the one with stage 0.

    So it stays when updates begin to be delayed.
    """
    run = tmp_path / "runs" / "run"
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    source = settings(
        cluster__source=tmp_path / "cluster.toml",
        plan__depth=2,
        plan__schedule="2bw",
        plan__delay_warmup_fraction=0.5,
    )
    words = [str(paced_run(tmp_path)), "--json", *planned(), *source]
    with hosts(2, slow=1) as machines:
        first, second = train_on(machines[0].address, [host.enter for host in machines], run, words)

    devices = [stage["device"] for stage in first.document["stages"]]
    assert set(devices) == {"host-0/cpu0", "host-1/cpu0"}
    speaks, silent = (second, first) if devices[0] == "host-1/cpu0" else (first, second)
    assert speaks.err.count("step 12/12  loss") == 1
    assert "step  6/12  switches to 2bw; updates are delayed from here" in speaks.err
    assert "step 12/12  loss" not in silent.err


def test_hosts_that_share_no_folder_train_one_model(tmp_path: Path) -> None:
    """Each has its own at the same path, and the second one has no data: it fetches them."""
    run, data = tmp_path / "runs" / "run", tmp_path / "data"
    run.parent.mkdir()
    (data / "texts").mkdir(parents=True)
    (data / "texts" / "numbers.py").write_text(TEXT)
    words = [str(write_run(tmp_path)), "--json"]
    words += settings(cluster__workers="", data__source=data / "texts")
    with hosts(2) as (first, second):
        told = train_on(
            first.address, [first.enter, partial(enter_without, second, run.parent, data)], run, words
        )

    assert [one.status for one in told] == [0, 0], told
    assert told[0].document["steps"] == 12
    assert {"rank-0000.safetensors", "rank-0001.safetensors"} <= {
        path.name for path in (run / "checkpoints" / "step-00000012").iterdir()
    }
