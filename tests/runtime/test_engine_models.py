"""What models do to an engine: shared and frozen weights, draws, buffers, many tensors across a boundary.

Ranks are threads; the judge is one process, as in `test_engine`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.model import fused_loss, fused_operator
from bireme.model import stage as segments
from bireme.model.units import units_of
from bireme.plan.plan import Plan
from bireme.runtime import stage
from tests.support.engine_parity import (
    ALL,
    Setting,
    assert_equal,
    oracle,
    plan_for,
    tolerance_of,
    train_on_threads,
)
from tests.support.extent import several
from tests.support.regression import WIDTH, Regression
from tests.support.small_models import (
    CONTEXT,
    Model,
    captured,
    chained,
    made_of,
    real_batches,
    token_batches,
)
from tests.support.tiny_text import tiny_text

pytestmark = pytest.mark.slow


def rows(batch: int = 2, width: int = WIDTH) -> dict[str, Tensor]:
    return real_batches(batch, 1, width)[0]


def squared_error(returned: Any, inputs: Any) -> Tensor:
    made = returned[0] if isinstance(returned, tuple) else returned
    return functional.mse_loss(made, inputs["wanted"])


# --- weights that are shared or do not learn


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("schedule", "width"),
    [("gpipe", 1), ("1f1b-sliced", 2), ("interleaved", 1), ("zbv", 2), ("2bw", 1), ("2bw-fresh", 2)],
)
def test_copies_of_a_shared_weight_stay_equal_on_all_ranks(schedule: str, width: int) -> None:
    """`assert_equal` compares all holders of a weight bit by bit, after every update.

    The first and the last stage hold it: two ranks, or under zbv the first rank twice.
    """
    tied = tiny_text(tied=True)
    setting = Setting(plan_for(schedule, width=width), clip_norm=0.5)
    data = token_batches(8 * width, 3)
    found = train_on_threads(tied, setting, data)
    holders = [trained for trained in found if "tokens.weight" in trained.weights[0]]
    assert len(holders) == width * (1 if schedule == "zbv" else 2)
    assert_equal(found, oracle(tied, setting, data), tolerance=1e-12)


@pytest.mark.few(4)
@pytest.mark.parametrize("frozen", ["layers.0", "layers.2", "layers.3.", "layers.4", "bias", "weight"])
@pytest.mark.parametrize("schedule", ["zb-h1", "2bw-fresh"])
def test_frozen_weights_stay_as_they_are(schedule: str, frozen: str) -> None:
    """A stage may even have nothing that learns, at either end or between."""
    layers = made_of([*(Layer() for _ in range(5)), Layer(1, nn.Identity())])
    for name, parameter in Regression(layers).named_parameters():
        parameter.requires_grad_(frozen not in name)
    model = captured(Regression(layers), rows(), name=f"regression without {frozen}")
    setting = Setting(Plan((1, 4), 4, schedule), clip_norm=0.5)
    data = real_batches(8, 3, WIDTH)
    found = train_on_threads(model, setting, data)
    assert_equal(found, oracle(model, setting, data), tolerance=1e-12)
    for trained in found:
        for name, tensor in trained.weights[-1].items():
            if frozen in name:
                assert torch.equal(tensor, model.weights[name])
                assert name not in trained.states[-1]


class Layer(nn.Module):
    """A linear map and what comes after it."""

    def __init__(self, out: int = WIDTH, after: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, out)
        self.after = after or nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.after(self.linear(x))
        return made


# --- what is drawn


def dropping() -> Model:
    return tiny_text(dropout=0.3)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("sequential", "some"),
        ("gpipe", "all"),
        ("1f1b", "off"),
        ("1f1b", "some"),
        ("interleaved", "all"),
        ("zb-h1", "all"),
        ("zbv", "off"),
        ("2bw", "all"),
        ("2bw", "some"),
        ("2bw-fresh", "off"),
    ],
)
def test_dropout_draws_what_one_process_draws(schedule: str, recompute: str) -> None:
    """Where a micro-batch goes in halves each draws for itself, so 1f1b-sliced is left out."""
    setting = Setting(plan_for(schedule, recompute=recompute))
    data = token_batches(8, 3)
    torch.manual_seed(len(schedule) + len(recompute))
    before = torch.get_rng_state()
    found = train_on_threads(dropping(), setting, data)
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal(found, oracle(dropping(), setting, data))


def test_dropout_depends_neither_on_the_stages_nor_on_the_schedule() -> None:
    data = token_batches(8, 3)
    plans = [plan_for("gpipe", num) for num in (1, 2, 3, 4)] + [plan_for("zbv"), plan_for("1f1b")]
    losses = [train_on_threads(dropping(), Setting(plan), data)[0].losses for plan in plans]
    assert losses == [losses[0]] * len(plans)


def test_halves_that_draw_still_recompute_what_they_drew() -> None:
    data = token_batches(8, 3)
    kept, recomputed = (
        train_on_threads(dropping(), Setting(plan_for("1f1b-sliced", recompute=how)), data)[0].losses
        for how in ("off", "all")
    )
    assert kept == recomputed


# --- buffers


def normalized() -> Model:
    """Three layers with a batch norm each, and one without."""
    layers = [Layer(WIDTH, nn.BatchNorm1d(WIDTH)) for _ in range(3)]
    return captured(Regression(made_of([*layers, Layer(1, nn.Identity())])), rows(), name="normalized")


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("gpipe", (0, 1, 2)), ("1f1b", ()), ("zb-h1", (0, 1, 2)), ("2bw", (0, 2)), ("2bw-fresh", (1,))],
)
def test_buffers_see_every_micro_batch_once_and_in_order(schedule: str, recompute: tuple[int, ...]) -> None:
    model = normalized()
    setting = Setting(Plan((1, 2), 4, schedule, recompute=recompute))
    data = real_batches(12, 4, WIDTH)
    expected = model.given([state.name for state in model.graph.buffers])
    found = train_on_threads(model, setting, data)
    assert_equal(found, oracle(model, setting, data, buffers=expected))
    held = {name: tensor for trained in found for name, tensor in trained.buffers.items()}
    assert held.keys() == expected.keys()
    assert len(held) == 9
    for name, tensor in expected.items():
        assert torch.equal(held[name], tensor), name
        assert not torch.equal(tensor, model.weights[name])


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "2bw-fresh"])
def test_a_skipped_batch_leaves_no_trace_in_buffers(schedule: str) -> None:
    # Running statistics took the batch's NaN and kept it for ever, and every evaluation was NaN.
    model = normalized()
    setting = Setting(Plan((1, 2), 4, schedule), lr_factor=lambda _batch: 1.0)
    data = real_batches(12, 5, WIDTH)
    data[2]["x"][5, 1] = math.nan
    found = train_on_threads(model, setting, data)
    assert found[0].skipped == [False, False, True, False, False]
    held = {name: tensor for trained in found for name, tensor in trained.buffers.items()}
    assert all(bool(tensor.isfinite().all()) for tensor in held.values())
    if schedule == "1f1b":  # where no later batch begins before the verdict, it is as if it had never been
        without = train_on_threads(model, setting, [*data[:2], *data[3:]])
        expected = {name: tensor for trained in without for name, tensor in trained.buffers.items()}
        assert all(torch.equal(held[name], expected[name]) for name in expected)


class TiedEnds(nn.Module):
    """The first layer and the last share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.last.weight = self.first.weight
        self.middle = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.middle(torch.tanh(self.first(x))))
        return made


class AsTheyAre(Model):
    """A model whose own tensors are given, and not copies."""

    def given(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self.weights[name] for name in names}


def test_tied_weights_on_one_rank_that_are_given_as_one_tensor_are_stepped_once_each() -> None:
    # Both stages of the V took over the same tensor and both stepped it.
    model = captured(Regression(TiedEnds().double()), rows())
    uncopied = AsTheyAre(model.graph, model.weights, model.evaluation)
    setting, data = Setting(Plan((1, 2, 3), 4, "zbv")), real_batches(8, 4, WIDTH)
    before = {name: tensor.clone() for name, tensor in model.weights.items()}
    assert_equal(train_on_threads(uncopied, setting, data), oracle(model, setting, data), tolerance=1e-12)
    assert all(torch.equal(model.weights[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("recompute", ["stages", "units"])
def test_recomputing_copies_the_buffers_that_a_forward_writes_and_no_others(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks and tables that a forward only reads were copied too, once for every micro-batch."""
    layers = [Layer(WIDTH, nn.BatchNorm1d(WIDTH)) for _ in range(2)]
    module = Regression(made_of([*layers, Layer(1, nn.Identity())]))
    model = captured(Scaled(module), rows(), name="scaled")
    copied: list[str] = []
    untouched = segments.untouched

    def counted(buffers: Mapping[str, Tensor], writes: Iterable[str]) -> Mapping[str, Tensor]:
        found = untouched(buffers, writes)
        copied.extend(name for name in found if found[name] is not buffers[name])
        return found

    for place in (segments, stage):
        monkeypatch.setattr(place, "untouched", counted)
    units = tuple(range(len(units_of(model.graph))))
    plan = Plan((), 4, "1f1b", recompute=(0,))
    if recompute == "units":
        plan = Plan((), 4, "1f1b", recompute_units=units)
    train_on_threads(model, Setting(plan), real_batches(12, 1, WIDTH))
    written = [name for name in model.weights if name.rpartition(".")[2].startswith(("running", "num_"))]
    assert sorted(copied) == sorted(written * 4)


class Scaled(nn.Module):
    """Reads a buffer that nothing writes."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.table: Tensor
        self.register_buffer("table", torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.inside(x * self.table, wanted)
        return found


# --- what crosses


class Choosing(nn.Module):
    """Whole numbers that depend on weights, and a skip over all layers, cross every boundary behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        begin = torch.tanh(self.first(x))
        chosen = begin.argmax(-1)
        made = begin
        for layer in self.layers:
            made = made + torch.tanh(layer(made))
        return {"loss": functional.mse_loss(self.last(made * begin + self.table(chosen)), wanted)}


@cache
def choosing() -> Model:
    torch.manual_seed(0)
    return captured(Choosing().double(), rows(), name="choosing")


@pytest.mark.few(3)
@pytest.mark.parametrize(("schedule", "width"), [*zip(ALL, cycle([1, 2]), strict=False)])
def test_several_tensors_and_whole_numbers_cross_a_boundary(schedule: str, width: int) -> None:
    model = choosing()
    plan = Plan((2, 3, 4) if schedule in ("interleaved", "zbv") else (2, 4), 4, schedule, width=width)
    dtypes = {v.name: v.dtype for op in model.graph.operators for v in op.outputs if v is not None}
    crossing = [[dtypes[name] for name in units_of(model.graph)[cut].receives] for cut in plan.cuts]
    assert all(len(types) >= 3 and "int64" in types for types in crossing)
    setting = Setting(plan, clip_norm=0.5)
    data = real_batches(10 * width, 3, WIDTH)
    tolerance = max(tolerance_of(schedule), 1e-12)
    assert_equal(train_on_threads(model, setting, data), oracle(model, setting, data), tolerance=tolerance)


# --- chains


class Picky(nn.Module):
    """Takes one of two ways, by the numbers in its tensor; carries the numbers of its choices along."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = nn.Linear(WIDTH, WIDTH)
        self.negative = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, both: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, choices = both if isinstance(both, tuple) else (both, torch.zeros(len(both), dtype=torch.int64))
        goes_up = float(x.detach().sum()) > 0
        way = self.positive if goes_up else self.negative
        return x + self.dropout(torch.tanh(way(x))), choices + goes_up


class Counted(nn.Module):
    """Reads the choices too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        made: Tensor = self.linear(both[0]) * (1 + both[1]).unsqueeze(-1)
        return made


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("schedule", "recompute"), [*product(ALL, [()]), ("1f1b", (0, 1, 2)), ("2bw", (0, 1, 2)), ("zbv", (1, 2))]
)
def test_python_that_looks_at_numbers_runs_as_a_chain(schedule: str, recompute: tuple[int, ...]) -> None:
    """A weight that a micro-batch did not touch has no gradient from it, and none at all is not zero."""
    torch.manual_seed(1)
    drops = schedule != "1f1b-sliced"
    modules = made_of([*(Picky() for _ in range(5)), Counted()])
    for module in modules.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2 if drops else 0.0
    model = chained(modules, rows(), squared_error)
    plan = Plan((1, 2, 4) if schedule in ("interleaved", "zbv") else (2, 4), 4, schedule, recompute=recompute)
    if schedule == "1f1b-sliced":
        plan = Plan((2, 4), 4, schedule, num_sliced=0)  # what half of a micro-batch chooses is its own
    setting = Setting(plan)
    data = real_batches(8, 4, WIDTH)
    assert_equal(train_on_threads(model, setting, data), oracle(model, setting, data))


# --- an encoder and a decoder


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "width", "recompute"),
    [
        ("1f1b", 1, ()),
        ("gpipe", 2, ()),
        ("interleaved", 1, ()),
        ("zb-h1", 2, ()),
        ("2bw", 1, (0, 1, 2)),
        ("2bw-fresh", 2, (1,)),
    ],
)
def test_an_encoder_and_a_decoder_that_share_their_table(
    t5: Model, schedule: str, width: int, recompute: tuple[int, ...]
) -> None:
    """Three tensors cross the last boundary, one from the encoder; one matrix is used on three stages."""
    cuts = (2, 5, 8) if schedule == "interleaved" else (2, 6)
    setting = Setting(Plan(cuts, 4, schedule, width=width, recompute=recompute), clip_norm=0.5)
    data = [
        {"input_ids": batch["input_ids"], "labels": batch["labels"]} for batch in token_batches(8 * width, 3)
    ]
    assert_equal(train_on_threads(t5, setting, data), oracle(t5, setting, data), tolerance=1e-11)


@pytest.fixture(scope="module")
def t5() -> Model:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_decoder_layers=2,
        num_heads=2,
        dropout_rate=0.1,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    ids = torch.randint(32, (2, CONTEXT))
    return captured(
        transformers.T5ForConditionalGeneration(config).double(),
        {"input_ids": ids, "labels": ids.clone()},
        name=f"T5 {config.to_json_string()}",
        is_kept=True,
        count=lambda given: float((given["labels"] != -100).sum()),
    )


# --- the last linear layer and its loss as one operator


FUSED_CASES = [
    ("1f1b", "some", {}),
    ("zb-h1", "off", {}),
    ("2bw-fresh", "off", {"shard": "optimizer"}),
    ("gpipe", "all", {}),
    ("interleaved", "off", {}),
    ("zbv", "off", {}),
    ("1f1b", "off", {"shard": "weights"}),
    ("2bw", "off", {"compiles": True}),
]


@pytest.mark.parametrize(("schedule", "recompute", "more"), several(FUSED_CASES, 4))
def test_a_fused_loss_trains_as_the_models_own_operators(
    schedule: str, recompute: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways that it has: with few rows, and with many, of which a piece is 4 here."""
    if more.get("compiles"):
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        monkeypatch.setattr(segments, "cpp_compiler", lambda: "none is asked for")
    monkeypatch.setattr(fused_loss, "_LEAST_ROWS", 4)
    plain = tiny_text(tied=schedule != "zbv")
    found = fused_loss.fused(plain.graph, asked=True)
    assert found.reason is None
    width = 2 if "shard" in more else 1
    setting = Setting(plan_for(schedule, width=width, recompute=recompute), clip_norm=0.5, **more)
    data = token_batches(16 * width, 3)
    own = train_on_threads(plain, setting, data)
    for keeps in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(fused_operator, "keeps_logits", lambda *_, keeps=keeps, **__: keeps)
            trained = train_on_threads(replace(plain, graph=found.graph), setting, data)
        for one, other in zip(trained, own, strict=True):
            torch.testing.assert_close(one.losses, other.losses)
            torch.testing.assert_close(one.weights, other.weights)
