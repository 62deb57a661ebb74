"""How a pipeline trains, besides its model and its plan."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from bireme.codec.description import LinkCodecs
from bireme.codec.sum_description import DENSE, GradientForm, SumCodec, parse_gradient, parse_sum_codec
from bireme.devices import KINDS
from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.stage import Resolve, torch_operator
from bireme.profile.optimizers import check_optimizer, is_hidden_matrix
from bireme.runtime.balancer import Sharing
from bireme.runtime.exchange.averages import Averaging
from bireme.runtime.exchange.joining import QuorumAgreement
from bireme.runtime.paging.chunk_store import PagingSettings
from bireme.runtime.stepper import NamedTensors, OptimizerFactory
from bireme.schedule.instruction import Instruction

OnInstruction = Callable[[Instruction], None]
"""Is told each instruction right before it is run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSettings:
    """The settings of a `Pipeline`, the same on all ranks."""

    device: torch.device | str = "cpu"
    """The device that this rank computes on."""
    evaluation: Graph | None = None
    """The graph of the model in evaluation mode; captured with the model if that is a module."""
    resolve: Resolve = torch_operator
    """Gives the function of each operator of the graph."""
    compile: bool = False
    """Whether torch compiles the stages."""
    seed: int = 0
    """The seed of dropout, and of the weights of a model on the meta device."""
    clip_norm: float | None = None
    """The largest norm of a batch's gradient."""
    lr: Callable[[int], float] = lambda _batch: 1.0
    """The factor on the learning rate by batch."""
    bank_dtype: torch.dtype | None = None
    """The type that stages compute in. If it is shorter than the weights' own, float32 master weights are
    kept."""
    gradient: str = "whole"
    """How the gradients of linear maps are kept, such as "principal:8"."""
    gradient_of: Sequence[str] | None = None
    """Patterns of the weights that `gradient` is for."""
    codecs: LinkCodecs | None = None
    """The codecs of the stage boundaries; the plan's own by default."""
    sum_codec: str = "none"
    """The codec of sums over replicas, such as "int8"."""
    shard: str = "none"
    """What replicas share. With "optimizer" each steps a part of the weights, and the others get it from
    there; with "weights" each keeps a part only."""
    sharing: Sharing | None = None
    """Lets the replicas' shares of each batch follow their speed."""
    reads_apart: bool = False
    """Whether no rank may read rows of another replica to train on them. The weights of micro-batches then go
    around as numbers."""
    paging: PagingSettings = field(default_factory=PagingSettings)
    """The place of offloaded chunks that are not on the device."""
    agreement: QuorumAgreement | None = None
    """Makes this pipeline one replica of several, which has the ranks of its world and the samples of its
    batches to itself."""
    averaging: Averaging | None = None
    """The same, for replicas that train batches of their own and average weights."""
    on_instruction: OnInstruction | None = None
    """Is called with each instruction before it runs."""

    @property
    def form(self) -> GradientForm | None:
        """How gradients are kept; None if they are whole."""
        return parse_gradient(self.gradient, None if self.gradient_of is None else tuple(self.gradient_of))

    @property
    def codec(self) -> SumCodec:
        """The codec of sums."""
        return parse_sum_codec(self.sum_codec)

    def used(self, *, has_muon: bool) -> dict[str, str]:
        """The capabilities that the settings ask for, each with words that name it."""
        diloco = None if self.averaging is None else self.averaging.diloco
        every = {
            "shard-optimizer": (self.shard == "optimizer", 'shard is "optimizer"'),
            "shard-weights": (self.shard == "weights", 'shard is "weights"'),
            "principal": (self.form is not None, f'gradient is "{self.form}"'),
            "sum-codec": (self.codec != DENSE, f'sum_codec is "{self.codec}"'),
            "muon": (has_muon, 'optimizer is "muon"'),
            "compile": (self.compile, "compile is True"),
            "quorum": (self.agreement is not None, "there is an agreement"),
            "groups": (self.averaging is not None and diloco is None, "replicas average weights in groups"),
            "diloco": (diloco is not None, "replicas average what they learned"),
        }
        return {name: words for name, (is_used, words) in every.items() if is_used}


# Optimizers by name: from a word and a few numbers to ordinary torch optimizers.
#
# A factory is called once per stage, with the parameters of that stage and their own names. It may assume
# nothing about other stages, so what it decides, it decides by a parameter's name and shape alone.

_WEIGHT_DECAY = {"adam": 0.0, "adamw": 0.01, "muon": 0.1, "sgd": 0.0}
"""What torch takes where nothing is said."""


def _is_hidden(name: str, parameter: Tensor) -> bool:
    return is_hidden_matrix(name, parameter.ndim)


def named_optimizer(
    name: str,
    *,
    lr: float,
    weight_decay: float | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    momentum: float | None = None,
    no_decay_1d: bool = True,
    rest_lr: float | None = None,
    muon_takes: Callable[[str, Tensor], bool] = _is_hidden,
) -> OptimizerFactory:
    """The factory of `adam`, `adamw`, `muon` or `sgd`; what is not said is as in torch.

    With `no_decay_1d` only parameters of two and more axes decay. `momentum` is for sgd (0.9) and muon
    (0.95). Muon steps the matrices that `muon_takes` says, as far as AdamW would, so that one learning rate
    does for both, and leaves the rest to AdamW at `rest_lr`, or at `lr` where that is not given.
    """
    check_optimizer(name)
    decay = _WEIGHT_DECAY[name] if weight_decay is None else weight_decay
    rate_of_rest = lr if rest_lr is None else rest_lr
    _refuse_outside("learning rate", lr)
    _refuse_outside("learning rate of the rest", rate_of_rest)
    _refuse_outside("weight decay", decay)
    for share in betas if momentum is None else (*betas, momentum):
        _refuse_outside("momentum", share, below=1.0)

    def groups(named: NamedTensors) -> list[dict[str, object]]:
        decays = [pair for pair in named if pair[1].ndim >= 2 or not no_decay_1d]
        others = [pair for pair in named if pair[1].ndim < 2 and no_decay_1d]
        both = ({"params": decays, "weight_decay": decay}, {"params": others, "weight_decay": 0.0})
        return [group for group in both if group["params"]]

    def make(named: NamedTensors) -> list[Optimizer]:
        # One kernel is several times as fast as several, and takes no temporary copies.
        fused = True if all(tensor.device.type in KINDS for _, tensor in named) else None
        if name == "muon":
            taken = [pair for pair in named if muon_takes(*pair)]
            matrices = {pair[0] for pair in taken}
            left = [pair for pair in named if pair[0] not in matrices]
            made: list[Optimizer] = []
            if taken:
                inertia = 0.95 if momentum is None else momentum
                adjust = "match_rms_adamw"
                made.append(Muon(taken, lr=lr, weight_decay=decay, momentum=inertia, adjust_lr_fn=adjust))
            if left:
                made.append(AdamW(groups(left), lr=rate_of_rest, betas=betas, fused=fused))
            return made
        if not named:
            return []
        if name == "sgd":
            return [SGD(groups(named), lr=lr, momentum=0.9 if momentum is None else momentum, fused=fused)]
        kind = Adam if name == "adam" else AdamW
        return [kind(groups(named), lr=lr, betas=betas, fused=fused)]

    return make


def _refuse_outside(what: str, value: float, below: float = math.inf) -> None:
    if not 0.0 <= value < below:
        limit = "" if below == math.inf else f" and less than {below:g}"
        raise BiremeError(f"An optimizer cannot have a {what} of {value}: it must be 0 or more{limit}.")
