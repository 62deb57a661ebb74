"""The oracles agree with what can be worked out by hand: parabolas, one to a stage, under plain SGD."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from bireme.schedule.catalogue import generate
from bireme.schedule.program import Rule
from tests.support.oracles import Microbatch, Place, Update, run_oracle, seen_by

RATE = 0.1
CURVATURES = (1.0, 2.5, 4.0)


@dataclass(frozen=True, slots=True)
class Parabola:
    """Adds λ/2·(w − x)² to the loss that comes in: its gradient is its own weight's business alone."""

    stage: int
    curvature: float

    @property
    def parameters(self) -> Sequence[str]:
        return (f"w{self.stage}",)

    def __call__(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        distance = parameters[f"w{self.stage}"] - inputs["x"]
        return {"loss": inputs.get("loss", 0.0) + 0.5 * self.curvature * distance * distance}


STAGES = [Parabola(stage, curvature) for stage, curvature in enumerate(CURVATURES)]


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def start() -> dict[str, Tensor]:
    return {f"w{stage}": number(1.0 + stage) for stage in range(len(CURVATURES))}


def data(xs: Sequence[Sequence[float]], weights: Sequence[float] | None = None) -> list[list[Microbatch]]:
    """A batch to each row."""
    heavy = weights or [1.0] * len(xs[0])
    return [[Microbatch({"x": number(x)}, w) for x, w in zip(row, heavy, strict=True)] for row in xs]


XS = [[0.5, -1.0, 2.0, 0.25], [1.5, 0.0, -0.5, 1.0], [-2.0, 0.125, 0.75, 3.0], [1.0, 1.0, -1.0, 0.5]]


def sgd(named: list[tuple[str, Tensor]]) -> Optimizer:
    return SGD(named, lr=RATE)


def adamw(named: list[tuple[str, Tensor]]) -> Optimizer:
    return AdamW(named, lr=RATE)


def trajectory(updates: Sequence[Update], stage: int) -> list[float]:
    return [float(update.weights[f"w{stage}"]) for update in updates]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(("rule", "delay"), [(Rule.SYNCHRONOUS, 0), (Rule.DELAYED, 1)])
def test_every_stage_has_the_same_delay(rule: Rule, delay: int) -> None:
    updates = run_oracle(rule, STAGES, start(), data(XS), sgd)
    for stage, curvature in enumerate(CURVATURES):
        history = [1.0 + stage]
        for t, xs in enumerate(XS):
            history.append(history[t] - RATE * curvature * (history[max(t - delay, 0)] - mean(xs)))
        assert trajectory(updates, stage) == pytest.approx(history[1:], abs=1e-14)


def test_stashing_delays_early_stages_more() -> None:
    updates = run_oracle(Rule.STASHED, STAGES, start(), data(XS), sgd)
    flat = [x for xs in XS for x in xs]
    assert len(updates) == len(flat)
    for stage, curvature in enumerate(CURVATURES):
        history = [1.0 + stage]
        for k, x in enumerate(flat):
            behind = history[max(k - (len(CURVATURES) - 1 - stage), 0)]
            history.append(history[k] - RATE * curvature * (behind - x))
        assert trajectory(updates, stage) == pytest.approx(history[1:], abs=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "gain", "is_stable"),
    [
        (Rule.SYNCHRONOUS, 1.95, True),
        (Rule.SYNCHRONOUS, 2.05, False),
        (Rule.DELAYED, 0.95, True),
        (Rule.DELAYED, 1.05, False),
    ],
)
def test_a_delay_of_one_halves_the_stable_rate(rule: Rule, gain: float, is_stable: bool) -> None:
    stages = [Parabola(0, gain / RATE)]
    updates = run_oracle(rule, stages, {"w0": number(1.0)}, data([[0.0]] * 300), sgd)
    largest = max(map(abs, trajectory(updates, 0)[-20:]))
    assert largest < 1e-2 if is_stable else largest > 1e2


def test_fresh_is_synchronous_where_everything_was_seen() -> None:
    everything = {(stage, batch): 4 for stage in range(3) for batch in range(1, 4)}
    fresh = run_oracle(Rule.FRESH, STAGES, start(), data(XS), adamw, seen=everything)
    plain = run_oracle(Rule.SYNCHRONOUS, STAGES, start(), data(XS), adamw)
    assert [update.weights for update in fresh] == [update.weights for update in plain]
    assert [update.loss for update in fresh] == [update.loss for update in plain]


def test_fresh_runs_on_a_step_by_the_mean_of_what_was_seen() -> None:
    program = generate("2bw-fresh", num_stages=3, num_microbatches=4, num_batches=4)
    seen = seen_by(program)
    assert {stage: seen[stage, 1] for stage in range(3)} == {0: 2, 1: 3, 2: 4}
    weights = [1.0, 3.0, 0.5, 2.0]
    updates = run_oracle(Rule.FRESH, STAGES, start(), data(XS, weights), sgd, seen=seen)
    for stage, curvature in enumerate(CURVATURES):
        newest = used = 1.0 + stage
        for t, xs in enumerate(XS):
            assert float(updates[t].computed_on[Place(0, stage)][f"w{stage}"]) == pytest.approx(
                used, abs=1e-14
            )
            k = seen.get((stage, t + 1), 0)
            known = sum(w * x for w, x in zip(weights[:k], xs, strict=False)) / sum(weights[:k]) if k else 0.0
            whole = sum(w * x for w, x in zip(weights, xs, strict=True)) / sum(weights)
            tried = newest - RATE * curvature * (used - known)
            newest -= RATE * curvature * (used - whole)
            used = tried
            assert trajectory(updates, stage)[t] == pytest.approx(newest, abs=1e-14)


def test_replicas_try_what_they_have_seen_themselves_and_step_together() -> None:
    batches = [[Microbatch({"x": number(x)}, replica=k % 2) for k, x in enumerate(xs)] for xs in XS[:2]]
    updates = run_oracle(Rule.FRESH, STAGES[:1], start(), batches, sgd, seen={(0, 1): 1})
    for replica in (0, 1):
        tried = 1.0 - RATE * (1.0 - XS[0][replica])
        assert float(updates[1].computed_on[Place(replica, 0)]["w0"]) == pytest.approx(tried, abs=1e-14)
    assert trajectory(updates, 0)[0] == pytest.approx(1.0 - RATE * (1.0 - mean(XS[0])), abs=1e-14)


def test_losses_and_gradients_are_means_by_weight() -> None:
    update = run_oracle(Rule.SYNCHRONOUS, STAGES[:1], start(), data([[0.0, 2.0]], [3.0, 1.0]), sgd)[0]
    assert update.losses == (0.5, 0.5)
    gradient = update.gradients["w0"]
    assert gradient is not None
    assert float(gradient) == 0.75 * 1.0 + 0.25 * -1.0


def test_the_norm_is_clipped_over_all_stages() -> None:
    update = run_oracle(Rule.SYNCHRONOUS, STAGES, start(), data([[0.0]]), sgd, clip_norm=1.0)[0]
    gradients = [curvature * (1.0 + stage) for stage, curvature in enumerate(CURVATURES)]
    norm = sum(gradient**2 for gradient in gradients) ** 0.5
    assert update.norm == pytest.approx(norm)
    for stage, gradient in enumerate(gradients):
        stepped = 1.0 + stage - RATE * gradient / (norm + 1e-6)
        assert trajectory([update], stage)[0] == pytest.approx(stepped, abs=1e-14)


def test_a_trial_step_is_clipped_by_the_last_factor_known() -> None:
    updates = run_oracle(
        Rule.FRESH,
        STAGES[:1],
        start(),
        data([[0.0], [0.0], [0.0]]),
        sgd,
        clip_norm=0.5,
        seen={(0, 1): 1, (0, 2): 1},
    )
    used = [float(update.computed_on[Place(0, 0)]["w0"]) for update in updates]
    weights = [1.0, *trajectory(updates, 0)]
    assert used[1] == pytest.approx(1.0 - RATE * 1.0)
    assert weights[1] == pytest.approx(1.0 - RATE * 0.5, abs=1e-6)
    assert used[2] == pytest.approx(weights[1] - RATE * used[1] * 0.5, abs=1e-6)


@pytest.mark.parametrize("rule", [Rule.SYNCHRONOUS, Rule.DELAYED, Rule.FRESH])
def test_a_batch_that_is_not_finite_changes_nothing_and_is_over(rule: Rule) -> None:
    batches = data([XS[0], [0.0, float("inf"), 0.0, 0.0], XS[2], XS[3]])
    seen = {(stage, batch): 3 for stage in range(3) for batch in range(1, 4)}
    updates = run_oracle(rule, STAGES, start(), batches, adamw, seen=seen)
    assert [update.is_skipped for update in updates] == [False, True, False, False]
    assert updates[1].weights == updates[0].weights
    assert all(float(state["step"]) == 3 for state in updates[-1].optimizer_state.values())
    assert updates[2].weights != updates[1].weights


def test_rates_follow_the_batch() -> None:
    updates = run_oracle(
        Rule.SYNCHRONOUS,
        STAGES[:1],
        start(),
        data([[0.0], [0.0]]),
        sgd,
        lr_factor=lambda batch: 1.0 / (1 + batch),
    )
    assert trajectory(updates, 0) == pytest.approx([0.9, 0.9 * 0.95], abs=1e-14)


def test_what_is_frozen_or_unused_stays_and_is_not_decayed() -> None:
    weights = {**start(), "unused": number(7.0)}
    updates = run_oracle(Rule.DELAYED, STAGES, weights, data(XS), adamw, trainable={"w0", "w2", "unused"})
    assert set(updates[-1].weights) == {"w0", "w2", "unused"}
    assert float(updates[-1].weights["unused"]) == 7.0
    assert set(updates[-1].optimizer_state) == {"w0", "w2"}
