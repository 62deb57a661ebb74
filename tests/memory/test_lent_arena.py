"""An arena whose memory comes and goes: tensors that autograd has saved find what is put there again."""

import torch

from bireme.memory.lent_arena import LentArena
from bireme.memory.slots import Slots


def test_a_backward_runs_on_what_has_come_back_since_its_forward() -> None:
    slots = Slots({"weight": (3, 2), "bias": (3,)})
    arena = LentArena(slots, torch.float64, torch.device("cpu"))
    leaves = {name: view.detach().requires_grad_() for name, view in arena.views.items()}
    given = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    values = torch.randn(slots.num_elements, dtype=torch.float64)

    arena.take()
    arena.unversioned.copy_(values)
    found = torch.nn.functional.linear(given, leaves["weight"], leaves["bias"])
    arena.let_go()
    assert not arena.flat.any(), "the system has the pages"
    arena.take()
    arena.unversioned.copy_(values)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert given.grad is not None
    assert torch.equal(given.grad, values[:6].view(3, 2).sum(0).expand(4, 2))
