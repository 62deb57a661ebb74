"""The last linear layer of a model and its cross-entropy as one operator, so that the logits of a micro-batch
are never all in memory.

A graph that ends as on the left is made one that ends as on the right. `rows` are the operators between the
layer and the loss: they move, drop or scale whole rows, so the hidden states go through them instead.

    hidden ─ linear ─ slice, flatten, cast … ─ cross_entropy      hidden ─ linear_cross_entropy(rows)

It is data and imports no torch; `fused_operator` is what runs.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from bireme.codec.sum_description import GradientForm
from bireme.model.graph import Argument, Graph, Operator, Reference, Token, Value, evaluate, references
from bireme.model.units import chosen_maps

FUSED = "bireme.linear_cross_entropy"
"""Takes hidden states, weight, bias, targets, rows, the loss's dtype, reduction, and the ignored target."""

LOSS = "loss"

MEAN, SUM = 1, 2
"""Torch's numbers for the reductions of a loss."""

_LOSS_TARGET = "aten.cross_entropy_loss.default"
_IGNORED = -100

LEAST_LOGITS = 2**20
"""Logits of one sample that are worth it. Fewer do not matter, and plain operators give the model's bits."""

_NO_LOSS = "the model has no cross-entropy among its operators"

_BETWEEN = "{} lies between its last linear layer and the cross-entropy"

_COMPONENTS = "training.gradient keeps the gradient of its last linear layer as components"

_LEAST_ROWS = 256
"""Rows whose logits are made at once, at least: products of fewer rows are slow."""

_CASTS = {
    *("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default"),
    *("aten.contiguous.default", "aten.clone.default", "aten.alias.default"),
}
_VIEWS = {"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"}
_SCALES = {"aten.mul.Tensor", "aten.div.Tensor"}
_LAST = -1


def rows_at_once(num_rows: int, width: int) -> int:
    """The rows whose logits are made at once: at most half the width of the layer, or 256 if that is more.

    All pieces have this length, but for the last one, which may be shorter.
    """
    num_pieces = max(-(-num_rows // max(width // 2, _LEAST_ROWS)), 1)
    return max(-(-num_rows // num_pieces), 1)


def keeps_logits(num_rows: int, width: int, element_bytes: int, *, learns: bool) -> bool:
    """Whether a forward keeps the gradient of all logits for the backward. Instead it could keep the gradient
    of the weight, which may be larger; a weight that does not learn has none.
    """
    return learns and num_rows * element_bytes <= width * max(element_bytes, 4)


def loss_arguments(operator: Operator) -> dict[str, Argument]:
    """The arguments of a cross-entropy or of a fused operator, by torch's names for those of a cross-entropy.

    Of a fused operator, `self` are the hidden states.
    """
    given: dict[str, Argument] = {"weight": None, "reduction": MEAN, "ignore_index": _IGNORED}
    given["label_smoothing"] = 0.0
    if operator.target == FUSED:
        hidden, _weight, _bias, targets, _rows, _dtype, reduction, ignored = operator.arguments
        return given | {"self": hidden, "target": targets, "reduction": reduction, "ignore_index": ignored}
    names = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    return given | dict(zip(names, operator.arguments, strict=False)) | dict(operator.keywords)


@dataclass(frozen=True, slots=True)
class Fusion:
    """A graph with its losses fused, as far as they can be. `reason` is why a loss that has many logits, or
    that was asked for, is not fused; None if there is no such loss.
    """

    graph: Graph
    reason: str | None = None


def fused(graph: Graph, *, asked: bool | None = None, form: GradientForm | None = None) -> Fusion:
    """Replace every linear layer that is followed by a cross-entropy; the logits are no output afterwards.

    By default only losses of many logits are fused; all are if `asked` is true, and none if it is false.
    A layer stays as it is if its gradient is kept in a `form`.
    """
    found, reason = graph, _NO_LOSS if asked else None
    has_loss = any(output.name == LOSS for output in graph.outputs)
    losses = [place for place, one in enumerate(graph.operators) if one.target == _LOSS_TARGET and has_loss]
    for place in losses if asked is not False else ():
        scores = graph.operators[place].arguments[0]
        value = graph.values.get(scores.name) if isinstance(scores, Reference) else None
        num_logits = 0 if value is None else value.num_elements(graph.batch) // graph.batch
        if not asked and num_logits < LEAST_LOGITS:
            continue
        try:
            apart = {} if form is None else chosen_maps(graph, form)
            found, reason = _replaced(found, _Match(graph, place, apart)), None
        except _UnfitError as error:
            reason = str(error)
            break
    return Fusion(found, reason)


class _UnfitError(ValueError):
    """Why a loss cannot be fused."""


class _Match:
    """A cross-entropy in a graph, with all that leads to it from a linear layer."""

    def __init__(self, graph: Graph, place: int, apart: Collection[str]) -> None:
        self.graph = graph
        self.place = place
        self.values: Mapping[str, Value] = graph.values
        self.made_by = graph.made_by
        scores, self.targets, self.reduction, self.ignored = self._loss_arguments(graph.operators[place])
        self.dtype = self.values[scores].dtype
        self.between: list[int] = []
        """The places from the linear layer to the loss, the layer first."""
        self.transpose: str | None = None
        """The value that is the transpose of the weight, if the layer is a product by it."""
        name = scores
        while True:
            maker = self.made_by.get(name)
            if maker is None:
                raise _UnfitError("its cross-entropy is not of what a linear layer gives")
            self.between.insert(0, maker)
            operator = graph.operators[maker]
            is_plain = not (operator.no_grad or operator.mutates or operator.is_random or operator.is_tuple)
            layer = self._layer(operator) if is_plain else None
            if layer is not None:
                break
            first = operator.arguments[0] if operator.arguments else None
            if not is_plain or not isinstance(first, Reference) or [*operator.reads()] != [first.name]:
                raise _UnfitError(_BETWEEN.format(operator.target))
            name = first.name
        self.hidden, self.weight, self.bias = layer
        if self.weight in apart:
            raise _UnfitError(_COMPONENTS)
        self.vocabulary, self.width = self._shape(self.weight)
        self.rows = tuple(self._rows())
        self._check_dtypes()
        self.derived = self._derived()

    def operator(self) -> Operator:
        """The one operator in the place of all."""
        loss, layer = self.graph.operators[self.place], self.graph.operators[self.between[0]]
        return replace(
            loss,
            target=FUSED,
            arguments=(
                Reference(self.hidden),
                Reference(self.weight),
                None if self.bias is None else Reference(self.bias),
                Reference(self.targets),
                self.rows,
                Token("dtype", self.dtype),
                self.reduction,
                self.ignored,
            ),
            keywords=(),
            flops=layer.flops,
            module=layer.module,
        )

    def _loss_arguments(self, operator: Operator) -> tuple[str, str, int, int]:
        given = loss_arguments(operator)
        scores, target = given["self"], given["target"]
        reduction, ignored = given["reduction"], given["ignore_index"]
        if given["weight"] is not None or given["label_smoothing"] != 0.0:
            raise _UnfitError("its cross-entropy has weights of classes or smooths its labels")
        if reduction not in (MEAN, SUM) or not isinstance(reduction, int) or not isinstance(ignored, int):
            raise _UnfitError("its cross-entropy is no mean and no sum")
        if not isinstance(scores, Reference) or not isinstance(target, Reference):
            raise _UnfitError("its cross-entropy is of constants")
        wanted = self.values.get(target.name)
        if wanted is None or wanted.dtype != "int64" or len(wanted.shape) != 1:
            raise _UnfitError("the targets of its cross-entropy are not one class for each row")
        if scores.name not in self.values or len(self.values[scores.name].shape) != 2:
            raise _UnfitError("its cross-entropy is not of rows with a class in each column")
        return scores.name, target.name, reduction, ignored

    def _layer(self, operator: Operator) -> tuple[str, str, str | None] | None:
        """Hidden states, weight and bias of a linear layer; None for another operator."""
        given = operator.arguments
        if operator.target not in ("aten.linear.default", "aten.matmul.default", "aten.mm.default"):
            return None
        hidden, weight, bias = (*given, None, None)[:3]
        if operator.keywords or not isinstance(hidden, Reference) or not isinstance(weight, Reference):
            return None
        if not isinstance(bias, Reference | None):
            return None
        name = weight.name
        if operator.target != "aten.linear.default":
            turned = self._turned(name)
            if turned is None:
                raise _UnfitError("its last product is not by the transpose of a weight")
            self.transpose, name = name, turned
        if len(self._shape(name)) != 2 or hidden.name not in self.values:
            return None
        return hidden.name, name, None if bias is None else bias.name

    def _turned(self, name: str) -> str | None:
        """The matrix that a value is the transpose of."""
        maker = self.made_by.get(name)
        operator = None if maker is None else self.graph.operators[maker]
        if operator is None or not isinstance(operator.arguments[0], Reference):
            return None
        is_plain = operator.target in ("aten.t.default", "aten.numpy_T.default")
        axes = set(operator.arguments[1:])
        is_transpose = operator.target == "aten.transpose.int" and axes in ({0, 1}, {-1, -2})
        return operator.arguments[0].name if is_plain or is_transpose else None

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight."""
        states = (*self.graph.parameters, *self.graph.buffers)
        shape = next((state.shape for state in states if state.name == name), None)
        if shape is None and name in self.values:
            shape = tuple(evaluate(length, self.graph.batch) for length in self.values[name].shape)
        return shape or ()

    def _rows(self) -> Iterator[Argument]:
        """The operators between the layer and the loss, as the hidden states go through them."""
        before = self.graph.operators[self.between[0]].made[0]
        for place in self.between[1:]:
            operator = self.graph.operators[place]
            made = operator.made[0]
            if made.shape[_LAST] != self.vocabulary or before.shape[_LAST] != self.vocabulary:
                raise _UnfitError(f"{operator.target} between layer and cross-entropy changes what a row is")
            on_hidden = self._on_hidden(operator, len(before.shape))
            if on_hidden is not None:
                yield on_hidden
            before = made

    def _on_hidden(self, operator: Operator, num_axes: int) -> Argument:
        """An operator on logits as an operator on hidden states; None if these can stay as they are."""
        target, given = operator.target, operator.arguments[1:]
        if target in _CASTS:
            return None
        if target in _VIEWS and isinstance(given[0], tuple) and given[0][_LAST] in (self.vocabulary, _LAST):
            # The logits lie in memory row by row, and the hidden states need not.
            return "aten.reshape.default", (*given[0][:_LAST], self.width)
        if target in _SCALES and self.bias is None and len(given) == 1 and isinstance(given[0], int | float):
            return target, *given
        if target == "aten.flatten.using_ints":
            begin, end = given if len(given) == 2 else ((given or (0,))[0], _LAST)
            if isinstance(begin, int) and isinstance(end, int) and end % num_axes != num_axes - 1:
                return target, begin, end
        if target in ("aten.slice.Tensor", "aten.select.int"):
            axis, *bounds = given or (0,)
            if isinstance(axis, int) and axis % num_axes != num_axes - 1:
                return target, *given
            if target == "aten.slice.Tensor" and self._takes_all(*bounds):
                return None
        raise _UnfitError(_BETWEEN.format(target))

    def _takes_all(self, begin: Argument = None, end: Argument = None, step: Argument = 1) -> bool:
        """Whether a slice along the classes leaves none out."""
        reaches_end = end is None or (isinstance(end, int) and end >= self.vocabulary)
        return begin in (0, None) and reaches_end and step == 1

    def _check_dtypes(self) -> None:
        """A cast between is left out: the loss is computed in float32 at least, and rounded at its end."""
        kinds = {self.values[self.graph.operators[place].made[0].name].dtype for place in self.between}
        if not kinds <= {"float64", "float32", "bfloat16"}:  # small gradients vanish in float16
            raise _UnfitError(f"its logits are of {', '.join(sorted(kinds))}")

    def _derived(self) -> set[str]:
        """All that is made of the logits in another way than through the cross-entropy."""
        operators = self.graph.operators
        found = {value.name for place in self.between for value in operators[place].made}
        for place, operator in enumerate(operators):
            if place != self.place and any(name in found for name in operator.reads()):
                if operator.mutates or operator.is_random:
                    raise _UnfitError(f"{operator.target} also uses its logits")
                found.update(value.name for value in operator.made)
        for output in self.graph.outputs:
            if output.name == LOSS and found.intersection(references(output.value)):
                raise _UnfitError(
                    "its loss also uses the logits in another way than through the cross-entropy"
                )
        return found


def _replaced(graph: Graph, match: _Match) -> Graph:
    """The graph with one operator for a layer and its loss, and without all other results of the logits."""
    loss = match.graph.operators[match.place]
    gone = set(match.derived)
    if match.transpose is not None:
        readers = [one for one in graph.operators if match.transpose in [*one.reads()]]
        if all(value.name in gone for one in readers for value in one.made):
            gone.add(match.transpose)
    operators = [
        match.operator() if operator == loss else operator
        for operator in graph.operators
        if not any(value.name in gone for value in operator.made)
    ]
    outputs = [one for one in graph.outputs if not gone.intersection(references(one.value))]
    return replace(graph, operators=tuple(operators), outputs=tuple(outputs))


def keeps_all_logits(graph: Graph, operator: Operator, batch: int) -> bool:
    """Whether a fused operator keeps the gradient of all logits for its backward, at a batch size."""
    hidden, weight, _, targets, *_ = operator.arguments
    assert isinstance(hidden, Reference)
    assert isinstance(weight, Reference)
    assert isinstance(targets, Reference)
    given = graph.values[hidden.name]
    frozen = {state.name for state in (*graph.parameters, *graph.buffers) if not state.trainable}
    return keeps_logits(
        graph.values[targets.name].num_elements(batch),
        evaluate(given.shape[_LAST], batch),
        given.num_bytes(1) // max(given.num_elements(1), 1),
        learns=weight.name not in frozen,
    )
