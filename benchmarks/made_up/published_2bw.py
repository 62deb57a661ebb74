"""The GPT models of PipeDream-2BW's evaluation as profiles, from arithmetic and the paper's own byte count.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021: mixed precision, sequences
of 512 tokens, servers p3.16xlarge of eight V100 with 16 GB and NVLink. A parameter takes 20 bytes with one
weight version (2 for the weight and 2 for the gradient in 16 bits, 4 each for the master copy and its
gradient, 8 for Adam) and 4 more for each version beyond, kept in 32 bits as in the authors' released
optimizer.

A layer of width h keeps 34·s·b·h bytes of activations and 5·a·s²·b for its a heads (Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", 2022, equation 1).
"""

from dataclasses import dataclass, replace

from bireme.cluster.cluster import Card, Cluster, Link, Mesh, Server
from bireme.cluster.device import Device
from bireme.profile.profile import Profile, UnitCost, UnitProfile

TOKENS, WORDS = 512, 50_304
SIZES = (1, 2, 4, 8, 16, 32)
PRODUCT_FLOPS_PER_S = 83e12
"""Of a V100 in large products (Markidis et al., "NVIDIA Tensor Core Programmability, Performance &
Precision", 2018).
"""
ATTAINED_BYTES_PER_S = 0.7e12
"""Of a V100's memory, which does 0.9e12."""
SCORE_BYTES = 16
"""Of a score of the head that a forward of the loss moves: written in 16 bits, read and written in 32 bits,
and read for its maximum and for its sum.
"""


@dataclass(frozen=True, slots=True)
class Model:
    """A GPT of the paper."""

    name: str
    layers: int
    width: int
    heads: int

    @property
    def num_parameters(self) -> int:
        """Those of the layers and of the table of words."""
        return 12 * self.layers * self.width**2 + WORDS * self.width


GPT_355M = Model("GPT 355M", 24, 1024, 16)
GPT_1_3B = Model("GPT 1.3B", 24, 2048, 16)
GPT_2_2B = Model("GPT 2.2B", 32, 2304, 32)


def p3_16xlarge(count: int = 1) -> Cluster:
    """Servers of eight V100 with 16 GB, which hold tensors alone, as in the paper's formulas."""
    device = Device("V100", "cuda", 16 * 10**9, process_bytes=0)
    places = tuple(range(8))
    return Cluster(
        tuple(
            Server(
                f"server{number}",
                (device,) * 8,
                (),
                (Mesh("nvlink", places, Link(25e9, 5e-6)),),
                (Card("eth0", places, Link(3.1e9, 30e-6)),),
            )
            for number in range(count)
        )
    )


def profile_of_model(model: Model, *, checkpointed: bool = False) -> Profile:
    """A unit for each layer, with the embedding in the first and the head after the last. If layers are
    `checkpointed`, each keeps its input and runs its forward again before its backward.
    """
    h = model.width
    table = WORDS * h
    units = [_unit("embedding", table, flops=0.0, kept_bytes=TOKENS * h, h=h)]
    layer_flops = TOKENS * (24 * h**2 + 4 * TOKENS * h)
    layer_bytes = 34 * TOKENS * h + 5 * model.heads * TOKENS**2
    for place in range(model.layers):
        layer = _unit(f"layers.{place}", 12 * h**2, flops=layer_flops, kept_bytes=layer_bytes, h=h)
        units.append(_checkpointed(layer, 2 * TOKENS * h) if checkpointed else layer)
    scores = TOKENS * WORDS
    units.append(_unit("head", table, flops=2.0 * scores * h, kept_bytes=6 * scores, h=h))
    return Profile(
        model.name,
        model.name,
        "V100",
        "cuda",
        1,
        "",
        False,
        "adam",
        len(units),
        4 * model.num_parameters,
        tuple(units),
    )


def _checkpointed(layer: UnitProfile, input_bytes: int) -> UnitProfile:
    costs = (
        replace(
            cost,
            backward_s=cost.recompute_backward_s,
            recompute_backward_s=cost.recompute_backward_s + cost.forward_s,
            saved_bytes=cost.micro_batch * input_bytes,
            workspace_bytes=cost.saved_bytes,
        )
        for cost in layer.costs
    )
    return replace(layer, costs=tuple(costs))


def _unit(name: str, parameters: int, *, flops: float, kept_bytes: int, h: int) -> UnitProfile:
    is_layer = name not in ("embedding", "head")
    # What is kept is written, and read by the next operator.
    moved_bytes = SCORE_BYTES * TOKENS * WORDS if name == "head" else 2 * kept_bytes
    costs = []
    for size in SIZES:
        # Small matrices attain less: half the rate at one sequence, all but an eighth at eight. The head has
        # enough work for all cores in one sequence.
        products_s = flops / PRODUCT_FLOPS_PER_S * (1 + is_layer / size)
        forward_s = size * (products_s + moved_bytes / ATTAINED_BYTES_PER_S) + 20e-6
        # The gradient of a table is whole before it is added up. Those of scores have 32 and 16 bits.
        scores_bytes = size * 6 * TOKENS * WORDS if name == "head" else 0
        costs.append(
            UnitCost(
                micro_batch=size,
                forward_s=forward_s,
                backward_s=2 * forward_s,
                recompute_backward_s=3 * forward_s,
                backward_input_s=None,
                backward_weight_s=None,
                spread=0.0,
                saved_bytes=size * kept_bytes,
                boundary_bytes=0 if name == "head" else 2 * size * TOKENS * h,
                workspace_bytes=0 if is_layer else 2 * parameters + scores_bytes,
                shared=(),
            )
        )
    return UnitProfile(
        name=name,
        structure=name.partition(".")[0],
        same_as=None,
        receives=() if name == "embedding" else ("x",),
        sends=("x",),
        inputs=(),
        parameter_bytes=4 * parameters,
        gradient_bytes=6 * parameters,
        optimizer_bytes=10 * parameters,
        buffer_bytes=0,
        update_s=20 * parameters / ATTAINED_BYTES_PER_S,
        trial_s=20 * parameters / ATTAINED_BYTES_PER_S,
        reduce_s=0.0,
        tied=(),
        costs=tuple(costs),
    )
