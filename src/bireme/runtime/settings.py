"""How a pipeline trains, besides its model and its plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bireme.codec.description import LinkCodecs
from bireme.codec.sum_description import DENSE, GradientForm, SumCodec, parse_gradient, parse_sum_codec
from bireme.model.graph import Graph
from bireme.model.stage import Resolve, torch_operator
from bireme.runtime.balancer import Sharing
from bireme.runtime.exchange.averages import Averaging
from bireme.runtime.exchange.joining import QuorumAgreement
from bireme.runtime.interpreter import OnInstruction
from bireme.runtime.paging.chunk_store import PagingSettings


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
