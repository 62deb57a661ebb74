"""The engine's benchmark: what it says is complete and hangs together. Nothing here holds it to a time."""

import json
import sys
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from benchmarks.common import hosts
from benchmarks.common.verdicts import Cause, Spread, at_most, exactly
from benchmarks.engine_bench.effort import BenchEffort, BenchShape
from benchmarks.engine_bench.emulated import StagePace
from benchmarks.engine_bench.emulation import (
    SCHEDULES,
    EmulationRow,
    EngineOverhead,
    limit_s,
    own_cost,
    predicted_s,
)
from benchmarks.engine_bench.replicas import Replicas, measure_replicas
from benchmarks.engine_bench.report import (
    EngineReport,
    MemoryCounts,
    Overhead,
    OverheadTimes,
    bench_engine,
    overhead_of,
    verdicts,
)
from benchmarks.engine_bench.small_gpt import GptRow
from benchmarks.engine_bench.table import engine_document, print_engine_report
from bireme.cli.bench import run_program
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.simulate.network import Network
from bireme.simulate.simulator import pairs_that_talk, simulate
from tests.support.command import bireme

PACE = StagePace(0.010, 0.020)
TINY = BenchEffort(
    shapes=(BenchShape(2, 2),),
    pace=StagePace(0.001, 0.002),
    counted=1,
    rounds=1,
    overhead_microbatches=2,
    overhead_batches=1,
    overhead_rounds=1,
    buffers=(2, 8),
)
ONE = Spread(1.0, 1.0, 1.0)
FREE = EngineOverhead(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""An engine that takes no time itself."""


def row(schedule: str, measured_s: float, torch_s: float, shape: BenchShape) -> EmulationRow:
    measured, theirs = Spread.of([measured_s]), Spread.of([torch_s])
    return EmulationRow(
        schedule=schedule,
        stages=shape.num_ranks,
        microbatches=shape.num_microbatches,
        measured_s=measured,
        predicted_s=predicted_s(schedule, shape, PACE, FREE),
        limit_s=limit_s(schedule, shape, PACE),
        torch_s=theirs,
        torch_schedule="Schedule1F1B",
        lead=Spread.of([torch_s / measured_s]),
    )


def gpt(name: str, num_microbatches: int, over_1f1b: float) -> GptRow:
    return GptRow(name, num_microbatches, ONE, ONE, Spread.of([over_1f1b]), ONE)


def report(
    *rows: EmulationRow, share: float = 0.3, gpt: Sequence[GptRow] = (), replicas: Replicas | None = None
) -> EngineReport:
    return EngineReport(
        rows=rows,
        overhead=Overhead(ONE, {"Schedule1F1B": ONE}, "Schedule1F1B", Spread.of([share])),
        counts=MemoryCounts({4: 100, 16: 100}, {4: 400, 16: 1600}, 30, 40, 10),
        gpt=tuple(gpt),
        footprint=(),
        replicas=replicas,
    )


# --- what it measures --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
def test_a_small_run_compares_every_schedule_with_torch_and_the_limits() -> None:
    found = bench_engine(TINY)
    document = json.loads(json.dumps(engine_document(found)))
    assert [one["schedule"] for one in document["rows"]] == list(SCHEDULES)
    for one in document["rows"]:
        assert {"stages", "microbatches", "predicted_s", "limit_s", "torch_s", "torch_schedule"} <= one.keys()
        # Emulated devices keep their pace to the microsecond, so nothing beats the limit by more.
        assert one["measured_s"] > 0.99 * one["limit_s"]
        assert one["torch_s"] > 0
    assert document["verdicts"]
    assert all(verdict["ok"] or verdict["cause"] in ("machine", "bireme") for verdict in document["verdicts"])
    assert document["overhead_s"] > 0
    assert document["torch_overhead_s"] > 0
    ours, theirs = document["receive_buffer_bytes"], document["torch_receive_buffer_bytes"]
    assert ours["2"] == ours["8"]
    assert theirs["8"] == 4 * theirs["2"]
    assert document["extra_weight_copies"] == 1
    assert found.gpt == ()
    assert found.replicas is None


@pytest.mark.few(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", [BenchShape(4, 4), BenchShape(8, 16)], ids=str)
def test_limits_are_what_the_simulator_reaches_when_nothing_else_takes_time(
    schedule: str, shape: BenchShape
) -> None:
    assert predicted_s(schedule, shape, PACE, FREE) == pytest.approx(limit_s(schedule, shape, PACE))


@pytest.mark.parametrize("shape", [BenchShape(2, 2), BenchShape(4, 4), BenchShape(4, 8)], ids=str)
def test_what_the_engine_takes_is_read_off_a_timeline_that_has_it(shape: BenchShape) -> None:
    """From a simulated one, in which messages take nobody's time but are late."""
    given = EngineOverhead(0.0004, 0.0006, 0.0, 0.0, 0.003, 0.002)
    program = Plan(tuple(range(1, shape.num_ranks)), shape.num_microbatches, "1f1b").program(5)
    network = Network.dedicated(pairs_that_talk(program), latency_s=given.late_s)
    timeline = simulate(program, given.costs(shape.num_ranks, PACE), network)
    assert astuple(own_cost(timeline, PACE)) == pytest.approx(astuple(given), abs=1e-9)


def test_overhead_is_that_of_the_slower_rank_against_torch_s_best() -> None:
    names = ("1f1b", "slow peer", "fast peer")
    one = OverheadTimes(names, ((1.0, 1.0), (8.0, 9.0), (4.0, 2.0)))
    other = OverheadTimes(names, ((2.0, 1.0), (8.0, 8.0), (3.0, 5.0)))
    found = overhead_of(one, other)
    assert found.ours_s == Spread(1.5, 1.0, 2.0)
    assert found.best_peer == "fast peer"
    assert found.share == Spread(0.35, 0.2, 0.5)


# --- what it says ------------------------------------------------------------------------------------------


def test_every_claim_has_a_verdict() -> None:
    shape = BenchShape(8, 8)
    rows = row("2bw", 0.245, 0.49, shape), row("1f1b", 0.455, 0.49, shape)
    good = list(verdicts(report(*rows, gpt=[gpt("2bw", 4, 1.4), gpt("gpipe", 4, 0.5)])))
    assert all(verdict.ok for verdict in good)
    rows = row("2bw", 0.30, 0.45, shape), row("1f1b", 0.50, 0.45, shape)
    bad = list(verdicts(report(*rows, share=0.8, gpt=[gpt("2bw", 4, 1.3)])))
    assert len(bad) == len(good)
    unmet = {verdict.name: verdict.limit for verdict in bad if not verdict.ok}
    assert len(unmet) == 8  # receive buffers and weight copies are as they should be
    where = "8 stages, 8 micro-batches"
    assert unmet[f"2bw, {where}: share of the limit"] == 0.95
    assert unmet[f"2bw, {where}: times as fast as torch's 1F1B"] == 1.9
    assert unmet[f"1f1b, {where}: times the limit"] == 1.03
    assert unmet[f"1f1b, {where}: times as fast as torch's Schedule1F1B"] == 1.02
    assert unmet["overhead of a micro-batch / torch's"] == 0.3
    assert unmet["small GPT, 2bw, 4 micro-batches: times torch's Schedule1F1B"] == 1.35


def test_a_miss_is_the_machine_s_if_the_best_round_is_good_or_other_programs_ran_and_else_bireme_s() -> None:
    shape = BenchShape(4, 4)
    quick, slow = row("1f1b", 0.211, 0.30, shape), row("1f1b", 0.25, 0.25, shape)
    once = replace(slow, measured_s=Spread(0.25, 0.211, 0.26), lead=Spread(1.0, 0.9, 1.1))

    def causes(*rows: EmulationRow) -> set[Cause | None]:
        return {verdict.cause for verdict in verdicts(report(*rows))}

    assert causes(quick) == {None}
    assert causes(replace(slow, others_share=0.01)) == {None, Cause.BIREME}
    assert causes(replace(slow, others_share=0.90)) == {None, Cause.MACHINE}
    assert causes(replace(once, others_share=0.01)) == {None, Cause.MACHINE}
    assert exactly("messages", 5, 4).cause is Cause.BIREME
    assert at_most("seconds", 2.0, 1.5).cause is None, "nothing is known of the machine"


def test_the_tables_name_the_cause_of_each_miss(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    slow = row("2bw", 0.30, 0.45, BenchShape(4, 4))
    for one in (replace(slow, others_share=0.9), replace(slow, others_share=0.0)):
        print_engine_report(report(one), Console(width=120))
    busy, quiet = capsys.readouterr().out.split("Emulated devices")[1:]
    assert "(at least 0.93)\n  The machine: other programs had 90% of the cores.\n" in busy
    assert "2 of 2 ✗ are the machine's: repeat them when no other program runs." in busy
    assert "(at least 0.93)\n  Bireme: the best round has 0.4, other programs had 0% of the cores.\n" in quiet
    assert "are the machine's" not in quiet


def test_the_tables_show_all_that_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    skipped = Replicas(skipped="making network namespaces needs root")
    print_engine_report(
        report(row("2bw", 0.245, 0.49, BenchShape(8, 8)), replicas=skipped), Console(width=120)
    )
    out = capsys.readouterr().out
    assert "245.0" in out
    assert "2.00" in out
    assert "400 B" in out
    assert "left out, because making network namespaces needs root" in out


# --- the command -------------------------------------------------------------------------------------------


def test_the_command_runs_the_benchmark_beside_its_source_with_the_same_options_and_status(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("bireme.cli.bench.__file__", str(tmp_path / "src/bireme/cli/bench.py"))
    program = tmp_path / "benchmarks/engine.py"
    program.parent.mkdir()
    program.write_text("import json, sys\nprint(json.dumps({'words': sys.argv[1:]}))\nsys.exit(3)\n")
    found = bireme(capfd, "bench", "engine", "--json", "--quick", "--hosts")
    assert found.status == 3
    assert found.document == {"words": ["--quick", "--hosts", "--json"]}
    assert bireme(capfd, "bench", "engine").document == {"words": []}


@pytest.mark.slow
def test_the_command_finds_the_benchmark_of_this_checkout(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_program("simulator", ["--help"]) == 0
    assert "simulator.py" in capfd.readouterr().out


def test_an_installation_without_the_source_says_in_one_sentence_where_the_benchmarks_are(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("bireme.cli.bench.__file__", str(tmp_path / "site-packages/bireme/cli/bench.py"))
    found = bireme(capfd, "bench", "engine", "--quick")
    assert (found.status, found.out) == (2, "")
    assert found.err.count("\n") == 1
    assert "The benchmarks are in Bireme's source" in found.err
    assert "pip install -e ." in found.err


# --- what may be missing or wrong --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "words"),
    [("root", "needs root"), ("tools", "iproute2"), ("system", "another system")],
)
def test_without_what_hosts_need_the_reason_stands_in_their_place(
    monkeypatch: pytest.MonkeyPatch, why: str, words: str
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin" if why == "system" else "linux")
    monkeypatch.setattr("os.geteuid", lambda: 1000 if why == "root" else 0)
    monkeypatch.setattr("shutil.which", lambda _tool: None)
    found = measure_replicas()
    assert found.skipped is not None
    assert words in found.skipped
    assert found.rows == ()


def test_a_tool_that_fails_leaves_no_host_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []

    def run(*words: str) -> None:
        ran.append(words)
        if words[0] == "tc":
            raise hosts.NoHosts("`tc` fails: unknown qdisc")

    monkeypatch.setattr(hosts, "_check_here", lambda: None)
    monkeypatch.setattr(hosts, "_run", run)
    assert measure_replicas().skipped == "`tc` fails: unknown qdisc"
    added, deleted = (
        [words[3] for words in ran if words[:3] == ("ip", "netns", verb)] for verb in ("add", "delete")
    )
    assert len(added) == 3  # two hosts and their switch
    assert deleted == added


@pytest.mark.parametrize(
    ("shape", "words"), [((1, 4), "two devices"), ((8, 4), "as many micro-batches as devices")]
)
def test_a_shape_that_no_pipeline_has_is_refused(shape: tuple[int, int], words: str) -> None:
    with pytest.raises(BiremeError, match=words):
        BenchShape(*shape)


def test_an_effort_that_measures_nothing_is_refused() -> None:
    with pytest.raises(BiremeError, match="one batch and one round"):
        replace(TINY, rounds=0)


@pytest.mark.parametrize(
    "words", [("bench", "engin"), ("bench", "engine", "--fast"), ("bench", "engine", "4")]
)
def test_a_wrong_word_is_one_sentence(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    result = bireme(capsys, *words)
    assert result.status == 2
    assert result.out == ""
    assert "Traceback" not in result.err
