"""What ranks are called in pictures and traces."""

from bireme.schedule.program import Program

__all__ = ["rank_name"]

MOST_STAGES = 4


def rank_name(program: Program, rank: int) -> str:
    """Such as `rank 0 · stages 0, 7`; of many stages the first two and the last."""
    stages = [str(stage) for stage in program.stages_of(rank)]
    if len(stages) > MOST_STAGES:
        stages = [*stages[:2], "...", stages[-1]]
    return f"rank {rank} · stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}"
