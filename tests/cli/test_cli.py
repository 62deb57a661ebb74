"""The command line as a stranger meets it: right words give a result, wrong ones a sentence and status 2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bireme.cli.main import SUMMARIES, Verbs, main
from bireme.schedule.catalogue import SCHEDULES
from tests.support.command import bireme, with_sets
from tests.support.patience import patience_s

Capture = pytest.CaptureFixture[str]

SIMULATE = with_sets(
    "plan.depth=8 plan.microbatches=8 --batches 10 --forward-s 0.01 --backward-s 0.02 --json".split()
)


# --- the package -------------------------------------------------------------------------------------------


HELP = """
import sys
sys.argv = ["bireme", "--help"]
from bireme.cli.main import main
try:
    main()
except SystemExit:
    pass
print("loaded:", *sorted({"torch", "numpy", "pydantic", "rich", "bireme.cli.train"} & set(sys.modules)))
"""


def test_help_comes_at_once_for_it_loads_no_verb_and_nothing_large() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, check=True, timeout=patience_s()
    )
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert all(summary.split()[0] in done.stdout for summary in SUMMARIES.values())


READ = """
import sys
from bireme.train.folder import load_asked
load_asked(None, ["sync.mode=quorum"])
print("loaded:", *sorted({"torch", "numpy"} & set(sys.modules)))
"""


def test_to_read_a_run_file_loads_nothing_large() -> None:
    """It loaded numpy with its threads, so a launcher could not become the server of its ranks: another new
    Python imported all that the launcher had imported, and each rank imported the rest.
    """
    done = subprocess.run(
        [sys.executable, "-c", READ], capture_output=True, text=True, check=True, timeout=patience_s()
    )
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_torch_prints_its_errors_only_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """It warned on every start over hosts that addresses have no names."""
    monkeypatch.setattr(sys, "argv", ["bireme", "--version"])
    for given, expected in ((None, "ERROR"), ("INFO", "INFO")):
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", given or "")
        if given is None:
            monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
        with pytest.raises(SystemExit):
            main()
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == expected


@pytest.mark.parametrize(
    "words",
    [*SUMMARIES, "cluster discover", "cluster show", "cluster probe", "bench engine"],
)
def test_help_is_readable_in_80_columns(words: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of --objective were once broken over lines, and left 19 characters for its help."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = bireme(capsys, *words.split(), "--help").out
    assert max(map(len, shown.splitlines())) <= 80
    known = set(shown.split())
    command = Verbs().get_command(None, words.split()[0])
    for word in words.split()[1:]:
        command = command.commands[word]
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        given = parameter.metavar or ""
        assert {*given.split()} <= known, f"{given} is broken over lines"
        assert {",".join(name for name in parameter.opts if name.startswith("--"))} <= {*known, ""}
    begins = [len(found[1]) for found in re.finditer(r"^│( {12,})\S", shown, re.MULTILINE)]
    assert max(begins, default=0) <= 54, "less than 24 characters are left for help"


def test_the_help_of_all_says_of_each_verb_what_its_own_help_says() -> None:
    group = Verbs(name="bireme")
    for name, summary in SUMMARIES.items():
        assert group.get_command(None, name).help.split("\n\n")[0] == summary, name


def test_the_installed_command_answers() -> None:
    command = Path(sys.executable).with_name("bireme")
    done = subprocess.run(
        [command, "--version"], capture_output=True, text=True, check=True, timeout=patience_s()
    )
    assert done.stdout.startswith("bireme 0.")


def test_a_bug_gives_a_traceback_and_status_1(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bireme.schedule.catalogue.generate", lambda *_, **__: 1 / 0)
    result = bireme(capsys, "schedule", "1f1b")
    assert result.status == 1
    assert "ZeroDivisionError" in result.err
    assert "bug in Bireme" in result.err


def test_an_interrupt_that_a_library_wraps_and_a_name_that_is_not_utf_8_are_no_bugs(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> None:
        "folder = runs/K\udce4se".encode()

    def wrap(*_: object, **__: object) -> None:
        raise TypeError("SchemaError: KeyboardInterrupt: ")

    monkeypatch.setattr("bireme.schedule.catalogue.generate", encode)
    result = bireme(capsys, "schedule", "2bw")
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert "runs/K\\udce4" in result.err
    monkeypatch.setattr("bireme.schedule.catalogue.generate", wrap)
    result = bireme(capsys, "schedule", "2bw")
    assert (result.status, result.err) == (130, "")

    def fail(*_: object, **__: object) -> None:
        raise ValueError(len(KeyboardInterrupt.__mro__))

    monkeypatch.setattr("bireme.schedule.catalogue.generate", fail)
    result = bireme(capsys, "schedule", "2bw")
    assert (result.status, "This is a bug" in result.err) == (1, True), "a line of code that names it is none"


def test_a_path_that_no_file_can_have_is_a_sentence(capsys: Capture) -> None:
    result = bireme(capsys, "report", "a" * 300)
    assert result.status == 2
    assert result.err.startswith("bireme: aaa")
    assert "cannot be used: " in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.slow
def test_a_reader_that_goes_away_gets_no_traceback() -> None:
    command = Path(sys.executable).with_name("bireme")
    line = f"{command} schedule 2bw --stages 16 --microbatches 64 --batches 50 --json | head -c 10"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=True, timeout=patience_s()
    )
    assert done.stderr == ""


# --- schedule ----------------------------------------------------------------------------------------------


def test_all_schedules_are_listed(capsys: Capture) -> None:
    assert [s["name"] for s in bireme(capsys, "schedule", "--json").document["schedules"]] == list(SCHEDULES)
    assert all(name in bireme(capsys, "schedule").out for name in SCHEDULES)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_is_drawn_and_proved(capsys: Capture, name: str) -> None:
    words = ["schedule", name, "--stages", "4", "--microbatches", "4", "--batches", "3", "--check"]
    assert bireme(capsys, *words).status == 0
    document = bireme(capsys, *words, "--json").document
    assert (document["ok"], document["problems"], document["deadlock"]) == (True, [], None)
    assert document["num_batches"] == 3


def test_a_schedule_goes_to_torchs_format_and_back(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "s.csv"
    assert bireme(capsys, "schedule", "zb-h1", "--stages", "3", "-m", "5", "--csv", str(file)).status == 0
    document = bireme(capsys, "schedule", "--from", str(file), "--check", "--json").document
    assert document["ok"]
    assert (document["num_stages"], document["num_microbatches"]) == (3, 5)
    simulated = bireme(capsys, "simulate", "--from", str(file), "--batches", "4", "--json").document
    assert simulated["num_batches"] == 4
    words = "simulate plan.schedule=zb-h1 plan.depth=3 plan.microbatches=5 -n 4 --forward-s 1 --json"
    named = bireme(capsys, *with_sets(words.split())).document
    assert simulated["makespan_s"] == named["makespan_s"]


def test_a_file_that_lacks_a_receive_is_told_so_in_one_sentence(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "lacks.csv"
    file.write_text("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n")
    result = bireme(capsys, "schedule", "--from", str(file), "--check", "--json")
    assert result.status == 2
    assert not result.document["ok"]
    assert "Rank 1 runs 1F0" in result.document["problems"][0]
    assert "post 1RECV_F0 before it" in result.err
    assert bireme(capsys, "simulate", "--from", str(file)).status == 2


def test_a_deadlock_is_shown_as_the_circle_it_is(capsys: Capture, tmp_path: Path) -> None:
    """Both ranks send before they post what the other one's send waits for."""
    file = tmp_path / "deadlock.csv"
    file.write_text(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    result = bireme(capsys, "schedule", "--from", str(file), "--check", "--json")
    assert result.status == 2
    cycle = result.document["deadlock"]
    assert [wait.split(" waits at ")[0] for wait in cycle] == ["rank 0", "rank 1"]
    assert not result.document["deadlock_if_buffered"]
    assert "deadlocks" in result.err


def test_a_deadlock_that_buffers_do_not_help_is_told_from_one_they_do(
    capsys: Capture, tmp_path: Path
) -> None:
    """Rank 0 wants its first gradient before it goes on, rank 1 the second activation before it gives it."""
    file = tmp_path / "hard.csv"
    first = "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1"
    file.write_text(f"{first}\n1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n")
    document = bireme(capsys, "schedule", "--from", str(file), "--check", "--json").document
    assert len(document["deadlock"]) == 2
    assert document["deadlock_if_buffered"]


def test_ranks_that_wait_for_each_other_in_a_file_without_messages_are_shown(
    capsys: Capture, tmp_path: Path
) -> None:
    file = tmp_path / "circle.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    result = bireme(capsys, "schedule", "--from", str(file), "--check", "--json")
    assert result.status == 2
    assert not result.document["ok"]
    assert [wait.split(" waits at ")[0] for wait in result.document["deadlock"]] == ["rank 0", "rank 1"]


def test_a_file_may_begin_with_a_byte_order_mark(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "mark.csv"
    file.write_bytes("\ufeff0F0,0B0\r\n1F0,1B0\r\n".encode())
    assert bireme(capsys, "schedule", "--from", str(file), "--check").status == 0


def test_a_path_with_brackets_is_printed_as_it_is(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "p[old].csv"
    assert str(file) in bireme(capsys, "schedule", "1f1b", "--csv", str(file)).out


@pytest.mark.slow
def test_a_terminal_that_lacks_a_letter_still_gets_the_rest() -> None:
    command = Path(sys.executable).with_name("bireme")
    line = f"PYTHONIOENCODING=ascii {command} schedule 2bw --check"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=True, timeout=patience_s()
    )
    assert "every message matched" in " ".join(done.stdout.split())


# --- simulate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "steady_s", "versions", "stashed"),
    [("2bw", 0.240, 2, (8, 1)), ("1f1b", 0.450, 1, (8, 1)), ("gpipe", 0.450, 1, (8, 8))],
)
def test_the_steady_time_and_what_is_kept(
    capsys: Capture, name: str, steady_s: float, versions: int, stashed: tuple[int, int]
) -> None:
    document = bireme(capsys, "simulate", "--set", f"plan.schedule={name}", *SIMULATE).document
    assert document["steady_batch_s"] == pytest.approx(steady_s, abs=1e-9)
    ranks = document["ranks"]
    assert max(rank["weight_versions"] for rank in ranks) == versions
    assert (ranks[0]["peak_stashed_microbatches"], ranks[-1]["peak_stashed_microbatches"]) == stashed
    assert all(rank["busy_s"] == pytest.approx(2.4) for rank in ranks)
    assert {"makespan_s", "bubble_fraction"} <= document.keys()
    assert {"rank", "peak_bytes", "receive_buffers"} <= ranks[0].keys()


def test_costs_come_from_a_file(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"format": 1, "forward_s": [1, 2], "backward_s": 3, "weight_bytes": [10, 20]}))
    words = with_sets("simulate plan.schedule=2bw plan.depth=2 plan.microbatches=4 --costs".split())
    words.append(str(file))
    document = bireme(capsys, *words, "--json").document
    assert document["steady_batch_s"] == 4 * 5
    assert document["ranks"][1]["at_peak_bytes"]["weights"] == 40
    assert "20 s a batch" in bireme(capsys, *words).out


def steady_s(capsys: Capture, *words: str) -> float:
    return float(bireme(capsys, "simulate", *with_sets(words), "--json").document["steady_batch_s"])


def test_links_are_as_the_options_say(capsys: Capture) -> None:
    shape = "plan.schedule=2bw plan.depth=2 plan.microbatches=4 --backward-s 1"
    slow = f"{shape} --message-bytes 3 --link-bytes-per-s 1".split()
    assert steady_s(capsys, *slow, "--half-duplex") > steady_s(capsys, *slow)
    assert steady_s(capsys, *slow, "--ranks-per-server", "2") == 4 * 2
    fast = f"{shape} --message-bytes 1 --link-bytes-per-s 10 --lookahead 2".split()
    assert steady_s(capsys, *fast, "--link-overlap", "receiver") > steady_s(capsys, *fast)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("plan --batch-size 8", "training.batch_size"),
        ("train --lr 1e-3", "training.learning_rate"),
        ("simulate --depth 3", "plan.depth"),
        ("coordinate --codec int8", "links.codec' or 'sync.codec"),
    ],
)
def test_an_option_that_is_a_key_of_the_run_file_is_refused_with_the_key(
    capsys: Capture, words: str, key: str
) -> None:
    verb, option, _ = words.split()
    found = bireme(capsys, *words.split())
    assert (found.status, found.out) == (2, "")
    assert f"bireme {verb}` has no option {option}. Did you mean '{key}'? Set a key by" in found.err


def test_an_overlap_that_there_is_not_is_refused(capsys: Capture) -> None:
    unknown = bireme(
        capsys, *with_sets("simulate plan.schedule=1f1b --forward-s 1 --link-overlap both".split())
    )
    assert unknown.status == 2
    assert "There is no overlap 'both'" in unknown.err


def test_recomputing_takes_a_forward_more_and_keeps_inputs_only(capsys: Capture) -> None:
    words = "plan.schedule=2bw plan.depth=4 plan.microbatches=4 --stash-bytes 100".split()
    assert steady_s(capsys, *words) == 4 * 3
    words.append("plan.recompute=always")
    assert steady_s(capsys, *words) == 4 * 4
    ranks = bireme(capsys, "simulate", *with_sets(words), "--json").document["ranks"]
    assert [rank["at_peak_bytes"]["activations"] for rank in ranks] == [100] * 4


@pytest.mark.slow
def test_the_advice_is_for_the_run_that_was_asked_for(capsys: Capture) -> None:
    shape = "plan.schedule=2bw plan.depth=4 plan.microbatches=8"
    words = f"{shape} --message-bytes 1 --link-bytes-per-s 2 --reduce-s 3".split()
    for more in ([], ["plan.recompute=always"], ["--no-overlap-reduce"]):
        advice = bireme(capsys, "simulate", *with_sets([*words, *more]), "--json").document["advice"]
        found = steady_s(capsys, *words, *more, "--lookahead", str(advice["lookahead"]))
        assert advice["steady_batch_s"] == pytest.approx(found)
    assert "With --lookahead" in bireme(capsys, "simulate", *with_sets(words)).out


@pytest.mark.slow
def test_the_number_of_slices_is_shown(capsys: Capture) -> None:
    words = with_sets("plan.schedule=1f1b-sliced plan.depth=8 plan.microbatches=16 --forward-s 1".split())
    assert bireme(capsys, "simulate", *words, "--json").document["num_sliced"] == 2
    assert "2 micro-batches sliced" in " ".join(bireme(capsys, "simulate", *words).out.split())


@pytest.mark.slow
def test_no_schedule_beats_the_slowest_device(capsys: Capture, tmp_path: Path) -> None:
    """Each device keeps its own work, however many stages it is cut into."""
    file = tmp_path / "costs.json"
    file.write_text('{"forward_s": [1, 2, 3, 1], "backward_s": 4, "rank_speed": [1, 1, 0.5, 1]}')
    words = ["simulate", "--compare", "plan.depth=4", "plan.microbatches=8", "--costs", str(file), "--json"]
    rows = bireme(capsys, *with_sets(words)).document["comparison"]
    assert min(row["steady_batch_s"] for row in rows) == pytest.approx(8 * (3 + 4) / 0.5)


def test_all_schedules_are_compared_on_the_same_devices(capsys: Capture) -> None:
    words = with_sets(["simulate", "--compare", "plan.depth=4", "plan.microbatches=3"])
    rows = {row["schedule"]: row for row in bireme(capsys, *words, "--json").document["comparison"]}
    assert list(rows) == list(SCHEDULES)
    assert "Use 4 or more micro-batches" in rows["2bw"]["refused"]
    assert rows["1f1b"]["refused"] is None
    assert rows["interleaved"]["steady_batch_s"] < rows["1f1b"]["steady_batch_s"]
    assert "2bw is left out" in bireme(capsys, *words).out


def test_a_trace_and_a_picture_are_written(capsys: Capture, tmp_path: Path) -> None:
    trace, picture = tmp_path / "t.json", tmp_path / "p.svg"
    words = with_sets(["simulate", "plan.schedule=1f1b", "--forward-s", "1"])
    words += ["--trace", str(trace), "--picture", str(picture)]
    assert f"Wrote {trace}" in bireme(capsys, *words).out.replace("\n", "")
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_text().startswith("<svg")


# --- wrong input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("schedule 2bw --stages 4 --microbatches 3", "there are 3 for 4 stages"),
        ("schedule 2bw-fresh --stages 4 --microbatches 3", "there are 3 for 4 stages"),
        ("schedule 1f1b --stages 0", "at least one stage, not 0"),
        ("simulate --compare plan.depth=0", "plan.depth is 0; it must be greater than or equal to 1"),
        ("schedule 1f1b --microbatches 0", "at least one micro-batch, not 0"),
        ("schedule 1f1b --batches -1", "at least one batch, not -1"),
        ("schedule 2bw-frsh", "no schedule '2bw-frsh'. Did you mean '2bw-fresh'?"),
        ("schedule zbv --stages 5", "5 stages cannot be divided evenly, 2 per rank"),
        ("schedule zbv --stages 6 --stages-per-rank 3", "not 3. Use interleaved"),
        ("schedule pipedream --stages-per-rank 2", "one stage on each rank, not 2"),
        ("schedule 1f1b --slices 2", "slices no micro-batches"),
        ("schedule 1f1b-sliced --slices 9", "9 micro-batches cannot be sliced"),
        ("schedule 2bw --csv x.csv", "neither weight versions nor updates"),
        ("schedule 1f1b-sliced --csv x.csv", "slices micro-batch 0 in halves"),
        ("schedule --from nowhere.csv", "no schedule file nowhere.csv"),
        ("schedule 1f1b --from nowhere.csv", "Name a schedule, or give a file"),
        ("simulate --forward-s 1", "Name a schedule, such as --set plan.schedule=2bw, or give a file"),
        (
            "simulate plan.schedule=1f1b --forward-s -1",
            "forward_s is -1.0; it must be greater than or equal to 0",
        ),
        ("simulate plan.schedule=1f1b --forward-s nan", "forward_s is NaN; it must be a finite number"),
        ("simulate plan.schedule=1f1b --forward-s 1 --link-bytes-per-s 0", "link_bytes_per_s is 0.0"),
        ("simulate plan.schedule=1f1b --costs none.json", "no file none.json"),
        ("simulate plan.schedule=1f1b --costs none.json --forward-s 1", "leave out --forward-s"),
        ("simulate plan.schedule=1f1b --forward-s 1 --picture x.gif", ".svg"),
        ("simulate --compare plan.schedule=1f1b", "leave out plan.schedule"),
        ("simulate --compare --lookahead 1 --slices 2", "leave out --slices, --lookahead"),
        ("simulate --compare --batches 0", "at least one batch, not 0"),
        ("simulate plan.schedule=1f1b --costs none.json --weight-bytes 3", "leave out --weight-bytes"),
        ("schedule --from x.csv --stages 4", "leave out --stages"),
        ("simulate --from x.csv plan.recompute=always", "leave out plan.recompute"),
        ("schedule --check", "leave out --check"),
        ("schedule 1f1b --stages abc", "Invalid value for '--stages' / '-d'"),
        ("schedule 1f1b --stages abc", "'abc' should be a valid integer."),
        ("export x --to y --format no", "'--format': 'no' is not one of 'safetensors', 'dcp'. See"),
        ("simulate --colour", "No such option"),
        ("frobnicate", "No such command 'frobnicate'"),
        ("schedule 1f1b --comms", "leave out --comms"),
        ("schedule 1f1b --microbatches 99999999999", "the most is 1,000,000"),
        ("schedule 1f1b --batches 99999999999", "the most is 10,000,000. Ask for fewer batches."),
        (
            "simulate plan.schedule=1f1b --forward-s 1e300",
            "it must be less than or equal to 1000000000000000",
        ),
        ("simulate plan.schedule=1f1b --trace /nowhere/x.json", "no folder /nowhere"),
        ("train --steps 0", "bireme: --steps 0: training.steps is 0; it must be greater than or equal to 1"),
        ("train --name a/b", "bireme: --name a/b: log.name is"),
        ("bench engin", "No such command 'engin'. Did you mean 'engine'? See `"),
    ],
)
def test_wrong_words_get_one_sentence_and_status_2(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = bireme(capsys, *with_sets(words.split()))
    assert result.status == 2
    assert sentence in result.err
    assert result.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"forward_s": 1}', "lacks backward_s (seconds of a micro-batch's backward, per stage)"),
        ('{"forward_s": 1, "backward_s": -2}', "backward_s is -2; it must be greater than or equal to 0"),
        (
            '{"forward_s": 1, "backward_s": [1, -2]}',
            "backward_s[1] is -2; it must be greater than or equal to 0",
        ),
        ('{"forward_s": 1, "backward_s": [1, null]}', "backward_s[1] is null; it must be a valid number"),
        ('{"forward_s": 1, "backward_s": "2"}', 'backward_s is "2"; it must be a valid number'),
        ('{"forward_s": 1, "backward_s": [1, 2, 3]}', "backward_s has 3 values for 2 stages"),
        (
            '{"forward_s": 1, "backwards_s": 2}',
            "has an unknown key 'backwards_s'. Did you mean 'backward_s'?",
        ),
        ('{"forward_s": 1, "backward_s": NaN}', "backward_s is NaN; it must be a finite number"),
        ('{"forward_s": 1, "backward_s": 1, "format": 2}', "format is 2; it must be 1"),
        (
            '{"forward_s": 1, "backward_s": 1, "rank_speed": [1, 0]}',
            "rank_speed[1] is 0; it must be greater than 0",
        ),
        ('{"forward_s": 1, "forward_s": 2, "backward_s": 1}', "The key 'forward_s' is there twice"),
        ('{"forward_s": 1, "backward_s": 1, "master_weights": "yes"}', 'master_weights is "yes"'),
        ("[" * 100_000, "is not JSON that can be read"),
        ('{"forward_s": 1,', "is not JSON"),
        ("[1, 2]", "must hold one JSON object, not [1, 2]"),
        ("\xff", "is not a text in UTF-8: byte 1 is 0xff"),
    ],
)
def test_a_wrong_costs_file_gets_one_sentence_and_status_2(
    capsys: Capture, tmp_path: Path, text: str, sentence: str
) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(text.encode("latin-1"))
    words = ["simulate", "plan.schedule=1f1b", "plan.depth=2", "--costs", str(file)]
    result = bireme(capsys, *with_sets(words))
    assert result.status == 2
    assert sentence in result.err
    assert result.err.count("\n") == 1
