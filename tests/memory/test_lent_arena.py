"""An arena whose memory comes and goes: tensors that autograd has saved find what is put there again."""

import ctypes
from pathlib import Path
from threading import Thread

import pytest
import torch

from bireme.memory.arena import LentArena, Slots
from bireme.memory.system_memory import PAGE_BYTES, give_back_heap


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
    found.sum().backward()
    assert given.grad is not None
    assert torch.equal(given.grad, values[:6].view(3, 2).sum(0).expand(4, 2))


def test_pages_go_back_from_whichever_thread_is_done_with_them() -> None:
    """Gradients that had been summed stayed until the rank asked for their sums."""
    arena = LentArena(Slots({"weight": (3, 2)}), torch.float64, torch.device("cpu"))
    arena.take()
    arena.flat.fill_(7.0)
    thread = Thread(target=arena.let_go_of_pages)
    thread.start()
    thread.join()
    assert not arena.flat.any()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc alone can be asked")
def test_what_was_freed_in_the_midst_of_the_heap_goes_back_to_the_system() -> None:
    """Activations that a backward had used stayed beside the weights of the next stage."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES

    num_bytes, count = 100_000, 300
    blocks = [torch.ones(num_bytes, dtype=torch.uint8) for _ in range(count)]
    last = blocks.pop()
    before = resident_bytes()
    blocks.clear()
    give_back_heap()
    assert before - resident_bytes() > num_bytes * count / 2
    assert last.all()
