"""A stepper steps as the torch optimizer does that it is made of, and a trial step leaves no trace."""

import copy
import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from platform import machine
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Adam, AdamW, Optimizer

from bireme.compiled import IS_COMPILED
from bireme.errors import BiremeError
from bireme.profile.optimizers import OPTIMIZERS, is_hidden_matrix
from bireme.profile.trace import StorageTrace
from bireme.runtime import trial as trial_module
from bireme.runtime.settings import named_optimizer
from bireme.runtime.stepper import NamedTensors, OptimizerFactory, Stepper
from bireme.runtime.trial import Trials

SHAPES: dict[str, tuple[int, ...]] = {
    "tokens.weight": (11, 6),
    "layers.0.query.weight": (6, 6),
    "layers.0.out.weight": (4, 6),
    "layers.0.out.bias": (4,),
    "scale": (),
}

FACTORIES: dict[str, OptimizerFactory] = {
    "sgd": lambda named: optim.SGD(named, lr=0.1),
    "sgd with momentum": named_optimizer("sgd", lr=0.1, weight_decay=0.1),
    "adam": named_optimizer("adam", lr=0.01),
    "adamw": named_optimizer("adamw", lr=0.01, weight_decay=0.1),
    "adamw, not fused": lambda named: optim.AdamW(named, lr=0.01, amsgrad=True),
    "muon": named_optimizer("muon", lr=0.01),
    "rmsprop": lambda named: optim.RMSprop(named, lr=0.01, centered=True),
    "adagrad": lambda named: optim.Adagrad(named, lr=0.01),
    "nadam": lambda named: optim.NAdam(named, lr=0.01),
    "asgd": lambda named: optim.ASGD(named, lr=0.01),
}

every_factory = pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES.keys())


def numbers(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def some(seed: int, without: str = "") -> dict[str, Tensor]:
    return {name: tensor for name, tensor in numbers(seed).items() if name != without}


class Plain:
    """A torch optimizer used as anybody would."""

    def __init__(self, weights: Mapping[str, Tensor], factory: OptimizerFactory) -> None:
        self.parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in weights.items()}
        made = factory([*self.parameters.items()])
        self.optimizers: list[Optimizer] = [made] if isinstance(made, Optimizer) else list(made)
        self.rates = [[group["lr"] for group in one.param_groups] for one in self.optimizers]

    def step(self, gradients: Mapping[str, Tensor], lr_factor: float = 1.0) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * lr_factor
            optimizer.step()

    def state(self, name: str) -> dict[str, Any]:
        return next(
            (
                dict(one.state[self.parameters[name]])
                for one in self.optimizers
                if one.state.get(self.parameters[name])
            ),
            {},
        )


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].detach(), tensor.detach()), name


def assert_equal_states(
    found: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Mapping[str, Any]]
) -> None:
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        assert found[name].keys() == state.keys()
        for key, value in state.items():
            if isinstance(value, Tensor):
                assert torch.equal(found[name][key], value), (name, key)
            else:
                assert found[name][key] == value, (name, key)


@every_factory
def test_a_step_is_the_optimizers_own_whatever_tensors_it_is_made_on(factory: OptimizerFactory) -> None:
    plain = Plain(numbers(0), factory)
    stepper = Stepper(numbers(0), factory)
    banks = [numbers(0), numbers(99)]
    for t in range(4):
        gradients = some(10 + t, without="layers.0.out.bias" if t == 1 else "")
        for name, tensor in banks[t % 2].items():
            banks[(t + 1) % 2][name].copy_(tensor)
        addresses = [tensor.data_ptr() for tensor in banks[(t + 1) % 2].values()]
        stepper.step(banks[(t + 1) % 2], gradients, lr_factor=1.0 / (1 + t))
        plain.step(gradients, lr_factor=1.0 / (1 + t))
        assert_equal(banks[(t + 1) % 2], plain.parameters)
        assert addresses == [tensor.data_ptr() for tensor in banks[(t + 1) % 2].values()]
    assert_equal_states(
        stepper.state_dict(), {name: plain.state(name) for name in SHAPES if plain.state(name)}
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_by_name_is_made_and_steps_without_torchs_compiler(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that comes to a run under way would import it for a second before its first batch."""
    plain, gradients = Plain(numbers(0), factory := named_optimizer(name, lr=0.02)), some(10)
    plain.step(gradients)
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    monkeypatch.setattr(sys, "meta_path", [_WithoutCompiler(), *sys.meta_path])
    bank = numbers(0)
    Stepper(bank, factory).step(bank, gradients)
    assert_equal(bank, plain.parameters)


class _WithoutCompiler(MetaPathFinder):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        assert fullname != "torch._dynamo"


@pytest.mark.few(10)
@every_factory
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_trial_is_a_step_that_never_happened(factory: OptimizerFactory, num_steps: int) -> None:
    stepper = Stepper(numbers(0), factory)
    source = numbers(0)
    for t in range(num_steps):
        stepper.step(source, some(10 + t))
    gradients = some(50, without="scale")
    kept_source, kept_gradients = copy.deepcopy(source), copy.deepcopy(gradients)
    kept_state = copy.deepcopy(stepper.state_dict())
    target = numbers(98)
    Trials(stepper).make(source, target, gradients, lr_factor=0.7, factor=2.0)

    assert_equal(source, kept_source)
    assert_equal_states(stepper.state_dict(), kept_state)
    assert_equal(gradients, kept_gradients)
    doubled = {name: g * 2.0 for name, g in gradients.items()}
    stepper.step(source, doubled, lr_factor=0.7)
    assert_equal(target, source)


@pytest.mark.parametrize("name", ["adamw", "sgd with momentum", "adamw, not fused", "muon", "asgd"])
def test_a_trial_in_small_chunks_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "CHUNK_ELEMENTS", 10)
    stepper = Stepper(numbers(0), FACTORIES[name])
    trials = Trials(stepper)
    source, target = numbers(0), numbers(98)
    stepper.step(source, some(10))
    for seed in (11, 12):  # memory for the copies is made at the first and used again at the second
        trials.make(source, target, some(seed), lr_factor=1.0, factor=1.0)
    stepper.step(source, some(12))
    for key in SHAPES:
        torch.testing.assert_close(target[key], source[key], rtol=1e-14, atol=1e-14)


class Counting(optim.SGD):
    """An optimizer of somebody's own; counts its elements at every step."""

    def __init__(self, named: NamedTensors) -> None:
        super().__init__(named, lr=0.1)
        self.sizes: list[int] = []

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.sizes.append(sum(p.numel() for group in self.param_groups for p in group["params"]))
        super().step(closure)


def test_an_unknown_optimizer_gets_all_its_parameters_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "CHUNK_ELEMENTS", 10)
    made: list[Counting] = []

    def factory(named: NamedTensors) -> Optimizer:
        made.append(Counting(named))
        return made[-1]

    stepper = Stepper(numbers(0), factory)
    Trials(stepper).make(numbers(0), numbers(1), some(10), lr_factor=1.0, factor=1.0)
    assert made[-1].sizes == [66 + 36 + 24 + 4 + 1]


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd with momentum"])
def test_a_trial_of_float32_weights_may_be_written_in_bfloat16(name: str) -> None:
    stepper = Stepper(numbers(0, torch.float32), FACTORIES[name])
    source, gradients = numbers(0, torch.float32), numbers(10, torch.float32)
    target = {key: tensor.bfloat16() for key, tensor in numbers(98).items()}
    Trials(stepper).make(source, target, gradients, lr_factor=1.0, factor=1.0)
    stepper.step(source, gradients)
    assert_equal(target, {key: tensor.bfloat16() for key, tensor in source.items()})


def test_what_is_like_a_parameter_lies_in_an_arena_of_its_kind() -> None:
    stepper = Stepper(numbers(0), FACTORIES["adamw"])
    weights = numbers(0)
    for t in range(3):
        stepper.step(weights, some(10 + t, without="tokens.weight" if t == 0 else ""))
    (parameter_group,) = stepper.parameter_groups
    states = stepper.state_dict()
    for key in ("exp_avg", "exp_avg_sq"):
        own = {name: states[name][key] for name in SHAPES if SHAPES[name]}
        storages = {tensor.untyped_storage().data_ptr() for tensor in own.values()}
        assert len(storages) == 1
        assert all(own[name].storage_offset() == parameter_group.slots[name].begin for name in own)


def test_the_first_step_takes_no_more_memory_than_what_stays() -> None:
    # State was made apart and then moved, so it lay twice for a moment.
    stepper = Stepper(numbers(0), FACTORIES["adamw"])
    weights, gradients = numbers(0), some(10)
    trace = StorageTrace(device="cpu")
    with trace:
        stepper.step(weights, gradients)
    given_bytes = sum(one.nbytes for one in (*weights.values(), *gradients.values()))
    assert trace.peak_bytes == given_bytes + stepper.state_bytes()


class Remembering(optim.SGD):
    """Keeps numbers in its groups, as Prodigy and D-adaptation do."""

    def __init__(self, named: NamedTensors) -> None:
        super().__init__(named, lr=0.1)
        for group in self.param_groups:
            group.update(k=0, d=1.0, history=())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["d"] *= 0.5
            group["history"] = (*group["history"], group["k"])
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["d"])


def test_what_an_optimizer_remembers_in_its_groups_lasts_and_is_saved() -> None:
    # Every step used to see fresh groups: k was 1 at each, silently.
    stepper, plain = Stepper(numbers(0), Remembering), Plain(numbers(0), Remembering)
    weights = numbers(0)
    trials = Trials(stepper)
    for t in range(3):
        trials.make(weights, numbers(98), some(50 + t), lr_factor=1.0, factor=1.0)
        stepper.step(weights, some(10 + t))
        plain.step(some(10 + t))
    assert_equal(weights, plain.parameters)
    saved = stepper.state_dict()
    assert saved["scale"] == {"group.k": 3, "group.d": 0.125, "group.history": (1, 2, 3)}
    as_tensors = {
        name: {key: torch.tensor(value) for key, value in state.items()} for name, state in saved.items()
    }
    resumed = Stepper(numbers(0), Remembering)
    resumed.load_state_dict(as_tensors, weights)
    assert resumed.state_dict() == saved


class Switching(optim.SGD):
    """Has other weights for evaluation, as schedule-free optimizers have."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@every_factory
def test_state_goes_by_name_and_so_from_one_cut_of_the_model_to_another(factory: OptimizerFactory) -> None:
    names = list(SHAPES)

    def steppers(cut: int, weights: dict[str, Tensor]) -> list[tuple[list[str], Stepper]]:
        parts = [names[:cut], names[cut:]]
        return [(part, Stepper({name: weights[name] for name in part}, factory)) for part in parts]

    def step(over: list[tuple[list[str], Stepper]], weights: dict[str, Tensor], seed: int) -> None:
        gradients = some(seed)
        for part, stepper in over:
            own = {name: weights[name] for name in part}
            stepper.step(own, {name: gradients[name] for name in part}, lr_factor=0.5)

    weights = numbers(0)
    before = steppers(2, weights)
    step(before, weights, 10)
    state = {name: entry for _, stepper in before for name, entry in stepper.state_dict().items()}
    after = steppers(3, weights)
    for part, stepper in after:
        stepper.load_state_dict(state, {name: weights[name] for name in part})
    resumed = copy.deepcopy(weights)
    step(before, weights, 11)
    step(after, resumed, 11)
    assert_equal(resumed, weights)


def test_loading_takes_copies_and_forgets_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = FACTORIES["adamw"]
    stepper, other = Stepper(numbers(0), factory), Stepper(numbers(0), factory)
    stepper.step(numbers(0), some(10, without="scale"))
    saved = copy.deepcopy(stepper.state_dict())
    other.step(numbers(0), some(11))
    other.load_state_dict(stepper.state_dict(), numbers(0))
    other.step(numbers(0), some(12))
    assert_equal_states(stepper.state_dict(), saved)
    assert float(other.state_dict()["scale"]["step"]) == 1


def test_state_bytes_are_two_numbers_a_parameter_and_a_step_counter_for_adam() -> None:
    stepper = Stepper(numbers(0, torch.float32), FACTORIES["adamw"])
    assert stepper.state_bytes() == 0
    stepper.step(numbers(0, torch.float32), numbers(1, torch.float32))
    elements = sum(tensor.numel() for tensor in numbers(0).values())
    assert stepper.state_bytes() == 8 * elements + 4 * len(SHAPES)


def test_a_stage_without_parameters_has_nothing_to_step() -> None:
    stepper = Stepper({}, FACTORIES["adamw"])
    stepper.step({}, {})
    Trials(stepper).make({}, {}, {}, lr_factor=1.0, factor=1.0)
    stepper.load_state_dict({"elsewhere": {"step": torch.ones(())}}, {})
    assert stepper.state_dict() == {}


@pytest.mark.parametrize(
    ("factory", "complaint"),
    [
        (lambda named: optim.SGD(named[1:], lr=0.1), r"No optimizer holds the parameter tokens\.weight"),
        (lambda named: optim.SGD([tensor.detach() for _, tensor in named], lr=0.1), r"shape \(11, 6\)"),
        (lambda named: [optim.SGD(named, lr=0.1), optim.SGD(named, lr=0.1)], "another one holds too"),
        (optim.LBFGS, "LBFGS steps all parameters together"),
        (lambda named: Switching(named, lr=0.1), "Switching keeps separate weights for training and eval"),
    ],
    ids=["left out", "not ours", "twice", "lbfgs", "schedule-free"],
)
def test_optimizers_that_cannot_be_used_are_refused(factory: OptimizerFactory, complaint: str) -> None:
    with pytest.raises(BiremeError, match=complaint):
        Stepper(numbers(0), factory)


def made(name: str, **options: Any) -> list[Optimizer]:
    own = [(key, nn.Parameter(tensor)) for key, tensor in numbers(0).items()]
    found = named_optimizer(name, lr=0.1, **options)([*own])
    return [found] if isinstance(found, Optimizer) else list(found)


def names_in(optimizer: Optimizer) -> dict[str, float]:
    return {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}


def test_only_parameters_with_two_axes_decay() -> None:
    (optimizer,) = made("adamw", weight_decay=0.2)
    decays = names_in(optimizer)
    assert decays == {name: 0.2 if len(shape) >= 2 else 0.0 for name, shape in SHAPES.items()}
    (optimizer,) = made("sgd", weight_decay=0.2, no_decay_1d=False)
    assert set(names_in(optimizer).values()) == {0.2}


def test_muon_takes_matrices_inside_the_layers_and_adamw_the_rest() -> None:
    muon, rest = made("muon", rest_lr=0.01)
    assert isinstance(muon, optim.Muon)
    assert set(names_in(muon)) == {"layers.0.query.weight", "layers.0.out.weight"}
    assert isinstance(rest, optim.AdamW)
    assert set(names_in(rest)) == {"tokens.weight", "layers.0.out.bias", "scale"}
    assert [muon.param_groups[0]["lr"], rest.param_groups[0]["lr"]] == [0.1, 0.01]
    assert [type(one) for one in made("muon", muon_takes=lambda _name, _tensor: False)] == [optim.AdamW]
    assert not is_hidden_matrix("2.weight", 2)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"name": "adamv", "lr": 0.1}, "Did you mean 'adamw'|Did you mean 'adam'"),
        ({"name": "adam", "lr": -0.1}, "learning rate of -0.1"),
        ({"name": "adam", "lr": float("nan")}, "learning rate of nan"),
        (
            {"name": "sgd", "lr": 0.1, "momentum": 1.0},
            "cannot have a momentum of 1.0: it must be 0 or more and less than 1",
        ),
    ],
)
def test_optimizers_that_cannot_be_are_refused(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BiremeError, match=complaint):
        named_optimizer(**arguments)


@pytest.mark.skipif(not IS_COMPILED, reason="needs the extra: install bireme[codecs]")
@pytest.mark.parametrize("kind", ["adamw", "adam", "adam that decays", "a quick average"])
def test_a_compiled_trial_has_the_bits_of_a_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On x86; elsewhere torch's compiler may round some products separately.

    All sizes are multiples of 16: torch steps the remaining elements one by one, with another rounding.
    """
    monkeypatch.setattr(trial_module, "LEAST_COMPILED", 1)
    betas = (0.3 if kind == "a quick average" else 0.9, 0.99)

    def factory(named: list[tuple[str, Tensor]]) -> Optimizer:
        make = AdamW if kind in ("adamw", "a quick average") else Adam
        return make(named, lr=0.02, betas=betas, weight_decay=0.0 if kind == "adam" else 0.1, fused=True)

    generator = torch.Generator().manual_seed(4)
    source = {
        "weight": torch.randn(64, 48, generator=generator),
        "bias": torch.randn(32, generator=generator),
    }
    stepper = Stepper(source, factory)
    target = {name: torch.empty_like(tensor) for name, tensor in source.items()}
    for _ in range(3):
        gradients = {name: torch.randn(one.shape, generator=generator) for name, one in source.items()}
        Trials(stepper).make(source, target, gradients, lr_factor=0.5, factor=2.0)
        stepper.step(source, {name: 2.0 * one for name, one in gradients.items()}, lr_factor=0.5)
        rounding = 0.0 if machine() == "x86_64" else 1e-5
        torch.testing.assert_close(target, source, rtol=rounding, atol=rounding)
    trials = Trials(stepper)
    trials.make(source, target, gradients, lr_factor=1.0, factor=1.0)
    assert trials.num_bytes == 0
