"""A learned projection at a boundary: few numbers cross it, and training equals one process."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.model.projection import Projection
from bireme.plan.plan import Plan
from tests.support.engine_parity import Setting, assert_equal, oracle, train_on_threads
from tests.support.small_models import Model, captured, token_batches

WIDTH, RANK, VOCAB = 16, 4, 32


class _Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.narrow = Projection(WIDTH, RANK, VOCAB)
        self.after = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(input_ids)
        x = x + torch.tanh(self.before(x))
        logits = self.after(torch.tanh(self.narrow(x, input_ids)))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(min=0))}


def model() -> Model:
    torch.manual_seed(0)
    return captured(_Narrow().double(), token_batches(2, 1)[0], name="narrow")


def test_only_the_narrow_rows_cross_and_training_equals_one_process() -> None:
    narrow = model()
    place = next(
        unit.index
        for unit in narrow.units
        if any(
            value is not None and value.name in unit.receives and value.shape[-1] == RANK
            for operator in narrow.graph.operators
            for value in operator.outputs
        )
    )
    assert len(narrow.units[place].receives) == 1
    after = {name for unit in narrow.units[place:] for name in unit.parameters}
    assert {"narrow.basis", "narrow.anchors"} <= after
    setting = Setting(Plan((place,), 4, "2bw-fresh"))
    data = token_batches(8, 4)
    assert_equal(train_on_threads(narrow, setting, data), oracle(narrow, setting, data), tolerance=1e-9)


def test_a_projection_gives_back_what_lies_in_its_basis() -> None:
    torch.manual_seed(0)
    own = Projection(WIDTH, RANK, VOCAB).double()
    with torch.no_grad():
        own.anchors.normal_()
    ids = torch.arange(6)
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    once = own(x, ids)
    assert not torch.allclose(once, x)
    assert torch.allclose(own(once, ids), once)
