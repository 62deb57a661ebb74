"""What a block of memory is called where people read about it."""

from bireme.profile.behaviour import Block

__all__ = ["block_name"]


def block_name(block: Block, longest: int | None = None) -> str:
    """Its own name, else where it was made and by what; what is too long loses its middle."""
    operator = block.birth_operator.removeprefix("aten.")
    made = f"{block.module} {operator}" if block.module else operator
    name = block.name or made or "there before"
    if longest is not None and len(name) > longest:
        head = longest // 3
        return f"{name[:head]}…{name[head + 1 - longest :]}"
    return name
