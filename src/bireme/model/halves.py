"""The backward of a stage in two halves, for schedules that leave the gradients of weights for later.

The first half gives the gradients of the stage's inputs, which the stage before waits for; the second, when
there is time, those of its parameters. Both are autograd's own work on its own graph, by public functions.

In the picture gradients flow down and to the right. N are the nodes of autograd's graph that lead to the
inputs, C those that lead to parameters only; an N with an edge to a C is a junction.

      outputs            The first half runs the left column, and keeps what flows into every junction.
         │
         N ──► C ──► w   The second half runs every junction again, for its edges to the right alone, and
         │               then what is to the right of them.
         N ──► C ──► w
         │               A node leaves out what nobody asks it for, so no product of matrices is made twice.
      inputs
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import functional

from bireme.model.graph import Operator, Reference
from bireme.model.stage import Resolve
from bireme.model.units import LinearMap, MapKind

# Linear maps whose weights get no gradient: their backward feeds pairs of rows to whoever asks for them.
#
# An operator of the graph runs as it is, so a forward has the same bits. Its backward gives the gradients of
# its input and its bias. That of its weight would be a sum of products of pairs: it gives these pairs
# instead.

Feed = Callable[[str, Tensor, Tensor], None]
"""Takes pairs of a weight, by its name: rows for its first axis, and for all others together."""


class GradientHook:
    """Where pairs go: to the batch whose backward is running. One stage has one."""

    __slots__ = ("feed",)

    def __init__(self) -> None:
        self.feed: Feed | None = None

    def __call__(self, name: str, left: Tensor, right: Tensor) -> None:
        """Pass pairs on."""
        assert self.feed is not None, "a backward says first whose pairs are coming"
        self.feed(name, left, right)


def feeding(resolve: Resolve, maps: Mapping[str, LinearMap], gradient_hook: GradientHook) -> Resolve:
    """Resolves operators as before, but those that use one of these weights feed the gradient hook."""

    def resolved(operator: Operator) -> Callable[..., Any]:
        plain = resolve(operator)
        used = [maps[name] for name in operator.reads() if name in maps]
        return _fed(plain, operator, used[0], gradient_hook) if used else plain

    return resolved


def _fed(
    plain: Callable[..., Any], operator: Operator, one: LinearMap, gradient_hook: GradientHook
) -> Callable[..., Any]:
    place = operator.arguments.index(Reference(one.name))
    has_bias_first = one.kind is MapKind.PRODUCT and place == 2

    def call(*given: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*given)
        if has_bias_first:
            bias, rows, weight = given
            return _Fed.apply(_Use(one), gradient_hook, lambda x, w, b: plain(b, x, w), rows, weight, bias)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        rows, weight, *rest = given
        bias, settings = (rest[0], tuple(rest[1:])) if rest else (None, ())

        def run(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
            return plain(x, w, b, *settings) if rest else plain(x, w)

        return _Fed.apply(_Use(one, settings), gradient_hook, run, rows, weight, bias)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    return call


class _Fed(torch.autograd.Function):
    """A map of rows by a weight. The weight is asked for a gradient and gets none."""

    @staticmethod
    def forward(
        ctx: Any,
        use: "_Use",
        gradient_hook: GradientHook,
        run: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        given: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.use, ctx.gradient_hook, ctx.bias_shape = use, gradient_hook, None if bias is None else bias.shape
        return run(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (given, weight), back, use = ctx.saved_tensors, gradients[0], ctx.use
        ctx.gradient_hook(use.map.name, *use.pairs(given, back, weight))
        of_given = use.into_given(given, back, weight) if ctx.needs_input_grad[3] else None
        of_bias = use.into_bias(back, ctx.bias_shape) if ctx.needs_input_grad[5] else None
        return None, None, None, of_given, None, of_bias


@dataclass(frozen=True, slots=True)
class _Use:
    """How a weight is used in a call: y = x WT, with rows of x and y in their last axes; y = x W; or a
    convolution, whose rows are patches of the input, which are unfolded for the backward alone.

    `settings` of a convolution are its stride, padding and dilation.
    """

    map: LinearMap
    settings: tuple[Any, ...] = ()

    def pairs(self, given: Tensor, back: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rows whose products add up to the gradient of the weight."""
        match self.map.kind:
            case MapKind.LINEAR:
                return _rows(back), _rows(given)
            case MapKind.PRODUCT:
                return _rows(given), _rows(back)
        images, kernel = given, tuple(weight.shape[2:])
        stride, padding, dilation = (tuple(one) for one in self._each())
        if len(kernel) == 1:
            images, kernel = given.unsqueeze(-2), (1, *kernel)
            dilation, padding, stride = (1, *dilation), (0, *padding), (1, *stride)
        patches = functional.unfold(images, kernel, dilation, padding, stride).transpose(1, 2)
        return _rows(back.flatten(2).transpose(1, 2)), _rows(patches)

    def into_given(self, given: Tensor, back: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the input."""
        match self.map.kind:
            case MapKind.LINEAR:
                return back @ weight
            case MapKind.PRODUCT:
                return back @ weight.T
        stride, padding, dilation = self._each()
        output_padding = [0] * len(stride)
        wanted = [True, False, False]
        found: Tensor = torch.ops.aten.convolution_backward(
            back, given, weight, None, stride, padding, dilation, False, output_padding, 1, wanted
        )[0]
        return found

    def into_bias(self, back: Tensor, shape: Sequence[int]) -> Tensor:
        """The gradient of the bias, which may have fewer axes than the output."""
        if self.map.kind is MapKind.CONVOLUTION:
            return back.sum([axis for axis in range(back.ndim) if axis != 1])
        return back.sum_to_size(tuple(shape))

    def _each(self) -> Iterator[list[int]]:
        """Stride, padding and dilation of a convolution, for each of its axes."""
        num_axes = len(self.map.shape) - 2
        for value in (*self.settings[:3], *(1, 0, 1)[len(self.settings) :]):
            given = list(value) if isinstance(value, list | tuple) else [value]
            yield given * num_axes if len(given) == 1 else given


def _rows(tensor: Tensor) -> Tensor:
    """All rows of a tensor, one after the other."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


Gradients = tuple[Tensor | None, ...]

_Edge = tuple[Node, int]
"""Where a gradient flows into: a node, and the place among the gradients that it takes."""

_Children = dict[Node, list[_Edge]]


@dataclass(slots=True, eq=False)
class Rest:
    """What the first half of a backward gave, and the second half that is left to do."""

    input_gradients: Gradients
    _parameters: Sequence[_Edge | None]
    _early: dict[_Edge, Tensor]
    _second_half: "_SecondHalf | None"

    @property
    def waiting(self) -> list[Tensor]:
        """The gradients that wait for the second half."""
        if self._second_half is None:
            return []
        kept = (one for given in self._second_half.kept.values() for one in given if one is not None)
        return [*self._early.values(), *(flow.gradient for flow in self._second_half.flows), *kept]

    def weight_gradients(self) -> Gradients:
        """The second half: the gradients of the parameters, None for one that nothing flows to.

        It runs once and lets go of all that was held for it.
        """
        if self._second_half is None:
            raise RuntimeError("The second half of a backward runs once, and this one has run.")
        found = self._early | self._second_half.run()
        gradients = tuple(None if edge is None else found.get(edge) for edge in self._parameters)
        self._second_half, self._early, self._parameters = None, {}, ()
        return gradients


def backward_input(
    outputs: Sequence[Tensor],
    output_gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> Rest:
    """The first half: what it returns has the gradients of `inputs`, and gives those of `parameters` later.

    `output_gradients` are what flows into the outputs, None where nothing does; a loss gets its one like any
    other. Tensors that need no gradient get None. Where no input needs one, all is left to the second half.

    Some parameters get their gradients in the first half, because to wait would count a part twice or do it
    twice: those after a node that several others lead to, as a bias that two layers share, and those after
    an `autograd.Function`, which cannot leave out a part. A compiled stage is one such function as a whole.

    What the forward has saved stays in memory until the second half, and parameters must not be written to
    until then. A hook on a tensor inside the stage may run twice. Under `torch.utils.checkpoint` every
    junction would recompute; to recompute a stage, run it again instead.
    """
    flows = [
        _Flow(_edge(tensor), gradient)
        for tensor, gradient in zip(outputs, output_gradients, strict=True)
        if tensor.requires_grad and gradient is not None
    ]
    into, weights = ([_edge(t) if t.requires_grad else None for t in some] for some in (inputs, parameters))
    ways = _ways([flow.edge for flow in flows], _known(into), _known(weights))
    second_half = _SecondHalf(ways, flows)
    handles = [node.register_prehook(second_half.keeper(node)) for node in ways.exits]
    try:
        found = _run(flows, [*_known(into), *ways.early], keeps_graph=bool(ways.exits or second_half.flows))
    finally:
        for handle in handles:
            handle.remove()
    return Rest(
        tuple(None if edge is None else found.get(edge) for edge in into),
        weights,
        {edge: found[edge] for edge in ways.early if edge in found},
        second_half,
    )


@dataclass(frozen=True, slots=True)
class _Flow:
    """A gradient, and where it flows into."""

    edge: _Edge
    gradient: Tensor


@dataclass(frozen=True, slots=True)
class _Ways:
    """Where gradients leave the left column for the right one.

    `exits` are the edges to the right of every junction, those nearer to the outputs first; `right` the edges
    from the outputs straight into the right column. `early` and `late` are the parameters of the two halves.
    """

    exits: dict[Node, tuple[_Edge, ...]]
    right: frozenset[_Edge]
    early: tuple[_Edge, ...]
    late: tuple[_Edge, ...]


class _SecondHalf:
    """What flows into the right column from outputs and junctions, kept until it runs."""

    def __init__(self, ways: _Ways, flows: Iterable[_Flow]) -> None:
        self.exits = ways.exits
        self.parameters = ways.late
        self.flows = [flow for flow in flows if flow.edge in ways.right]
        self.kept: dict[Node, Gradients] = {}

    def keeper(self, node: Node) -> Callable[[Gradients], None]:
        """A hook ahead of a junction."""

        def keep(gradients: Gradients) -> None:
            self.kept[node] = gradients

        return keep

    def run(self) -> dict[_Edge, Tensor]:
        """The gradients of its parameters."""
        flows = self.flows
        for node, exits in self.exits.items():
            # One junction at a time: of several at once, gradients would flow from one into the other again.
            given = enumerate(self.kept.pop(node, ()))
            into = [_Flow((node, place), gradient) for place, gradient in given if gradient is not None]
            flows += [_Flow(edge, gradient) for edge, gradient in _run(into, exits).items()]
        return _run(flows, self.parameters)


def _run(
    flows: Sequence[_Flow], wanted: Iterable[_Edge], *, keeps_graph: bool = False
) -> dict[_Edge, Tensor]:
    """What of the flows comes to each of the wanted edges, where anything does."""
    edges = list(dict.fromkeys(wanted))
    if not flows or not edges:
        return {}
    found = torch.autograd.grad(
        [GradientEdge(*flow.edge) for flow in flows],
        [GradientEdge(*edge) for edge in edges],
        [flow.gradient for flow in flows],
        retain_graph=keeps_graph,
        allow_unused=True,
    )
    return {edge: gradient for edge, gradient in zip(edges, found, strict=True) if gradient is not None}


def _edge(tensor: Tensor) -> _Edge:
    found = get_gradient_edge(tensor)
    return found.node, found.output_nr


def _known(edges: Iterable[_Edge | None]) -> list[_Edge]:
    return [edge for edge in edges if edge is not None]


def _ways(begins: Sequence[_Edge], inputs: Sequence[_Edge], parameters: Sequence[_Edge]) -> _Ways:
    children = _children(begins)
    left = _leading_to(inputs, children)
    early = _early(children, left, parameters)
    late = dict.fromkeys(edge for edge in parameters if edge not in early)
    leading = _leading_to(late, children)

    def goes_right(edge: _Edge) -> bool:
        return edge[0] not in left and (edge[0] in leading or edge in late)

    exits = {node: tuple(filter(goes_right, children[node])) for node in reversed(children) if node in left}
    return _Ways(
        exits={node: edges for node, edges in exits.items() if edges},
        right=frozenset(filter(goes_right, begins)),
        early=tuple(early),
        late=tuple(late),
    )


def _children(begins: Iterable[_Edge]) -> _Children:
    """The edges out of every node that gradients can flow to; a node comes after all that it leads to."""
    edges: _Children = {}
    finished: _Children = {}
    waiting = [node for node, _ in begins]
    while waiting:
        node = waiting[-1]
        if node not in edges:
            edges[node] = [(child, place) for child, place in node.next_functions if child is not None]
            waiting += [child for child, _ in edges[node] if child not in edges]
        else:
            finished.setdefault(waiting.pop(), edges[node])
    return finished


def _leading_to(wanted: Iterable[_Edge], children: _Children) -> set[Node]:
    """The nodes that have a way to one of these edges."""
    goals = set(wanted)
    found: set[Node] = set()
    for node, edges in children.items():
        if any(edge in goals or edge[0] in found for edge in edges):
            found.add(node)
    return found


def _early(children: _Children, left: set[Node], parameters: Iterable[_Edge]) -> dict[_Edge, None]:
    """The parameters that cannot wait.

    A junction's flow into a node to its right is only then surely its own if no other node leads there.
    """
    num_parents = Counter(one for edges in children.values() for one in {child for child, _ in edges})
    cannot_wait = {
        child
        for node in left
        for child, _ in children[node]
        if child not in left and (num_parents[child] > 1 or isinstance(node, BackwardCFunction))
    }
    for node, edges in reversed(children.items()):
        if node in cannot_wait:
            cannot_wait.update(child for child, _ in edges)
    return dict.fromkeys(edge for edge in parameters if edge[0] in left | cannot_wait)
