"""The fast simulation of update rules against the oracle of the engine, and against plain loops."""

import copy
import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.delay_study.coded import CodedCuts, codecs_named
from benchmarks.delay_study.rules import RULES, rule_named
from benchmarks.delay_study.simulation import Pipelining, Simulation, stage_of_parameter
from bireme.codec import through
from bireme.errors import BiremeError
from bireme.model.gpt import GPT, GPTConfig
from bireme.model.stage import StageFunction
from bireme.runtime.settings import named_optimizer
from bireme.runtime.stepper import OptimizerFactory
from bireme.schedule.catalogue import generate
from bireme.schedule.instruction import Kind
from bireme.schedule.program import Rule
from tests.support.oracles import Microbatch, Update, run_oracle, seen_by
from tests.support.small_models import CONTEXT, VOCAB, gpt

pytestmark = pytest.mark.slow

NUM_LAYERS, NUM_BATCHES = 2, 5
CLIP = 0.6
Weights = dict[str, Tensor]


def lr(batch: int) -> float:
    return 1.0 / (1 + 0.25 * batch)


def factory_of(optimizer: str) -> OptimizerFactory:
    return named_optimizer(optimizer, lr=0.02, weight_decay=0.1)


def model_of(dtype: torch.dtype = torch.float64) -> GPT:
    """The GPT that the engine's tests train too, with the same weights."""
    model = GPT(GPTConfig(NUM_LAYERS, 16, 2, vocab=VOCAB, context=CONTEXT, tied=False)).to(dtype)
    model.load_state_dict(gpt("layers=2,tied=false").weights)
    return model


def batch_of(number: int, num_samples: int = 16) -> Tensor:
    return torch.randint(VOCAB, (num_samples, CONTEXT), generator=torch.Generator().manual_seed(number))


def simulated(
    rule: str, optimizer: str, pipelining: Pipelining, clip_norm: float | None = CLIP
) -> tuple[list[float], list[Weights]]:
    short = pipelining.bank_dtype is not None
    simulation = Simulation(
        model_of(torch.float32 if short else torch.float64),
        rule_named(rule),
        pipelining,
        factory_of(optimizer),
        num_batches=NUM_BATCHES,
        clip_norm=clip_norm,
        lr_factor=lr,
    )
    losses, weights = [], []
    for number in range(NUM_BATCHES):
        losses.append(simulation.train(batch_of(number)))
        weights.append({name: tensor.clone() for name, tensor in simulation.weights().items()})
    return losses, weights


def judged(rule: Rule, optimizer: str, pipelining: Pipelining) -> list[Update]:
    """What the oracle of the engine makes of it, micro-batch by micro-batch."""
    model = gpt("layers=2,tied=false")
    d, m = pipelining.num_stages, pipelining.num_microbatches
    stages = [
        StageFunction(
            model.graph,
            [unit for unit in model.units if stage_of_parameter(unit.parameters[0], NUM_LAYERS, d) == stage],
        )
        for stage in range(d)
    ]
    short = pipelining.bank_dtype is not None
    batches = [
        [Microbatch({"input_ids": part, "labels": part}) for part in batch_of(number).chunk(m)]
        for number in range(NUM_BATCHES)
    ]
    program = generate(
        "2bw-fresh",
        num_stages=d,
        num_microbatches=m,
        num_batches=NUM_BATCHES,
        lookahead=pipelining.lookahead,
    )
    return run_oracle(
        rule,
        stages,
        {name: tensor.float() if short else tensor for name, tensor in model.weights.items()},
        batches,
        factory_of(optimizer),
        clip_norm=CLIP,
        lr_factor=lr,
        seen=seen_by(program),
        compute_dtype=pipelining.bank_dtype,
    )


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=0.0, atol=tolerance), name


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipelining", "optimizer"),
    [
        (Pipelining(2, 8), "adamw"),
        (Pipelining(4, 8, lookahead=2), "adamw"),
        (Pipelining(4, 4), "adamw"),
        (Pipelining(4, 4), "sgd"),
        (Pipelining(4, 4), "muon"),
    ],
)
@pytest.mark.parametrize("rule", ["synchronous", "2bw", "2bw-fresh"])
def test_the_simulation_is_what_the_engine_would_do(
    rule: str, pipelining: Pipelining, optimizer: str
) -> None:
    engine_rule = {"synchronous": Rule.SYNCHRONOUS, "2bw": Rule.DELAYED, "2bw-fresh": Rule.FRESH}[rule]
    losses, weights = simulated(rule, optimizer, pipelining)
    updates = judged(engine_rule, optimizer, pipelining)
    assert max(update.norm for update in updates) > CLIP
    assert losses == pytest.approx([update.loss for update in updates], abs=1e-12)
    for found, update in zip(weights, updates, strict=True):
        assert_close(found, update.weights, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["2bw", "2bw-fresh"])
def test_short_banks_have_masters_that_are_stepped(rule: str) -> None:
    """Each micro-batch's gradient is rounded to sixteen bits by itself, so that even they agree."""
    pipelining = Pipelining(4, 8, torch.bfloat16)
    engine_rule = Rule.DELAYED if rule == "2bw" else Rule.FRESH
    losses, weights = simulated(rule, "adamw", pipelining)
    updates = judged(engine_rule, "adamw", pipelining)
    assert losses == pytest.approx([update.loss for update in updates], abs=2e-2)
    for found, update in zip(weights, updates, strict=True):
        mean = [float((found[name] - tensor).abs().mean()) for name, tensor in update.weights.items()]
        assert max(mean) < 2e-4


class Plain:
    """A model, its optimizer and a history, with nothing clever about them."""

    def __init__(self, optimizer: str, pipelining: Pipelining) -> None:
        self.model = model_of()
        self.pipelining = pipelining
        self.start = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        self.parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in self.start.items()}
        made = factory_of(optimizer)([*self.parameters.items()])
        self.optimizers = list(made) if isinstance(made, Sequence) else [made]
        self.rates = [[group["lr"] for group in one.param_groups] for one in self.optimizers]
        self.factor = 1.0

    def microbatch_gradients(self, weights: Weights, number: int) -> list[Weights]:
        """Of each micro-batch's own mean loss."""
        found = []
        for part in batch_of(number).chunk(self.pipelining.num_microbatches):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
            loss = functional_call(self.model, leaves, (part, part))["loss"]
            found.append(dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True)))
        return found

    def stepped(self, gradient: Weights, batch: int) -> Weights:
        for name, parameter in self.parameters.items():
            parameter.grad = gradient[name]
        for one, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(one.param_groups, rates, strict=True):
                group["lr"] = rate * lr(batch)
            one.step()
        return self.weights()

    def tried(self, gradient: Weights, batch: int) -> Weights:
        return copy.deepcopy(self).stepped({name: self.factor * one for name, one in gradient.items()}, batch)

    def weights(self) -> Weights:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def put(self, weights: Weights) -> None:
        for name, parameter in self.parameters.items():
            parameter.data = weights[name].clone()

    def stage(self, name: str) -> int:
        return stage_of_parameter(name, NUM_LAYERS, self.pipelining.num_stages)


def mean(gradients: Sequence[Weights]) -> Weights:
    return {name: sum(one[name] for one in gradients) / len(gradients) for name in gradients[0]}  # type: ignore[misc]  # a sum of tensors is a tensor where there are any


def clipped_apart(
    rule: str, stage: int, squares: list[float], last: list[float], plain: Plain, last_factor: float
) -> float:
    """What a stage's gradient is multiplied with, by the squares of all stages' norms in two batches."""
    if rule == "apart":
        sizes = [0] * len(squares)
        for name, tensor in plain.start.items():
            sizes[plain.stage(name)] += tensor.numel()
        limit = CLIP * math.sqrt(sizes[stage] / sum(sizes))
        return min(1.0, limit / (math.sqrt(squares[stage]) + 1e-6 * limit / CLIP))
    if rule == "apart, guessed" and stage:
        guess = math.sqrt(sum(squares[stage:]) * (sum(last) / sum(last[stage:]) if last else 1.0))
        return min(1.0, CLIP / (guess + 1e-6))
    return last_factor if rule == "apart, norm before" and stage else plain.factor


def plain_loop(rule: str, optimizer: str, pipelining: Pipelining) -> list[Weights]:
    """W after every batch, by the definitions of the rules, name by name."""
    plain = Plain(optimizer, pipelining)
    d, m = pipelining.num_stages, pipelining.num_microbatches
    head = rule.split("+")[0]
    last_synchronous = round(0.2 * NUM_BATCHES) if "+warm-up" in rule else 0
    history = [plain.weights()]
    steps: list[Weights] = []
    zero = {name: torch.zeros_like(tensor) for name, tensor in plain.start.items()}
    before, trial = zero, plain.weights()
    last_squares: list[float] = []
    for t in range(NUM_BATCHES):
        is_current = t <= last_synchronous or head == "synchronous" or head.startswith("apart")
        if is_current:
            used = history[t]
        elif head == "2bw":
            used = history[t - 1]
        elif head == "repeat":
            older = history[max(t - 2, 0)]
            used = {name: 2 * tensor - older[name] for name, tensor in history[t - 1].items()}
        else:
            used = trial
        apart = plain.microbatch_gradients(used, t)
        if "+switch" in rule:
            apart = apart[:d] + plain.microbatch_gradients(history[t], t)[d:]
        whole = mean(apart)
        guess = {}
        for name in whole:
            k = m - (d - 1 - plain.stage(name))
            seen = mean([{name: one[name]} for one in apart[:k]])[name]
            guess[name] = {
                "momentum": zero[name],
                "last-gradient": before[name],
                "2bw-fresh": seen,
                "fresh": seen,
                "fresh-zero": seen * (k / m),
                "fresh-last": seen * (k / m) + before[name] * (1 - k / m),
            }.get(head, zero[name])
        trial = plain.tried(guess, t)
        norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in whole.values()))
        last_factor, plain.factor = plain.factor, min(1.0, CLIP / (norm + 1e-6))
        squares = [
            sum(float(one.square().sum()) for name, one in whole.items() if plain.stage(name) == stage)
            for stage in range(d)
        ]
        factors = {
            name: clipped_apart(head, plain.stage(name), squares, last_squares, plain, last_factor)
            for name in whole
        }
        last_squares = squares
        after = plain.stepped({name: one * factors[name] for name, one in whole.items()}, t)
        steps.append({name: tensor - history[t][name] for name, tensor in after.items()})
        if "+feedback" in rule and not is_current:
            late = {name: 1.0 if head == "2bw" else (d - 1 - plain.stage(name)) / m for name in after}
            after = {
                name: tensor + late[name] * (steps[t][name] - steps[t - 1][name])
                for name, tensor in after.items()
            }
            plain.put(after)
        history.append(after)
        before = whole
    return history[1:]


@pytest.mark.few(4)
@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_every_rule_is_what_its_definition_says(rule: str) -> None:
    pipelining = Pipelining(4, 8)
    _, weights = simulated(rule, "adamw", pipelining)
    for found, wanted in zip(weights, plain_loop(rule, "adamw", pipelining), strict=True):
        assert_close(found, wanted, 1e-10)


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "shape"), [("sgd", (2, 4)), ("muon", (4, 4))])
@pytest.mark.parametrize("rule", [rule.name for rule in RULES if "warm-up" not in rule.name])
def test_rules_are_the_same_for_other_optimizers_and_depths(
    rule: str, shape: tuple[int, int], optimizer: str
) -> None:
    pipelining = Pipelining(*shape)
    _, weights = simulated(rule, optimizer, pipelining)
    for found, wanted in zip(weights, plain_loop(rule, optimizer, pipelining), strict=True):
        assert_close(found, wanted, 1e-10)


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5])
@pytest.mark.parametrize(("d", "m"), [(2, 4), (4, 8), (4, 4)])
def test_what_stages_have_seen_is_what_programs_say(d: int, m: int, lookahead: int) -> None:
    program = generate(
        "2bw-fresh", num_stages=d, num_microbatches=m, num_batches=4, lookahead=min(lookahead, m - d)
    )
    pipelining = Pipelining(d, m, lookahead=min(lookahead, m - d))
    assert {stage: m - pipelining.unseen(stage) for stage in range(d)} == {
        stage: count for (stage, batch), count in seen_by(program).items() if batch == 2
    }


def test_fresh_on_one_stage_is_synchronous_but_for_the_clipping() -> None:
    """The last stage has seen everything, all but the norm."""
    _, fresh = simulated("2bw-fresh", "adamw", Pipelining(1, 4), None)
    _, plain = simulated("synchronous", "adamw", Pipelining(1, 4), None)
    assert_close(fresh[-1], plain[-1], 1e-12)


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize(("d", "m"), [(2, 8), (4, 11), (4, 16)])
def test_a_switch_waits_for_nothing_that_is_not_done_and_needs_two_banks(
    d: int, m: int, lookahead: int
) -> None:
    """By the order of every stage: W(t) is made before the switch, and V(t) is over before V(t+1) is made."""
    pipelining = Pipelining(d, m, lookahead=lookahead)
    n = pipelining.num_early
    assert m >= 2 * n - 1
    program = generate(
        "2bw-fresh", num_stages=d, num_microbatches=m, num_batches=4, lookahead=pipelining.lookahead
    )
    for track in program.tracks:
        places = {(step.kind, step.batch, step.microbatch): place for place, step in enumerate(track)}
        for batch in (1, 2):
            last_before = places[Kind.BACKWARD, batch - 1, m - 1]
            assert last_before < places[Kind.FORWARD, batch, n]
            last_early = max(places[Kind.BACKWARD, batch, microbatch] for microbatch in range(n))
            assert last_early < places[Kind.TRIAL, batch + 1, None]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_codecs_lie_between_the_stages_of_the_simulation(num_stages: int) -> None:
    """Also where a stage ends amid a layer: the same loss and gradients as of stages with cuts between."""
    codecs = codecs_named("topk:0.5/topk:0.5")
    model, graph, ids = model_of(), gpt("layers=2,tied=false"), batch_of(0, 4)
    cuts = CodedCuts(model, num_stages)
    plain = float(model(ids, ids)["loss"].detach())
    cuts.codecs = codecs
    loss = model(ids, ids)["loss"]
    loss.backward()
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in graph.weights.items()}
    values = {"input_ids": ids, "labels": ids}
    for stage in range(num_stages):
        own = [
            unit
            for unit in graph.units
            if stage_of_parameter(unit.parameters[0], NUM_LAYERS, num_stages) == stage
        ]
        function = StageFunction(graph.graph, own)
        received = {name: through(codecs, values[name]) for name in function.receives}
        values |= function(leaves, {}, {**values, **received})
    torch.autograd.backward([values["loss"]])
    assert float(loss.detach()) == float(values["loss"].detach()) != plain
    for name, parameter in model.named_parameters():
        found, wanted = parameter.grad, leaves[name].grad
        assert found is not None
        assert wanted is not None
        assert torch.allclose(found, wanted, rtol=0.0, atol=1e-12), name


def test_too_few_microbatches_are_refused() -> None:
    with pytest.raises(BiremeError, match="3 micro-batches cannot keep 4 stages busy"):
        Pipelining(4, 3)


def test_stages_have_equal_numbers_of_half_layers() -> None:
    names = [name for name, _ in GPT(GPTConfig(4, 8, 1, 16, 8, tied=False)).named_parameters()]
    for num_stages in (1, 2, 4, 8):
        stages = [stage_of_parameter(name, 4, num_stages) for name in names]
        assert stages == sorted(stages)
        assert set(stages) == set(range(num_stages))
        halves = {
            (stage_of_parameter(name, 4, num_stages), name.split("_norm")[0])
            for name in names
            if "_norm." in name
        }
        assert {sum(stage == one for stage, _ in halves) for one in range(num_stages)} == {8 // num_stages}


def test_a_model_whose_head_is_its_embedding_is_refused() -> None:
    model = GPT(GPTConfig(2, 8, 1, 16, 8, tied=False))
    model.tokens, model.head = model.head, model.tokens  # type: ignore[assignment]  # out of order on purpose
    odd = nn.Module()
    odd.layers, odd.tokens = model.layers, model.tokens
    odd.config = model.config  # type: ignore[assignment]  # a module's attributes are tensors and modules
    with pytest.raises(BiremeError, match="comes after one of stage"):
        Simulation(odd, rule_named("2bw"), Pipelining(2, 2), factory_of("sgd"), num_batches=1)  # type: ignore[arg-type]  # no GPT on purpose


def test_a_run_that_diverges_says_so() -> None:
    simulation = Simulation(
        model_of(), rule_named("2bw"), Pipelining(2, 2), named_optimizer("sgd", lr=1e200), num_batches=3
    )
    assert [math.isfinite(simulation.train(batch_of(number))) for number in range(3)][-1] is False
