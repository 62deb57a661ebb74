"""What `[memory]` of a run file goes with: paging, and replicas that share."""

from bireme.errors import BiremeError
from bireme.schedule.catalogue import SCHEDULES
from bireme.schedule.rule import Rule
from bireme.train.run_file.memory import Memory
from bireme.train.run_file.planning import Planning
from bireme.train.run_file.tables import Tables

__all__ = ["check_memory"]


def check_memory(tables: Tables) -> None:
    """Refuse keys of `[memory]` that contradict each other or other tables."""
    _check_paging(tables.memory, tables.plan)
    _check_updates(tables)
    _check_shard(tables)
    if tables.memory.is_on and tables.training.gradient != "whole":
        raise BiremeError(
            f'training.gradient is "{tables.training.gradient}", but memory.device is set, and only whole '
            "gradients are paged. Leave one of the two out."
        )


def _check_paging(memory: Memory, plan: Planning) -> None:
    usual = Memory()
    paging = [name for name in Memory.model_fields if name != "shard"]
    given = [name for name in paging if getattr(memory, name) != getattr(usual, name)]
    if plan.file is not None:
        more = [name for name in given if name != "disk"]
        if more:
            raise BiremeError(
                f'plan.file is "{plan.file}", which says what is paged, but memory.{more[0]} asks for a new '
                "plan. Leave out one of the two."
            )
    elif given and not memory.is_on:
        raise BiremeError(
            f"memory.{given[0]} is set, but memory.device is not, so nothing is paged. Set memory.device, to "
            '"auto" or to bytes such as "6GB".'
        )
    if memory.device_bytes == 0:
        raise BiremeError(
            'memory.device is 0, so there is no room for any stage. Set it to "auto", or to bytes such as '
            '"6GB".'
        )
    if memory.disk is None and memory.disk_bytes != usual.disk_bytes:
        raise BiremeError(
            f"memory.disk_bytes is {memory.disk_bytes}, but memory.disk names no folder. Set memory.disk too."
        )
    if memory.is_on and memory.host_bytes == 0 and memory.most_disk_bytes == 0:
        raise BiremeError(
            "memory.host is 0 and there is no memory.disk, so there is nothing to page to. Set one of them."
        )


def _check_updates(tables: Tables) -> None:
    """A stage that steps before the others knows nothing of their gradients."""
    if tables.memory.updates == "agreed":
        return
    clip_norm, schedule, width = tables.training.clip_norm, tables.plan.schedule, tables.plan.width
    if clip_norm:
        raise BiremeError(
            f'memory.updates is "apart", but training.clip_norm is {clip_norm:g}, and a stage that steps '
            "before the others cannot know the norm of the whole gradient. Set training.clip_norm = 0, or "
            "leave out memory.updates."
        )
    known = SCHEDULES.get(schedule)
    if known is not None and known.rule is not Rule.SYNCHRONOUS:
        raise BiremeError(
            f'memory.updates is "apart", but plan.schedule is "{schedule}", which updates late and never '
            'drains. Use a schedule that drains between batches, such as "1f1b", or leave out memory.updates.'
        )
    if width is not None and width > 1:
        raise BiremeError(
            f'memory.updates is "apart", but plan.width is {width}, and gradients are summed over replicas '
            "before any stage steps. Set plan.width = 1, or leave out memory.updates."
        )


def _check_shard(tables: Tables) -> None:
    """Replicas that share an optimiser need each other in every batch, and step parts of parameters."""
    if tables.memory.shard == "none":
        return
    why = {
        "memory.device": (tables.memory.device, None, "what replicas share is not paged"),
        "sync.mode": (tables.sync.mode, "all", "each replica needs all others in every batch"),
        "sync.codec": (tables.sync.codec, "none", "each replica gets the plain sum of its part"),
        "training.gradient": (tables.training.gradient, "whole", "only whole gradients have parts"),
    }
    for key, (value, usual, reason) in why.items():
        if value != usual:
            raise BiremeError(
                f'memory.shard is "{tables.memory.shard}", but {key} is {value!r}, and {reason}. Leave out '
                "one of the two."
            )
    if tables.memory.shard == "weights" and tables.plan.schedule == "2bw-fresh":
        raise BiremeError(
            'memory.shard is "weights", but plan.schedule is "2bw-fresh", whose trial steps need whole '
            'gradients of one replica. Use "2bw", or memory.shard = "optimizer".'
        )
    if tables.training.optimizer == "muon":
        raise BiremeError(
            f'memory.shard is "{tables.memory.shard}", but training.optimizer is "muon", which steps whole '
            'matrices, and parts begin and end within them. Use "adamw" or "sgd", or leave out memory.shard.'
        )
