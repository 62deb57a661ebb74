"""What a user can get wrong with a pipeline is a sentence on every rank, and nothing is computed from it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bireme
from bireme.errors import BiremeError
from bireme.model.capture import capture
from bireme.model.graph_file import graph_hash
from bireme.model.weights import Weights
from bireme.plan.forecast import Origin
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan, write_plan
from bireme.runtime.launch import launch
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings
from bireme.runtime.world import World
from tests.support.engine_parity import Setting, pipeline_of, plan_for
from tests.support.regression import Regression, regression
from tests.support.small_models import (
    Batch,
    Model,
    captured,
    made_of,
    real_batches,
    token_batches,
)
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_text import tiny_text
from tests.support.together import run_threads

pytestmark = pytest.mark.slow


def failures(plan: Plan, data_of: Callable[[int], list[Any]], timeout_s: float | None = None) -> list[str]:
    """What each rank ends with, where all of them must end with an error of the user's."""
    model = tiny_text()
    joined = ThreadFabric(plan.num_ranks, timeout_s=timeout_s)

    def work(rank: int) -> str:
        pipeline = pipeline_of(model, Setting(plan), joined.of(rank))
        with pytest.raises(BiremeError) as caught:
            list(pipeline.train(data_of(rank)))
        pipeline.close()
        return str(caught.value)

    return [str(one) for one in run_threads(plan.num_ranks, work)]


def with_second(change: Callable[[Batch], object]) -> list[Batch]:
    data = token_batches(8, 3)
    change(data[1])
    return data


BATCHES: list[tuple[str, Callable[[Batch], object], str]] = [
    (
        "few",
        lambda b: b.update({name: t[:3] for name, t in b.items()}),
        "3 samples, and the plan cuts it into 4",
    ),
    ("missing", lambda b: b.pop("labels"), "lacks labels: its tensors are input_ids"),
    ("none", lambda b: b.update(labels=None), "lacks labels"),  # type: ignore[call-overload]
    (
        "dtype",
        lambda b: b.update(labels=b["labels"].double()),
        r"labels is float64.*labels.to\(torch.int64\)",
    ),
    ("shape", lambda b: b.update(labels=b["labels"][:, :5]), r"labels is of shape \[8, 5\].* for \[b, 8\]"),
    ("axes", lambda b: b.update(labels=b["labels"][:, 0]), r"labels is of shape \[8\]"),
    ("lengths", lambda b: b.update(labels=b["labels"][:4]), r"first axes of lengths \[4, 8\]"),
]


@pytest.mark.parametrize(("change", "words"), [one[1:] for one in BATCHES], ids=[one[0] for one in BATCHES])
def test_a_batch_that_does_not_fit_is_told_on_every_rank(
    change: Callable[[Batch], object], words: str
) -> None:
    for told in failures(plan_for("2bw", 2), lambda _rank: with_second(change)):
        with pytest.raises(BiremeError, match=words):
            raise BiremeError(told)


def test_what_is_no_batch_is_told() -> None:
    for told in failures(plan_for("1f1b", 2), lambda _rank: [torch.zeros(8, 8)]):
        assert told.startswith("Batch 0 is a Tensor. A batch is a dict of tensors")


def test_halves_need_two_samples_in_every_micro_batch() -> None:
    for told in failures(plan_for("1f1b-sliced", 2), lambda _rank: token_batches(7, 1)):
        assert "7 samples" in told


@pytest.mark.parametrize(
    "data_of",
    [
        lambda rank: token_batches(8 if rank < 2 else 12, 2),
        lambda rank: token_batches(8, 2, first=rank % 2),
        lambda rank: token_batches(8, 2)[:: 1 if rank else -1],
    ],
    ids=["other sizes in a replica", "other numbers in a stage", "another order on one rank"],
)
def test_batches_that_differ_between_ranks_are_told_before_they_change_a_weight(
    data_of: Callable[[int], list[Batch]],
) -> None:
    """No message tells: a rank that labels what another one did not read computes a loss all the same."""
    told = failures(plan_for("1f1b", 2, width=2), data_of)
    assert len(told) == 4
    assert all(one.startswith("Batch 0 is not the same on all ranks") for one in told)


def test_a_batch_of_another_size_in_another_stage_is_never_read_as_if_it_were_right() -> None:
    told = failures(plan_for("1f1b", 2), lambda rank: token_batches(8 + 4 * rank, 2), timeout_s=1.0)
    assert all("its batch has other shapes" in one or "given a batch of other shapes" in one for one in told)


# --- one rank alone


def alone(
    model: Model, plan: Plan | None = None, weights: Weights | None = None, **settings: Any
) -> Pipeline:
    settings = {"evaluation": model.evaluation, **settings}
    return Pipeline(
        model.graph,
        plan or Plan((), 4, "1f1b"),
        weights=weights or model.given,
        settings=PipelineSettings(**settings),
    )


def small() -> Model:
    module = Regression(made_of([torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]))
    return captured(module, real_batches(2, 1, 4)[0], name="two layers", evaluates=True)


def test_weights_of_another_model_are_refused() -> None:
    model = small()
    name = next(iter(model.weights))

    def given(names: Any) -> dict[str, torch.Tensor]:
        return {**model.given(names), name: torch.zeros(3, 3)}

    with pytest.raises(BiremeError, match=rf"weights given for {name} have the shape \(3, 3\)"):
        alone(model, weights=given)
    with pytest.raises(BiremeError, match=f"weights given for {name} are not there"):
        alone(model, weights=lambda names: {k: t for k, t in model.given(names).items() if k != name})


def test_weights_in_another_precision_are_refused() -> None:
    """Unless they are more precise than the graph, and so the masters of its banks."""
    model = small()
    with pytest.raises(BiremeError, match=r"used in float32, .* captured with float64"):
        alone(model, weights=lambda names: {name: t.float() for name, t in model.given(names).items()})
    with pytest.raises(BiremeError, match="With bank_dtype = bfloat16, capture the model in bfloat16"):
        alone(model, bank_dtype=torch.bfloat16)


def test_a_training_that_was_left_early_is_not_gone_on_with() -> None:
    pipeline = alone(small())
    for _ in pipeline.train(real_batches(8, 4, 4)):
        break
    with pytest.raises(BiremeError, match="was left before its batches"):
        pipeline.train(real_batches(8, 1, 4))
    with pytest.raises(BiremeError, match="not drained"):
        pipeline.evaluate(real_batches(8, 1, 4))
    pipeline.close()


def test_a_training_that_has_failed_says_why_it_does_not_go_on() -> None:
    pipeline = alone(small())
    with pytest.raises(BiremeError, match="has 3 samples"):
        list(pipeline.train([*real_batches(8, 1, 4), *real_batches(3, 1, 4)]))
    for again in (pipeline.train, pipeline.evaluate):
        with pytest.raises(
            BiremeError, match=r"has failed in this pipeline \(Batch 1 has 3 samples.*new pipeline"
        ):
            again(real_batches(8, 1, 4))
    pipeline.close()


def test_an_evaluation_within_a_training_is_refused() -> None:
    pipeline = alone(small())
    results = pipeline.train(real_batches(8, 2, 4))
    next(results)
    with pytest.raises(BiremeError, match="not drained"):
        pipeline.evaluate(real_batches(8, 1, 4))
    assert len(list(results)) == 1
    assert pipeline.evaluate(real_batches(8, 1, 4)).num_samples == 8
    pipeline.close()


def test_an_evaluation_names_the_batch_that_does_not_fit() -> None:
    pipeline = alone(small())
    held_out = real_batches(3, 2, 4)
    held_out[1]["x"] = held_out[1]["x"].float()
    with pytest.raises(BiremeError, match="In batch 1, x is float32"):
        pipeline.evaluate(held_out)
    with pytest.raises(BiremeError, match="Batch 0 is a list"):
        pipeline.evaluate([[1, 2]])  # type: ignore[list-item]
    pipeline.close()


def test_an_evaluation_needs_a_graph_for_it() -> None:
    pipeline = alone(small(), evaluation=None)
    with pytest.raises(BiremeError, match="made without a graph of the model in evaluation mode"):
        pipeline.evaluate(real_batches(8, 1, 4))
    pipeline.close()


def test_a_source_of_batches_that_breaks_is_that_error() -> None:
    def broken() -> Iterator[Batch]:
        yield from real_batches(8, 2, 4)
        raise OSError("the disk is gone")

    pipeline = alone(small())
    with pytest.raises(OSError, match="the disk is gone"):
        list(pipeline.train(broken()))
    pipeline.close()


@pytest.mark.parametrize("plan", [plan_for("1f1b", 2), plan_for("2bw", 1, width=2)])
def test_a_plan_for_more_processes_than_there_are_is_refused(plan: Plan) -> None:
    with pytest.raises(BiremeError, match="2 processes"):
        alone(tiny_text(), plan)


def test_a_plan_for_fewer_processes_than_there_are_is_refused() -> None:
    with pytest.raises(BiremeError, match=r"plan is for 2 processes.*there are 3"):
        pipeline_of(tiny_text(), Setting(plan_for("1f1b", 2)), ThreadFabric(3).of(0))


def test_a_pipeline_on_the_cpu_is_refused_where_messages_go_between_cuda_devices() -> None:
    """Its tensors came to NCCL, which cannot read them."""
    world = World.alone(backend="nccl")
    with pytest.raises(BiremeError, match=r"device=world\.device, or open the world with backend gloo"):
        pipeline_of(tiny_text(), Setting(plan_for("1f1b", 1)), world)


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(BiremeError, match="cuts at unit 6, and the model has"):
        pipeline_of(small(), Setting(plan_for("1f1b", 4)), ThreadFabric(4).of(0))


def test_schedules_and_recomputation_that_the_engine_cannot_do_are_refused() -> None:
    with pytest.raises(BiremeError, match=r"does not run pipedream.*2bw"):
        alone(small(), Plan((), 4, "pipedream"))
    plan = plan_for("zb-h1", 2, recompute="some")
    with pytest.raises(BiremeError, match="runs backwards in two halves"):
        pipeline_of(tiny_text(), Setting(plan), ThreadFabric(2).of(0))


def test_a_graph_in_evaluation_mode_must_be_of_the_same_model() -> None:
    other = Regression(made_of([torch.nn.Linear(4, 1)]))
    evaluation = capture(other, real_batches(2, 1, 4)[0], training=False)
    with pytest.raises(BiremeError, match="its stages hold other parameters"):
        alone(small(), evaluation=evaluation)


@pytest.mark.slow
def test_a_users_mistake_on_all_processes_is_told_once_and_is_the_users() -> None:
    with pytest.raises(BiremeError, match="3 samples, and the plan cuts it into 4") as caught:
        launch(train_too_few, 2, tiny_text(), threads_per_process=1)
    assert str(caught.value).count("3 samples") == 1


def train_too_few(world: World, model: Model) -> None:
    pipeline = pipeline_of(model, Setting(plan_for("2bw", 2)), world)
    list(pipeline.train(with_second(BATCHES[0][1])))


def test_a_plan_from_a_file_must_be_of_this_model(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    model = regression()
    origin = Origin(graph_hash(model.graph), "0" * 16, "0" * 16, 8, "by hand")
    write_plan(path, SavedPlan(Plan((), 4, "1f1b"), origin=origin))
    saved = bireme.load_plan(path)
    pipeline = Pipeline(model.graph, saved, weights=model.given, optimizer="sgd")
    assert pipeline.plan == saved.plan.by_program
    pipeline.close()
    with pytest.raises(BiremeError, match="made for another model"):
        Pipeline(tiny_text().graph, saved, weights=tiny_text().given, optimizer="sgd")


class Looked(nn.Module):
    """Looks rows up in a table and adds them."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(4, 1)

    def forward(self, ids: Tensor, y: Tensor) -> dict[str, Tensor]:
        rows = self.table(ids)
        together = rows.mean(1) if rows.ndim == 3 else rows
        return {"loss": nn.functional.mse_loss(self.head(together), y)}


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_before_training(kind: Callable[..., nn.Module]) -> None:
    # It was a raw error of torch's amid the first batch.
    example = {"ids": torch.randint(9, (4, 3)), "y": torch.randn(4, 1)}
    with pytest.raises(BiremeError, match=r"table.weight is an embedding with sparse=True"):
        Pipeline(Looked(kind(9, 4, sparse=True)), Plan((), 2, "1f1b"), example_inputs=example)


class Complex(nn.Module):
    """Has a parameter of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (x * self.turn).abs().square().mean()}


def test_complex_gradients_are_refused_where_replicas_would_sum_them() -> None:
    example = {"x": torch.randn(4, 3)}
    graph = capture(Complex(), example)
    weights = {"turn": torch.ones(3, dtype=torch.complex64)}
    fabric = ThreadFabric(2)

    def work(rank: int) -> None:
        plan = Plan((), 1, "1f1b", width=2)
        with pytest.raises(BiremeError, match=r"turn is of torch.complex64. .* train with one replica"):
            Pipeline(graph, plan, fabric.of(rank), weights=lambda names: {n: weights[n] for n in names})

    run_threads(2, work)
