"""Workloads that look like captured networks, drawn from a seed: to compare placement solvers on.

Only the shape of the graphs and the proportions of times are like those of real networks: what runs in
parallel, what is kept for much later, how long moving an output takes compared with making it. Times have no
unit.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bireme.placement.workload import Edge, Node, Workload

__all__ = ["Setting", "inception_like", "recurrent_like", "resnet_like", "transformer_like"]

BACKWARD_TIME = 2.0
"""A backward takes about this many times its forward."""

SPARE_MEMORY = 1.7
"""Accelerators together hold this many times what there is to hold."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for all shapes: the devices, whether to train, how slow CPUs and moving are.

    A CPU takes `cpu_slowness` times an accelerator's time. Moving an output takes, at a mean, `communication`
    times the mean time of an operator.
    """

    is_training: bool = False
    num_accelerators: int = 6
    num_cpus: int = 1
    cpu_slowness: float = 10.0
    communication: float = 1.0
    seed: int = 0


def transformer_like(num_layers: int, setting: Setting, *, num_heads: int = 4) -> Workload:
    """Layers of attention heads in parallel and a feed-forward part, with residuals and a shared mask."""
    graph = _Graph(setting)
    table = graph.add("embedding.weight", 0.0, (), moving=0.0, weight=30.0)
    flow = graph.add("embedding", 0.5, (table,))
    flow = graph.add("embedding.norm", 0.3, (flow,))
    mask = graph.add("mask", 0.1, (), moving=0.1)
    for layer in range(num_layers):
        heads = []
        for head in range(num_heads):
            query, key, value = (
                graph.add(f"{layer}.{head}.{what}", 1.0, (flow,), moving=0.4, weight=1.0)
                for what in ("query", "key", "value")
            )
            scores = graph.add(f"{layer}.{head}.scores", 0.6, (query, key), moving=1.5)
            masked = graph.add(f"{layer}.{head}.masked", 0.2, (scores, mask), moving=1.5)
            softmax = graph.add(f"{layer}.{head}.softmax", 0.3, (masked,), moving=1.5)
            heads.append(graph.add(f"{layer}.{head}.context", 0.6, (softmax, value), moving=0.4))
        joined = graph.add(f"{layer}.join", 0.2, heads)
        out = graph.add(f"{layer}.out", 2.0, (joined,), weight=4.0)
        residual = graph.add(f"{layer}.residual", 0.1, (flow, out))
        norm = graph.add(f"{layer}.norm", 0.3, (residual,))
        wide = graph.add(f"{layer}.up", 6.0, (norm,), moving=3.0, weight=12.0)
        bent = graph.add(f"{layer}.gelu", 0.5, (wide,), moving=3.0)
        narrow = graph.add(f"{layer}.down", 6.0, (bent,), weight=12.0)
        second = graph.add(f"{layer}.residual2", 0.1, (norm, narrow))
        flow = graph.add(f"{layer}.norm2", 0.3, (second,))
    graph.add("logits", 12.0, (flow, table), moving=8.0)
    return graph.workload()


def inception_like(num_blocks: int, setting: Setting) -> Workload:
    """Blocks of four branches of one to five convolutions each, joined; earlier blocks take longer."""
    graph = _Graph(setting)
    flow = graph.convolution("stem", (), 4.0, 3.0)
    for block in range(num_blocks):
        scale = 2.5 - 2.0 * block / num_blocks
        branches = []
        for branch, depth in enumerate((1, 2, 3, 5)):
            inner = flow
            for step in range(graph.random.randint(1, depth)):
                name = f"{block}.{branch}.{step}"
                inner = graph.convolution(name, (inner,), scale * graph.random.uniform(0.5, 3.0), scale / 2)
            branches.append(inner)
        flow = graph.add(f"{block}.join", 0.2 * scale, branches, moving=1.5 * scale)
    graph.add("classifier", 1.0, (flow,), moving=0.1, weight=8.0)
    return graph.workload()


def recurrent_like(num_layers: int, num_steps: int, setting: Setting) -> Workload:
    """A grid of cells, layers by time steps, with residuals between layers; each layer has one weight."""
    graph = _Graph(setting)
    inputs = [graph.add(f"input.{step}", 0.2, (), moving=0.5) for step in range(num_steps)]
    for layer in range(num_layers):
        weight = graph.add(f"{layer}.weight", 0.0, (), moving=0.0, weight=10.0)
        cells: list[int] = []
        for step in range(num_steps):
            past = cells[-1:]
            gates = graph.add(f"{layer}.{step}.gates", 3.0, (weight, inputs[step], *past), moving=2.0)
            cells.append(graph.add(f"{layer}.{step}.cell", 0.6, (gates, *past), moving=0.5))
        if layer > 1:
            inputs = [
                graph.add(f"{layer}.{step}.residual", 0.1, (cells[step], inputs[step]), moving=0.5)
                for step in range(num_steps)
            ]
        else:
            inputs = cells
    joined = graph.add("join", 0.3, inputs, moving=4.0)
    graph.add("logits", 10.0, (joined,), moving=6.0, weight=20.0)
    return graph.workload()


def resnet_like(num_blocks: int, setting: Setting) -> Workload:
    """Blocks of three convolutions around a residual; a fourth one where the picture shrinks."""
    graph = _Graph(setting)
    flow = graph.convolution("stem", (), 5.0, 4.0)
    for block in range(num_blocks):
        moving = 4.0 / 2 ** (4 * block // num_blocks)
        inner = flow
        for step, time in enumerate((1.5, 3.0, 1.5)):
            inner = graph.convolution(f"{block}.{step}", (inner,), time, moving)
        if block % max(1, num_blocks // 4) == 0:
            flow = graph.convolution(f"{block}.shrink", (flow,), 1.5, moving)
        flow = graph.add(f"{block}.residual", 0.3, (flow, inner), moving=moving)
        flow = graph.add(f"{block}.relu", 0.2, (flow,), moving=moving)
    graph.add("classifier", 1.0, (flow,), moving=0.1, weight=8.0)
    return graph.workload()


class _Graph:
    """Forward operators as they are added; `workload` mirrors them where it is to train."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.random = Random(setting.seed)
        self.names: list[str] = []
        self.times: list[float] = []
        self.moving: list[float] = []
        self.sizes: list[float] = []
        self.inputs: list[tuple[int, ...]] = []

    def add(
        self, name: str, time: float, inputs: Sequence[int], *, moving: float = 1.0, weight: float = 0.0
    ) -> int:
        """An operator of about this time; its number."""
        self.names.append(name)
        self.times.append(time * self.random.uniform(0.8, 1.25))
        self.moving.append(moving * self.random.uniform(0.9, 1.1))
        self.sizes.append(weight + moving)
        self.inputs.append(tuple(inputs))
        return len(self.names) - 1

    def convolution(self, name: str, inputs: Sequence[int], time: float, moving: float) -> int:
        """A weight, a convolution, a normalization and a rectifier."""
        weight = self.add(f"{name}.weight", 0.0, (), moving=0.0, weight=time)
        conv = self.add(f"{name}.conv", time, (weight, *inputs), moving=moving)
        norm = self.add(f"{name}.norm", time / 6, (conv,), moving=moving)
        return self.add(f"{name}.relu", time / 12, (norm,), moving=moving)

    def workload(self) -> Workload:
        """The operators and the devices of the setting."""
        count = len(self.times)
        scale = self.setting.communication * sum(self.times) / max(sum(self.moving), 1e-9)
        nodes = [self._node(number, is_backward=False) for number in range(count)]
        edges = [
            Edge(source, number, scale * self.moving[source])
            for number in range(count)
            for source in self.inputs[number]
        ]
        if self.setting.is_training:
            nodes += [self._node(number, is_backward=True) for number in range(count)]
            edges += self._backward_edges(scale, nodes)
        size = sum(node.size_bytes for node in nodes)
        return Workload(
            tuple(nodes),
            tuple(edges),
            self.setting.num_accelerators,
            self.setting.num_cpus,
            SPARE_MEMORY * size / max(1, self.setting.num_accelerators),
        )

    def _node(self, number: int, *, is_backward: bool) -> Node:
        time = self.times[number]
        if is_backward:
            time *= BACKWARD_TIME * self.random.uniform(0.8, 1.2)
        return Node(
            id=number + len(self.times) * is_backward,
            accelerator_time=time,
            cpu_time=time * self.setting.cpu_slowness,
            size_bytes=self.sizes[number],
            is_backward=is_backward,
            colour=number if self.setting.is_training else None,
            name=f"{self.names[number]}{'.backward' * is_backward}",
        )

    def _backward_edges(self, scale: float, nodes: list[Node]) -> list[Edge]:
        """Each backward needs what its forward read, and the gradients of who read its forward.

        Gradients of several readers meet in a sum that is of no colour; those sums are added to the nodes.
        """
        count = len(self.times)
        readers: dict[int, list[int]] = defaultdict(list)
        for number, sources in enumerate(self.inputs):
            for source in sources:
                readers[source].append(number)
        moving = [
            scale * sum(self.moving[source] for source in sources) / max(1, len(sources))
            for sources in self.inputs
        ]
        edges = [
            Edge(source, count + number, scale * self.moving[source])
            for number, sources in enumerate(self.inputs)
            for source in sources
        ]
        for source, row in readers.items():
            target = count + source
            if len(row) > 2:
                time = 0.05 * len(row)
                target = len(nodes)
                nodes.append(
                    Node(target, time, time * self.setting.cpu_slowness, is_backward=True, name="sum")
                )
                edges.append(Edge(target, count + source, scale * self.moving[source]))
            edges += [Edge(count + number, target, moving[number]) for number in row]
        return edges
