"""A stepper steps as the torch optimiser does that it is made of, and a trial step leaves no trace."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from bireme.errors import BiremeError
from bireme.profile.optimizers import is_hidden_matrix
from bireme.runtime import stepper as stepper_module
from bireme.runtime.optimizers import NamedTensors, OptimizerFactory, named_optimizer
from bireme.runtime.stepper import Stepper

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


def some(seed: int, without: str = "") -> dict[str, Tensor | None]:
    return {name: None if name == without else tensor for name, tensor in numbers(seed).items()}


class Plain:
    """A torch optimiser used as anybody would."""

    def __init__(self, weights: Mapping[str, Tensor], factory: OptimizerFactory) -> None:
        self.parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in weights.items()}
        made = factory([*self.parameters.items()])
        self.optimizers: list[Optimizer] = [made] if isinstance(made, Optimizer) else list(made)
        self.rates = [[group["lr"] for group in one.param_groups] for one in self.optimizers]

    def step(self, gradients: Mapping[str, Tensor | None], lr_factor: float = 1.0) -> None:
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
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
def test_a_step_is_the_optimisers_own_whatever_tensors_it_is_made_on(factory: OptimizerFactory) -> None:
    plain = Plain(numbers(0), factory)
    stepper = Stepper(numbers(0), factory)
    banks = [numbers(0), numbers(99)]
    for t in range(4):
        gradients = some(10 + t, without="layers.0.out.bias" if t == 1 else "")
        for name, tensor in banks[t % 2].items():
            banks[(t + 1) % 2][name].copy_(tensor)
        addresses = [tensor.data_ptr() for tensor in banks[(t + 1) % 2].values()]
        stepper.step(banks[(t + 1) % 2], gradients, lr_factor=1.0 / (1 + t), scale=0.5)
        halved = {name: None if g is None else g * 0.5 for name, g in gradients.items()}
        plain.step(halved, lr_factor=1.0 / (1 + t))
        assert_equal(banks[(t + 1) % 2], plain.parameters)
        assert addresses == [tensor.data_ptr() for tensor in banks[(t + 1) % 2].values()]
    assert_equal_states(
        stepper.state_dict(), {name: plain.state(name) for name in SHAPES if plain.state(name)}
    )


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
    stepper.trial(source, target, gradients, lr_factor=0.7, scale=0.5, gradient_scale=4.0)

    assert_equal(source, kept_source)
    assert_equal_states(stepper.state_dict(), kept_state)
    assert all(g is None or torch.equal(g, kept_gradients[name]) for name, g in gradients.items())  # type: ignore[arg-type]
    doubled = {name: None if g is None else g * 2.0 for name, g in gradients.items()}
    stepper.step(source, doubled, lr_factor=0.7)
    assert_equal(target, source)


@pytest.mark.parametrize("name", ["adamw", "sgd with momentum", "adamw, not fused", "muon", "asgd"])
def test_a_trial_in_small_chunks_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper_module, "CHUNK_ELEMENTS", 10)
    stepper = Stepper(numbers(0), FACTORIES[name])
    source, target = numbers(0), numbers(98)
    stepper.step(source, some(10), scale=0.5)
    stepper.trial(source, target, some(11), scale=0.5)
    stepper.step(source, some(11), scale=0.5)
    for key in SHAPES:
        torch.testing.assert_close(target[key], source[key], rtol=1e-14, atol=1e-14)


class Counting(optim.SGD):
    """An optimiser of somebody's own; counts its elements at every step."""

    def __init__(self, named: NamedTensors) -> None:
        super().__init__(named, lr=0.1)
        self.sizes: list[int] = []

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.sizes.append(sum(p.numel() for group in self.param_groups for p in group["params"]))
        super().step(closure)


def test_an_unknown_optimiser_gets_its_parameters_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper_module, "CHUNK_ELEMENTS", 10)
    made: list[Counting] = []

    def factory(named: NamedTensors) -> Optimizer:
        made.append(Counting(named))
        return made[-1]

    stepper = Stepper(numbers(0), factory)
    stepper.trial(numbers(0), numbers(1), some(10))
    assert made[-1].sizes == [66, 36, 24, 4 + 1]


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd with momentum"])
def test_short_gradients_step_float32_weights_and_try_short_ones(name: str) -> None:
    stepper = Stepper(numbers(0, torch.float32), FACTORIES[name])
    plain = Plain(numbers(0, torch.float32), FACTORIES[name])
    source = numbers(0, torch.float32)
    short = {key: tensor.bfloat16() for key, tensor in numbers(10).items()}
    target = {key: tensor.bfloat16() for key, tensor in numbers(98).items()}
    plain.step({key: tensor.float() * 0.3 for key, tensor in short.items()})
    stepper.trial(source, target, short, scale=0.3)
    stepper.step(source, short, scale=0.3)
    assert_equal(source, plain.parameters)
    assert_equal(target, {key: parameter.bfloat16() for key, parameter in plain.parameters.items()})
    assert all(
        value.dtype == torch.float32 for state in stepper.state_dict().values() for value in state.values()
    )


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
    for _, stepper in after:
        stepper.load_state_dict(state)
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
    other.load_state_dict(stepper.state_dict())
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
    stepper.step({}, {}, scale=0.5)
    stepper.trial({}, {}, {})
    stepper.load_state_dict({"elsewhere": {"step": torch.ones(())}})
    assert stepper.state_dict() == {}


@pytest.mark.parametrize(
    ("factory", "complaint"),
    [
        (lambda named: optim.SGD(named[1:], lr=0.1), r"No optimiser holds the parameter tokens\.weight"),
        (lambda named: optim.SGD([tensor.detach() for _, tensor in named], lr=0.1), r"shape \(11, 6\)"),
        (lambda named: [optim.SGD(named, lr=0.1), optim.SGD(named, lr=0.1)], "another one holds too"),
        (optim.LBFGS, "LBFGS steps all parameters as one"),
    ],
    ids=["left out", "not ours", "twice", "lbfgs"],
)
def test_optimisers_that_cannot_be_used_are_refused(factory: OptimizerFactory, complaint: str) -> None:
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
            "momentum of 1.0 cannot be: it is 0 or more and less than 1",
        ),
    ],
)
def test_optimisers_that_cannot_be_are_refused(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BiremeError, match=complaint):
        named_optimizer(**arguments)
