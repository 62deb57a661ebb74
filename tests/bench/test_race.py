"""The race's own arithmetic, what it resumes, and that contenders train the same model in the same way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.common import made, paced
from benchmarks.race import FAR, SLOW_HOST, rows_of, verdicts
from benchmarks.racing import task
from benchmarks.racing.contenders import CHOSEN, CONTENDERS, RIVALS
from benchmarks.racing.field import LEARNING, SETTINGS
from benchmarks.racing.rank import Reached
from benchmarks.racing.results import Results, crossing, curve_document, curve_of, drawn, loss_at
from benchmarks.racing.runs import LIMITS, Limits, Race
from bireme.model.gpt import GPT
from bireme.model.weights import materialize
from bireme.report.markup import svg
from tests.support.extent import TRY_ALL

TARGET = 3.0


def curve(step_s: float, losses: list[float]) -> list[Reached]:
    return [
        Reached(10 * number, 10 * number * step_s, 1000 * number, loss)
        for number, loss in enumerate(losses, 1)
    ]


def add_run(results: Results, name: str, seed: int, step_s: float, losses: list[float]) -> None:
    results.add(
        "race",
        setting=FAR,
        contender=name,
        seed=seed,
        choice={},
        chosen="",
        made_of="",
        curve=curve_document(curve(step_s, losses)),
    )


def test_a_loss_is_reached_between_two_evaluations() -> None:
    assert crossing(curve(0.5, [4.0, 3.2, 2.8]), TARGET) == pytest.approx((25.0, 12.5))
    assert crossing(curve(0.5, [2.9]), TARGET) == (10.0, 5.0)
    assert crossing(curve(0.5, [4.0, 3.1]), TARGET) is None
    assert loss_at(curve(0.5, [4.0, 3.0]), 7.5) == pytest.approx(3.5)
    assert loss_at(curve(0.5, [4.0, 3.0]), 11.0) is None


def test_rows_have_medians_over_seeds_and_the_fastest_first(tmp_path: Path) -> None:
    results = Results(tmp_path / "race.jsonl")
    for seed, step_s in enumerate((0.3, 0.1, 0.2)):
        add_run(results, CHOSEN, seed, step_s, [4.0, 2.0])
        add_run(results, "torch-1f1b", seed, 10 * step_s, [4.0, 2.0])
    add_run(results, "diloco", 0, 0.1, [4.0, 3.5])
    for seed, losses in enumerate(([4.0, 2.0], [4.0, 3.5], [4.0, 3.5, 2.0])):
        add_run(results, "ddp-bf16", seed, 4.0, losses)
    rows = {row["contender"]: row for row in rows_of(Results(tmp_path / "race.jsonl"), FAR, TARGET)}
    assert [*rows] == [CHOSEN, "torch-1f1b", "ddp-bf16", "diloco"]
    assert rows["ddp-bf16"]["seconds"] == pytest.approx(280 / 3), "of the three, one never reaches the loss"
    assert rows[CHOSEN]["seconds"] == pytest.approx(3.0)
    assert rows[CHOSEN]["loss_when_the_first_arrives"] == pytest.approx(3.0, abs=0.5)
    assert rows["torch-1f1b"]["kB_a_step"] == pytest.approx(0.1)
    assert rows["diloco"]["seconds"] is None
    assert rows["diloco"]["reached"] == 0


def row(name: str, *seconds: float) -> dict[str, Any]:
    return {
        "contender": name,
        "seconds": seconds[0] if seconds else None,
        "seconds_by_seed": dict(enumerate(seconds)),
    }


def test_goals_are_judged_by_who_has_reached_the_loss() -> None:
    rows = [row(CHOSEN, 10.0), row("diloco", 16.0), row("torch-1f1b")]
    found = {one.name: one for one in verdicts(FAR, rows)}
    assert len(found) == 2
    assert all(one.ok for one in found.values())
    assert not [*verdicts(FAR, [row(CHOSEN)])]
    slower = [*verdicts(FAR, [row(CHOSEN, 10.0), row("diloco", 9.0)])]
    assert not any(one.ok for one in slower)


def test_goals_compare_the_seeds_that_both_have_run() -> None:
    rows = [row(CHOSEN, 10.0, 30.0, 30.0), row("diloco", 16.0)]
    assert {one.value for one in verdicts(FAR, rows)} == {1.6, 1 / 1.6}


def seconds_of(results: Results, setting: str, name: str) -> Iterator[str]:
    for one in results.find("race", setting=setting, contender=name):
        crossed = crossing(curve_of(one), LIMITS.target)
        assert crossed is not None
        yield f"{crossed[1]:.1f}"


def test_the_page_has_the_seconds_of_the_file() -> None:
    """One seed of the page was rounded up that its median rounds down."""
    docs = Path(__file__).parents[2] / "docs"
    tables = (docs / "race.md").read_text(encoding="utf-8").partition("## Figures")[2].split("\n\n")
    tables = [table for table in tables if table.startswith("| contender")][:3]
    results = Results(docs / "race.jsonl")
    for table, settings in zip(tables, [(FAR,), (SLOW_HOST,), ("1gbit", "unshaped")], strict=True):
        rows = [line.replace("*", "").split(" | ") for line in table.splitlines()[2:]]
        for place, setting in enumerate(settings):
            measured = [
                [f"{row['seconds']:.1f}", ", ".join(seconds_of(results, setting, row["contender"]))]
                for row in rows_of(results, setting, LIMITS.target)
            ]
            for row in rows:
                assert row[1 + 3 * place : 3 + 3 * place] in measured, row


def test_what_a_file_has_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it runs")

    monkeypatch.setattr("benchmarks.racing.runs.field", refuse)
    path = tmp_path / "race.jsonl"
    add_run(Results(path), "diloco", 0, 0.1, [4.0])
    race = Race(Results(path), LIMITS, tmp_path)
    race.run(SETTINGS[FAR], CONTENDERS["diloco"], 0)
    with pytest.raises(AssertionError, match="it runs"):
        race.run(SETTINGS[FAR], CONTENDERS["diloco"], 1)


def test_a_picture_names_all_who_have_run(tmp_path: Path) -> None:
    results = Results(tmp_path / "race.jsonl")
    for name in (CHOSEN, "diloco"):
        add_run(results, name, 0, 0.1, [3.4, 3.2, 2.8])
    text = svg(drawn(results, [*SETTINGS], TARGET))
    assert text.startswith("<svg")
    assert CHOSEN in text
    assert "diloco" in text


def test_all_are_tuned_with_the_same_budget() -> None:
    for one in RIVALS:
        assert len(one.ways) in (0, 4)
        assert len(one.shapes) in (1, 4)
        assert one.ways or CONTENDERS[one.like].ways


class Clock:
    """Stands still but for what sleeps and for what a test computes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept = list[float]()

    def monotonic(self) -> float:
        return self.now_s

    thread_time = monotonic

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class Work(nn.Module):
    """Takes a second forward, and a quarter back."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now_s += 1.0
        out = x.clone()
        out.register_hook(self.return_gradient)
        return out

    def return_gradient(self, gradient: Tensor) -> None:
        self.clock.now_s += 0.25


def test_a_half_sleeps_for_what_its_arithmetic_leaves_and_for_its_weights_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(paced, "time", clock)
    monkeypatch.setattr(paced, "_half", paced._Half())
    monkeypatch.delenv("BIREME_BENCHMARK_SPEED", raising=False)
    norm, out = paced.PacedNorm(nn.LayerNorm(2), 3, 0.5), paced.PacedDropout(nn.Dropout(0.0), 3, 0.5)
    model, x = nn.Sequential(norm, Work(clock), out), torch.ones(3, 2, requires_grad=True)
    made = model(x).square().sum()
    assert clock.slept == [0.5]  # of 1.5, one was computed
    torch.autograd.grad(made, [x], retain_graph=True)
    assert clock.slept == [0.5, 1.25]
    torch.autograd.grad(made, [norm.weight], retain_graph=True)
    assert sum(clock.slept[2:]) == 1.25  # the hook computes again
    before_s = clock.now_s
    torch.autograd.grad(made, [x, norm.weight])
    assert clock.now_s - before_s == 3.0
    clock.now_s += 100.0
    model(x)
    assert clock.slept[-1] == 0.5


def test_first_weights_and_batches_do_not_depend_on_who_asks() -> None:
    first, again = (task.first_model(3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    plain = materialize(GPT(task.CONFIG), [*first], seed=3)  # without the operators that sleep
    assert all(torch.equal(first[name], plain[name]) for name in first)
    assert torch.equal(task.Batches(3)[7], task.Batches(3)[7])
    assert not torch.equal(task.Batches(3)[7], task.Batches(4)[7])


def test_sections_with_old_figures_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "age_of", {"aaaaaaa": 3, "bbbbbbb": 201}.get)
    page = (
        "# Page\n\n## New\n\ncommit bbbbbbb, later commit `aaaaaaa`\n\n## Old\n\ncommit bbbbbbb\n\n"
        "## Lost\n\ncommit ccccccc\n\n## None\n\n| a | b |\n|---|---|\n| x | 1.5 |\n\n"
        "## Words\n\n| a |\n|---|\n| x |\n"
    )
    found = {one.heading: one.why for one in made.stale(page)}
    assert [*found] == ["Old", "Lost", "None"]
    assert "201 commits" in found["Old"]


@pytest.mark.slow
@pytest.mark.skipif(not TRY_ALL, reason="four processes for each of six contenders")
def test_contenders_that_sum_gradients_train_as_one_process_does(tmp_path: Path) -> None:
    race = Race(Results(tmp_path / "race.jsonl"), Limits(0.0, 2, 60.0, 2, 0, False), tmp_path)
    model, batches = task.first_model(0), task.Batches(0)
    optimizer = task.adamw(model, 1e-3)
    for step in range(2):
        task.set_rate(optimizer, 1e-3, step)
        optimizer.zero_grad()
        model(batches[step], batches[step])["loss"].backward()
        optimizer.step()
    wanted = task.Judge().loss([dict(model.named_parameters())])
    for one in (one for one in RIVALS if not one.package):
        for shape in one.shapes:
            choice = {"learning_rate": 1e-3, **(one.ways[0] if one.ways else {}), **shape}
            choice["learning_rate"] = 1e-3
            reached, _ = race._rival(LEARNING, one, choice, 0, 2)
            tolerance = 0.05 if one.name == "diloco" else 2e-3
            assert reached[-1].loss == pytest.approx(wanted, abs=tolerance), choice
