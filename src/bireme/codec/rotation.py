"""The Hadamard rotation of columns: every number of a block becomes a sum of all of them.

A large number is spread over its block, so that few bits serve all of them alike. It is made of sums and
differences of whole rows, in one order everywhere: the same bits on every processor.
"""

import torch
from torch import Tensor

__all__ = ["rotated"]


def rotated(columns: Tensor) -> Tensor:
    """The Hadamard matrix (of ones and minus ones) times `columns`, whose rows are a power of two.

    Twice the rotation is the columns times the number of rows. What is given is used for scratch.
    """
    num_rows, num_columns = columns.shape
    now, other = columns, torch.empty_like(columns)
    step = 1
    while step < num_rows:
        pairs = now.view(-1, 2, step, num_columns)
        into = other.view(-1, 2, step, num_columns)
        torch.add(pairs[:, 0], pairs[:, 1], out=into[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=into[:, 1])
        now, other = other, now
        step *= 2
    return now
