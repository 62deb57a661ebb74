"""`bireme fit`: whether models fit machines, their rate, what helps, and which input is refused."""

import math
import re
from pathlib import Path

import pytest

from bireme.cluster.catalogue import catalogue
from bireme.cluster.named_machines import machines_of
from bireme.model.shapes import shape_of
from bireme.plan.fit import HOST_BYTES, LINK_SHARES, SHARED_LINK_SHARES, Fit, FitQuestion, fit
from bireme.profile.shape_profile import TrainedShare
from tests.support.command import bireme

Capture = pytest.CaptureFixture[str]


def answer(model: str, machines: str, *, train: str = "full", batch: int = 2, within_s: float = 0.0) -> Fit:
    question = FitQuestion(shape_of(model), machines_of(machines), TrainedShare(train), 512, batch)
    return fit(question, within_s=within_s)


def test_the_rate_of_one_device_is_what_one_counts_by_hand() -> None:
    (row,) = answer("gpt2-large", "rtx3090", batch=32).rows
    shape, device = shape_of("gpt2-large"), catalogue()["rtx3090"]
    mapped = shape.num_parameters - shape.context * shape.width  # the tied table is the head's matrix
    operations = 6 * mapped + 12 * shape.layers * 512 * shape.width
    assert row.tokens_per_s is not None
    for share, rate in zip(device.attained, (row.tokens_per_s.low, row.tokens_per_s.high), strict=True):
        by_hand = share * device.rate("bfloat16") / operations
        assert 0.9 * by_hand < rate <= by_hand, "an optimizer step and the embedding take the rest"
    assert row.tokens_per_s.low < row.tokens_per_s.likely < row.tokens_per_s.high


def test_what_is_left_is_what_the_device_could_lack() -> None:
    (row,) = answer("gpt2", "rtx3060:8GiB", batch=1).rows
    assert row.candidate is not None
    assert 0 < row.left_bytes < row.limit_bytes
    enough = math.ceil(row.limit_bytes - row.left_bytes)
    (least,) = answer("gpt2", f"rtx3060:{enough}", batch=1).rows
    assert least.candidate is not None
    assert least.left_bytes == pytest.approx(0, abs=1)
    (short,) = answer("gpt2", f"rtx3060:{enough - 1000}", batch=1).rows
    assert not short.fits
    assert short.left_bytes == pytest.approx(-1000, abs=1)


def test_each_machine_is_answered_by_itself_once_and_then_all_together() -> None:
    found = answer("gpt2", "rtx3060, rtx3090, rtx3060 @ 10Gbit/s")
    assert [row.words for row in found.rows] == ["rtx3060", "rtx3090", "rtx3060, rtx3090, rtx3060"]
    assert [row.num_devices for row in found.rows] == [1, 1, 3]
    best = [row.tokens_per_s.likely for row in found.rows if row.tokens_per_s is not None]
    assert best[2] >= best[1] > best[0], "more devices are never slower"


@pytest.mark.slow
def test_changes_are_planned_again_and_memory_helps_a_plan_that_offloads() -> None:
    found = answer("gpt2-medium", "rtx3060:6GB, rtx3060:6GB @ 100Mbit/s", batch=4, within_s=120.0)
    assert found.untried == ()
    gains = {one.words: one.gain for one in found.helps}
    assert found.rows[-1].offloads, "one device alone, as the link is slow"
    assert found.rows[-1].fits, "on both without offloading"
    (memory,) = [gain for words, gain in gains.items() if "2 × the memory" in words]
    assert memory is not None
    assert memory > 1.1
    assert any("bandwidth" in words for words in found.no_help)
    assert list(gains.values()) == sorted(gains.values(), key=lambda gain: -(gain or 0))


@pytest.mark.slow
def test_a_faster_link_helps_a_device_that_is_the_fastest_alone() -> None:
    """Changes were planned under the schedule of the one device, so that no other could ever join it."""
    found = answer("gpt2", "rtx3060, rtx3090 @ 650Mbit/s", train="lora", batch=8, within_s=120.0)
    best = found.rows[-1].candidate
    assert best is not None
    assert best.plan.num_ranks == 1
    (link,) = [one.gain for one in found.helps if "bandwidth" in one.words]
    assert link is not None
    assert link > 1.1


def test_changes_for_which_no_time_is_left_are_named() -> None:
    found = answer("gpt2", "rtx3060")
    assert found.helps == ()
    assert any("memory" in words for words in found.untried)


def test_a_device_that_cannot_keep_all_layers_runs_the_model_in_parts() -> None:
    whole, parts = (
        answer("gpt2-medium", f"rtx3060:{size}", train="lora").rows[0] for size in ("3GB", "1.8GB")
    )
    assert whole.candidate is not None
    assert parts.candidate is not None
    assert whole.candidate.plan.num_stages == 1
    assert parts.candidate.plan.stages_per_rank == parts.candidate.plan.num_stages > 1
    assert whole.tokens_per_s is not None
    assert parts.tokens_per_s is not None
    assert 0.66 < parts.tokens_per_s.likely / whole.tokens_per_s.likely < 1


def test_what_is_missing_is_counted_by_the_plan_that_lacks_least_also_in_parts() -> None:
    row = answer("gpt2-medium", "rtx3060:1.4GB", train="lora").rows[0]
    assert not row.fits
    assert 0 < -row.left_bytes < 0.2e9, "in parts the model fits 1.6 GB"


def test_what_fits_only_with_offloading_is_answered_so_and_compared_with_adapters() -> None:
    found = answer("gpt2", "rtx3060:2.5GB", within_s=120.0)
    (row,) = found.rows
    assert not row.fits
    assert row.left_bytes < -1e8
    assert row.candidate is not None
    assert row.candidate.plan.paging is not None
    assert row.tokens_per_s is not None
    assert row.tokens_per_s.low < row.tokens_per_s.likely < row.tokens_per_s.high
    assert 1e8 < row.host_bytes < HOST_BYTES
    assert not row.is_stopped
    (lora,) = [one for one in found.helps if "lora" in one.words]
    assert lora.gain == pytest.approx(lora.tokens_per_s / row.tokens_per_s.likely)
    assert any("Hosts whose memory is not given" in note for note in found.notes)
    (same,) = answer("gpt2", "rtx3060:2.5GB", train="lora").rows
    assert same.tokens_per_s is not None
    assert same.tokens_per_s.likely == pytest.approx(lora.tokens_per_s)


@pytest.mark.slow
def test_without_time_the_first_plan_that_fits_with_offloading_is_the_answer() -> None:
    found = answer("gpt2-large", "rtx3060:5GB, rtx3060:5GB @ 10Gbit/s", within_s=0.0)
    row = found.rows[-1]
    assert not row.fits
    assert row.candidate is not None
    assert row.is_stopped
    assert any("bandwidth" in words for words in found.untried)


@pytest.mark.parametrize("machine", ["jetson-orin-nano", "laptop:8GB"])
def test_what_shares_the_memory_of_its_host_offloads_nothing_to_it(machine: str) -> None:
    """A CPU whose memory is given in the catalogue once offloaded to a host with more."""
    found = answer("gpt2-xl", machine)
    assert found.rows[0].candidate is None
    assert any("offloading" in words for words in found.no_help)


def test_machines_that_differ_in_the_memory_of_their_hosts_have_a_row_each() -> None:
    rows = answer("gpt2", "rtx3060:6GB+100MB, rtx3060:6GB+16GB, rtx3060:6GB+16GB").rows
    assert [row.words for row in rows[:-1]] == ["rtx3060:6GB+100MB", "rtx3060:6GB+16GB"]


def test_a_host_that_is_too_small_is_no_help() -> None:
    found = answer("gpt2", "rtx3060:2.5GB+100MB")
    assert found.rows[0].candidate is None
    assert any("offloading" in words for words in found.no_help)


def test_more_memory_than_a_device_is_sold_with_is_named() -> None:
    notes = answer("gpt2", "rtx3060:64GB, rtx3060:6GB", train="lora").notes
    (note,) = [one for one in notes if "sold with" in one]
    assert note.startswith("rtx3060:64GB counts with 64GB on the device, which is sold with 12.0 GiB. ")
    assert note.endswith("rtx3060+64GB.")


def test_links_attain_the_shares_of_the_range() -> None:
    machines = machines_of("rtx3090, rtx3090 @ 1Gbit/s")
    for share in LINK_SHARES:
        cluster = machines.cluster({"rtx3090": (1.0, 1.0)}, share)
        assert cluster.bandwidth(0, 1) == pytest.approx(share * 1.25e8)


def test_links_that_several_gpus_of_a_machine_share_attain_less() -> None:
    first, second = machines_of("2x rtx3090, rtx3090 @ 1Gbit/s").cluster(None, 0.9, 0.5).servers
    assert first.cards[0].link.bytes_per_s == pytest.approx(0.5 * 1.25e8)
    assert second.cards[0].link.bytes_per_s == pytest.approx(0.9 * 1.25e8)
    low, high = SHARED_LINK_SHARES
    notes = answer("gpt2", "2x rtx3060, rtx3060 @ 10Gbit/s", train="lora").notes
    assert any(f"several GPUs share attain {low:.0%} to {high:.0%}" in note for note in notes)


# The page.

PAGE = (Path(__file__).parents[2] / "docs" / "figures-fit.md").read_text()
PAIRS = re.findall(
    r"^\| (\S+) \| (.+?) \| (\w+) \| (\d+) \| (yes|no) \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE
)


def test_the_page_has_nine_pairs() -> None:
    assert len(PAIRS) == 9


@pytest.mark.parametrize(
    "pair",
    [pair for pair in PAIRS if "8x" not in pair[1]],  # of eight devices they take seconds
    ids=lambda pair: f"{pair[0]} on {pair[1]}",
)
def test_the_figures_of_the_page_are_those_of_the_program(pair: tuple[str, ...]) -> None:
    model, machines, train, length, fits, least, most = pair
    question = FitQuestion(shape_of(model), machines_of(machines), TrainedShare(train), int(length), 16)
    row = fit(question, within_s=0.0).rows[-1]
    assert row.fits == (fits == "yes")
    rate = row.tokens_per_s if row.fits else None
    shown = ("–", "–") if rate is None else (f"{rate.low:,.0f}", f"{rate.high:,.0f}")
    assert shown == (least, most)


# The command.


def test_the_table_says_what_it_rests_on(capsys: Capture) -> None:
    words = ("gpt2", "--machines", "rtx3060, t4, m1:16GB", "--train", "qlora", "--batch", "2")
    result = bireme(capsys, "fit", *words, "--within", "0", "--length", "256")
    assert result.status == 0, result.err
    text = " ".join(result.out.split())
    for part in (
        "124M parameters, qlora",
        "hours for 100M",
        "rtx3060 attains 40% to 65% of its matrix rate: estimate",
        "t4 has no hardware for bfloat16",
        "Bireme has not been tested on m1 (mps)",
        "No link is given, so machines are joined by 1 Gbit/s",
        "The fastest way: ",
        "Not tried, for lack of time",
    ):
        assert part in text, part


def test_the_document_has_all_answers(capsys: Capture) -> None:
    words = ("gpt2", "--machines", "rtx3060:8GB", "--batch", "2", "--length", "256", "--tokens", "3M")
    document = bireme(capsys, "fit", *words, "--within", "0", "--json").document
    assert (document["model"], document["num_parameters"]) == ("gpt2", 124_439_808)
    (row,) = document["rows"]
    assert row["fits"]
    assert (row["offloads"], row["host_bytes"], row["is_best_so_far"]) == (False, 0, False)
    assert row["plan"]["depth"] == 1
    rate = row["tokens_per_s"]
    assert row["hours"]["most"] == pytest.approx(3e6 / rate["low"] / 3600)
    assert row["hours"]["least"] <= row["hours"]["likely"] <= row["hours"]["most"]
    assert document["not_tried"]
    assert document["notes"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "gpt3 --machines rtx3090",
            "There is no model 'gpt3': neither a folder nor a built-in shape. Did",
        ),
        ("gpt2 --machines rtx3091", "There is no device 'rtx3091' in the catalogue. Did you mean 'rtx309"),
        (
            "gpt2 --machines m3-max",
            "is sold with several sizes of memory. Give the size, such as m3-max:",
        ),
        ("gpt2 --machines rtx3090 --train half", "There is no --train 'half'. "),
        ("gpt2 --machines rtx3090 --length 4096", "The length is 4,096 tokens; gpt2 has 1 to 1,024."),
        ("gpt2 --machines rtx3090 --length 0", "The length is 0 tokens"),
        ("gpt2 --machines rtx3090 --batch 0", "The batch is 0 sequences; it must be 1 to 65,536."),
        ("gpt2 --machines rtx3090 --tokens many", "--tokens is 'many'; write a number of tokens as 100M, 2B"),
        ("gpt2 --machines rtx3090 --tokens 1e999", "--tokens is '1e999'; write a number of tokens as 100M"),
        ("gpt2 --machines rtx3090 --tokens 1e308T", "--tokens is '1e308T'; write"),
        ("gpt2 --machines rtx3090:1e999", "The memory of rtx3090 is '1e999'; write bytes as 6GB"),
        (f"gpt2 --machines {'9' * 5000}xrtx3090", "in the catalogue"),
        ("gpt2 --machines rtx3090@slow", "'slow' is no link."),
        (". --machines rtx3090", "has no config.json. Name a folder of a transformers model."),
        ("gpt2", "This machine has no GPUs of one kind that the catalogue knows. Name machines"),
    ],
)
def test_wrong_input_is_one_sentence_and_status_two(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: str, sentence: str
) -> None:
    monkeypatch.setattr("bireme.cluster.machine.import_module", _no_driver)
    result = bireme(capsys, "fit", *words.split())
    assert result.status == 2
    assert sentence in result.err
    assert result.err.count("\n") == 1


def _no_driver(name: str) -> None:
    raise ImportError(name)
