"""A narrow place in a model: rows go through an orthonormal basis that the model learns, and out again.

    x ──minus the token's anchor, times the basis──▶ few numbers ──times its transpose, plus the anchor──▶

A pipeline is cut where it is narrow, so a boundary that lies here carries `rank` numbers a token instead of
`width`, each way. The tokens' numbers do not travel: every stage reads the inputs that it needs. This is the
idea of MAPL (arXiv 2606.05484), and a part of the model rather than a codec: basis and anchors are parameters
that both stages share, with versions, an optimizer's state and a place in checkpoints like any other, and the
exported model has them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

_DEVIATION = 0.02


class Projection(nn.Module):
    """Rows of `width` numbers as what `rank` numbers say of them, and the anchor of their token."""

    def __init__(self, width: int, rank: int, vocab: int) -> None:
        super().__init__()
        assert 1 <= rank <= width
        self.basis = nn.Parameter(torch.empty(width, rank))
        self.anchors = nn.Parameter(torch.empty(vocab, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A random basis, and anchors of zero."""
        nn.init.normal_(self.basis, std=_DEVIATION)
        nn.init.zeros_(self.anchors)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """`x` is (…, width) and `ids` the token of each row."""
        # Made twice, so that nothing but the narrow rows is needed on both sides.
        narrow = (x - functional.embedding(ids, self.anchors)) @ self._orthonormal()
        return narrow @ self._orthonormal().transpose(0, 1) + functional.embedding(ids, self.anchors)

    def _orthonormal(self) -> Tensor:
        """The basis, its columns made orthonormal."""
        basis: Tensor = torch.linalg.qr(self.basis).Q
        return basis
