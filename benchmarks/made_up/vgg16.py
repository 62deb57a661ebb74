"""VGG16 by arithmetic, on the machines of PipeDream's paper: the model whose stages want unequal widths.

Layers are those of configuration D of Simonyan and Zisserman, "Very Deep Convolutional Networks for
Large-Scale Image Recognition" (ICLR 2015), table 1, for images of 224 × 224. A unit is a convolution with the
pooling after it, or a fully connected layer. A multiply and an add are two operations; a backward has twice
those of a forward, and a V100 does 15.7 · 10¹² of float32 a second (its data sheet).

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), table 1: with
micro-batches of 64 on four servers of four V100 (16 GB) on 10 Gbit/s, the planned configuration is 15-1, the
convolutions on 15 devices and the fully connected layers on one.
"""

from benchmarks.made_up.models import profile_of
from bireme.cluster.cluster import Card, Cluster, Link, Mesh, Server
from bireme.cluster.device import Device
from bireme.profile.profile import Profile

_CHANNELS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Output channels of the convolutions; each group ends with a pooling that halves both sides."""

_CONNECTED = ((25_088, 4_096), (4_096, 4_096), (4_096, 1_000))
"""Inputs and outputs of the fully connected layers."""

_SIDE = 224
_OPERATIONS_PER_S = 15.7e12
_FLOAT_BYTES = 4
MICRO_BATCH = 64

PUBLISHED = (15, 1)
"""The replicas of the convolutions, and of the fully connected layers."""


def vgg16(micro_batch: int = MICRO_BATCH) -> Profile:
    """The profile of VGG16 on a V100."""
    operations, parameters, kept, sent = [], [], [], []
    side, before = _SIDE, 3
    for group in _CHANNELS:
        for place, channels in enumerate(group):
            weights = 9 * before * channels
            operations.append(2.0 * weights * side * side)
            parameters.append(_FLOAT_BYTES * (weights + channels))
            kept.append(_FLOAT_BYTES * channels * side * side)
            before = channels
            side //= 2 if place == len(group) - 1 else 1
            sent.append(_FLOAT_BYTES * channels * side * side)
    for inputs, outputs in _CONNECTED:
        operations.append(2.0 * inputs * outputs)
        parameters.append(_FLOAT_BYTES * (inputs + 1) * outputs)
        kept.append(_FLOAT_BYTES * outputs)
        sent.append(_FLOAT_BYTES * outputs)
    forward_s = [one / _OPERATIONS_PER_S for one in operations]
    return profile_of(
        forward_s,
        [2 * one for one in forward_s],
        sizes=(micro_batch,),
        parameter_bytes=parameters,
        kept_bytes=kept,
        boundary_bytes=sent,
    )


def v100s(servers: int, devices: int, inside: float, between: float) -> Cluster:
    """Equal servers of V100, with these bytes a second between the devices of one, and between servers."""
    places = tuple(range(devices))
    device = Device("v100", "cuda", 16 * 10**9, process_bytes=0)
    meshes = (Mesh("inside", places, Link(inside, 5e-6)),) if devices > 1 else ()
    cards = (Card("eth0", places, Link(between, 20e-6)),)
    return Cluster(
        tuple(Server(f"server{number}", (device,) * devices, (), meshes, cards) for number in range(servers))
    )


def cluster_a(servers: int = 4) -> Cluster:
    """Servers of four V100: PCIe inside, 10 Gbit/s between them."""
    return v100s(servers, 4, 10e9, 1.25e9)
