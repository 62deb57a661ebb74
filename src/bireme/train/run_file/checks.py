"""What the keys of a run file must be to each other: each mistake one sentence, before any process starts.

It may assume that every key is right by itself. It must not look at files, devices or models.
"""

from functools import partial
from typing import Any

from bireme.capabilities import refuse_excluded, used_by
from bireme.documents import toml_value
from bireme.errors import BiremeError, errors_of
from bireme.schedule.catalogue import SCHEDULES
from bireme.schedule.program import Rule
from bireme.train.run_file.planning import AUTO, Balancing, LinksTable, Memory, Planning
from bireme.train.run_file.table import given
from bireme.train.run_file.tables import ClusterTable, Model, Sync, Tables, Training


def value_of(tables: Tables, key: str) -> Any:
    """The value of a key such as "plan.schedule"."""
    found: Any = tables
    for name in key.split("."):
        found = getattr(found, name)
    return found


# Keys of `[memory]`.


def check_memory(tables: Tables) -> None:
    """Refuse keys of `[memory]` that contradict each other or other tables."""
    check_paging(tables.memory, tables.plan)
    _check_updates(tables)
    if tables.memory.copies == 0 and tables.memory.copy_rate is not None:
        raise BiremeError(
            f'memory.copy_rate is "{tables.memory.copy_rate}", but memory.copies is 0, so nothing is copied. '
            "Leave out memory.copy_rate, or set memory.copies = 1."
        )
    shard, sync = tables.memory.shard, tables.sync
    if shard not in ("none", AUTO) and sync.is_coordinated and sync.sites is None:
        raise BiremeError(
            f'memory.shard is "{shard}", but sync.mode is {sync.mode!r}, and each replica needs those that '
            "it shares with in every batch. Set sync.sites, so that replicas of a site share."
        )


def check_paging(memory: Memory, plan: Planning) -> None:
    """Refuse keys of paging that contradict each other or the plan's file."""
    asked = [name for name in given(memory) if name not in ("shard", "copies", "copy_rate")]
    if plan.file is not None:
        more = [name for name in asked if name != "disk"]
        if more:
            raise BiremeError(
                f'plan.file is "{plan.file}", which says what is offloaded, but memory.{more[0]} asks for '
                "a new plan. Leave out one of the two."
            )
    elif asked and not memory.is_on:
        raise BiremeError(
            f"memory.{asked[0]} is set, but memory.device is not, so nothing is offloaded. Set "
            'memory.device, to "auto" or to bytes such as "6GB".'
        )
    if memory.device_bytes == 0:
        raise BiremeError(
            'memory.device is 0, so there is no room for any stage. Set it to "auto", or to bytes such as '
            '"6GB".'
        )
    if memory.disk is None and "disk_bytes" in asked:
        raise BiremeError(
            f"memory.disk_bytes is {memory.disk_bytes}, but memory.disk names no folder. Set memory.disk too."
        )
    if memory.is_on and memory.host_bytes == 0 and memory.most_disk_bytes == 0:
        raise BiremeError(
            "memory.host is 0 and there is no memory.disk, so there is nothing to offload to. Set one of "
            "them."
        )


def _check_updates(tables: Tables) -> None:
    """Refuse updates apart if gradients are summed, or if the pipeline never drains."""
    if tables.memory.updates == "agreed":
        return
    schedule, width = tables.plan.schedule, tables.plan.width
    if tables.training.gradient_form is not None:
        raise BiremeError(
            f'memory.updates is "apart", but training.gradient is "{tables.training.gradient}", whose '
            "components are found when all stages of a rank have their gradients. Leave out memory.updates, "
            'or set training.gradient = "whole".'
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


DELAY_WARMUP = ("delay_warmup_fraction", "delay_warmup_steps")

ONE_OF_TWO = {
    ("model.weights", "model.from_scratch"): "the latter asks for new weights",
    ("model.train", "model.freeze"): "one names what learns, the other what does not",
    ("model.lora.rank", "model.train"): "only the adapter learns",
    ("model.lora.rank", "model.freeze"): "only the adapter learns",
    ("data.source", "data.mixture"): "data come from one of the two, and a source may be one of the mixture",
    ("data.evaluation_fraction", "data.evaluation_source"): "evaluation uses only one of them",
    ("training.warmup_steps", "training.warmup_fraction"): "both set the length of the warm-up",
    ("plan.microbatches", "plan.micro_batch"): "the batch is cut by their number or by their size",
    ("plan.largest_batch", "plan.microbatches"): "the planner can only choose the batch where it may choose "
    "the number of micro-batches",
    ("plan.delay_warmup_steps", "plan.delay_warmup_fraction"): "both set when delayed updates begin",
    ("balance.batch", "plan.largest_batch"): "both choose the size of the batch",
    ("balance.batch", "data.private"): "the latter places samples for batches of training.batch_size",
}
"""Keys of which at most one may be given, and why."""

NEEDED = {
    ("data.source", "data.mixture"): "Give one of them.",
    ("data.evaluation_fraction", "data.evaluation_source"): "Give one of them; a fraction of 0 turns "
    "evaluation off.",
    ("training.warmup_fraction", "training.warmup_steps"): "Give one of them; 0 is no warm-up.",
}
"""Keys of which one must be given, and the remedy."""

OF_MODES = {
    "lease_s": ("quorum", "groups", "diloco"),
    "grace_s": ("quorum", "diloco"),
    "compare_every": ("quorum",),
    "average_optimizer": ("groups", "diloco"),
    "sites": ("quorum", "groups", "diloco"),
    "connect_every": ("groups",),
}
"""The modes in which a key of `[sync]` has an effect, where these are not all. Keys that begin with `diloco_`
have one in that mode alone.
"""


def check_together(tables: Tables) -> None:
    """Refuse capabilities that exclude each other, keys that contradict each other, and idle keys."""
    refuse_excluded(used_by(partial(value_of, tables)))
    _check_one_of_two(tables)
    _check_part(tables.model)
    _check_optimizer(tables.training)
    _check_epochs(tables)
    _check_rates(tables.training)
    _check_plan_file(tables.plan)
    _check_batch(tables.plan, tables.training.batch_size)
    _check_delay(tables.plan, tables.training.steps)
    _check_machines(tables.cluster)
    _check_balance(tables.balance, tables.plan)
    _check_links(tables.links)
    check_memory(tables)
    _check_balance_of_mode(tables)
    _check_modes(tables.sync)
    if tables.sync.sites is not None and tables.sync.mode == "quorum" and tables.memory.shard == "none":
        raise BiremeError(
            f'sync.sites is {tables.sync.sites}, but sync.mode is "quorum" and memory.shard is "none": '
            "replicas that keep all of their state can die one by one. Leave out sync.sites, or set "
            'memory.shard = "optimizer" or "weights".'
        )
    if tables.sync.sites is not None and tables.plan.width is not None:
        check_sites(tables.sync.sites, tables.plan.width)


def _check_one_of_two(tables: Tables) -> None:
    for pair, why in ONE_OF_TWO.items():
        found = {key: value_of(tables, key) for key in pair}
        if all(value is not None and value is not False and value != "keep" for value in found.values()):
            texts = {key: toml_value(value) for key, value in found.items()}
            words = " and ".join(
                f"{key} is {text[:_MOST_SHOWN]}{'…' * (len(text) > _MOST_SHOWN)}"
                for key, text in texts.items()
            )
            raise BiremeError(f"{words}: {why}. Leave out one of the two.")
    for (first, second), remedy in NEEDED.items():
        if value_of(tables, first) is None and value_of(tables, second) is None:
            raise BiremeError(f"{first} is None, and so is {second}. {remedy}")
    loss = tables.model.loss
    if loss is not None and tables.model.source.startswith("gpt:"):
        raise BiremeError(
            f'model.loss is "{loss}", but the built-in GPT returns its loss itself. Leave it out.'
        )


_MOST_SHOWN = 60
"""Letters of a value in a sentence on two keys."""


def _check_balance_of_mode(tables: Tables) -> None:
    """The coordinator assigns samples by speed, so that keys of another way to do it have no effect."""
    sync, balance = tables.sync, tables.balance
    idle = {"mode": balance.mode == "start", "batch": balance.batch == "grow", "replan": balance.replan}
    name = next((name for name, is_set in idle.items() if is_set), None)
    if sync.is_coordinated and name is not None:
        raise BiremeError(
            f"balance.{name} is {toml_value(getattr(balance, name))}, but sync.mode is "
            f'"{sync.mode}", in which the coordinator assigns samples by the speed of the replicas. Leave '
            f'balance.{name} out, or use sync.mode = "allreduce".'
        )


def check_sites(sites: int, width: int) -> None:
    """Refuse to put replicas into sites that cannot have equally many."""
    if width % sites:
        raise BiremeError(
            f"sync.sites is {sites}, but there are {width} replicas (plan.width), which {sites} does not "
            f"divide. Set plan.width to a multiple, such as {-(-width // sites) * sites}, or change "
            "sync.sites."
        )


def of_another_mode(sync: Sync) -> list[str]:
    """The keys of `[sync]` that are given and have no effect in the run's mode."""
    return [name for name in given(sync) if sync.mode not in _modes_of(name, sync.mode)]


def _modes_of(name: str, mode: str) -> tuple[str, ...]:
    """The modes in which a key of `[sync]` has an effect. The planner may choose averages for any number of
    replicas, but not sites.
    """
    modes = OF_MODES.get(name, ("diloco",) if name.startswith("diloco_") else (mode,))
    return (*modes, AUTO) if name != "sites" and {"groups", "diloco"} & {*modes} else modes


def _check_modes(sync: Sync) -> None:
    """Keys of one way to agree have no effect in another one."""
    for name in of_another_mode(sync)[:1]:
        others = " or ".join(f'"{mode}"' for mode in _modes_of(name, sync.mode) if mode != AUTO)
        raise BiremeError(
            f'sync.{name} is {getattr(sync, name)}, but sync.mode is "{sync.mode}", which does not use '
            f"it. Leave it out, or set sync.mode = {others}."
        )
    if sync.mode not in ("diloco", AUTO):
        return
    for name, value in (("diloco_fragments", sync.diloco_fragments), ("diloco_overlap", sync.diloco_overlap)):
        if value > sync.diloco_every:
            raise BiremeError(
                f"sync.{name} is {value}, but there are only {sync.diloco_every} batches between two "
                f"averages (sync.diloco_every). Make it {sync.diloco_every} at most."
            )


def _check_part(model: Model) -> None:
    lora = model.lora
    if lora.rank is None:
        if asked := given(lora):
            raise BiremeError(
                f"model.lora.{asked[0]} is set, but model.lora.rank is not, so there is no adapter. Set "
                "model.lora.rank, such as 8."
            )
        return
    if lora.use_dora and lora.dropout and model.frozen_dtype is not None:
        raise BiremeError(
            "With model.lora.use_dora and model.lora.dropout a layer multiplies by its whole weight once "
            "more and keeps it for the backward, so model.frozen_dtype would save no memory. Leave out one "
            "of the three."
        )


def _check_optimizer(training: Training) -> None:
    name = training.optimizer
    if training.rest_learning_rate is not None and name != "muon":
        raise BiremeError(
            f"training.rest_learning_rate is {training.rest_learning_rate:g}, but training.optimizer is "
            f'"{name}" which uses training.learning_rate for all parameters. Leave it out, or use "muon".'
        )
    if training.momentum is not None and name not in ("sgd", "muon"):
        raise BiremeError(
            f'training.momentum is {training.momentum:g}, but training.optimizer is "{name}", which uses '
            "training.betas instead. Leave training.momentum out."
        )
    if training.gradient_of is not None and training.gradient_form is None:
        raise BiremeError(
            'training.gradient_of is set, but training.gradient is "whole". Leave it out, or set '
            "training.gradient, such as principal:8."
        )


def _check_epochs(tables: Tables) -> None:
    """Refuse epochs together with steps, and with samples that are not all counted before the run."""
    epochs, data = tables.training.epochs, tables.data
    if epochs is None:
        return
    uncounted = {
        f"training.steps is {tables.training.steps}": tables.training.steps is not None,
        "data.mixture takes its sources in turns": data.mixture is not None,
        "data.private names samples that other servers count": data.private is not None,
        'balance.batch is "grow", so the batch is not known before': tables.balance.batch == "grow",
        "plan.largest_batch lets the planner choose the batch": tables.plan.largest_batch is not None,
    }
    why = next((why for why, is_so in uncounted.items() if is_so), None)
    if why is not None:
        remedy = "Leave out one of the two." if "training.steps" in why else "Set training.steps instead."
        raise BiremeError(f"training.epochs is {epochs:g}, but {why}. {remedy}")


def _check_rates(training: Training) -> None:
    if training.epochs is not None:
        return  # checked again when the steps are counted
    name = "steps" if training.schedule_steps is None else "schedule_steps"
    if training.num_warmup_steps > training.num_schedule_steps:
        raise BiremeError(
            f"training.warmup_steps is {training.num_warmup_steps}, but training.{name} is "
            f"{training.num_schedule_steps}: the learning rate would never reach its height. Make warm-up "
            "shorter, or train longer."
        )
    left = training.steps - training.num_schedule_steps
    if training.after_schedule == "restart" and 0 < left < (training.warmup_steps or 0):
        raise BiremeError(
            f'training.after_schedule is "restart", but after training.schedule_steps = '
            f"{training.schedule_steps} there are {left} steps left, fewer than training.warmup_steps = "
            f"{training.warmup_steps}. Make warm-up shorter, or train longer."
        )
    warm = training.num_warmup_steps / training.num_schedule_steps
    if training.warmup_fraction is not None:
        warm = training.warmup_fraction
    # Shares that are one together in decimals may be a last bit more in binary.
    if training.schedule == "wsd" and warm + training.decay_fraction > 1 + 1e-9:
        raise BiremeError(
            f"Warm-up takes {warm:g} of all steps and training.decay_fraction is "
            f"{training.decay_fraction:g}: together they are more than 1. Make one of them shorter."
        )


def _check_plan_file(plan: Planning) -> None:
    if plan.file is None:
        return
    asked = [name for name in given(plan) if name not in ("file", *DELAY_WARMUP)]
    if asked:
        raise BiremeError(
            f'plan.file is "{plan.file}", which is a whole plan, but plan.{asked[0]} asks for a new one. '
            "Leave out one of the two."
        )


def _check_batch(plan: Planning, batch_size: int) -> None:
    if plan.largest_batch is not None and plan.largest_batch < batch_size:
        raise BiremeError(
            f"plan.largest_batch is {plan.largest_batch}, but training.batch_size is {batch_size}, which is "
            "the least that a step has. Make one of them equal to the other, or leave out plan.largest_batch."
        )
    width = plan.width or 1
    if batch_size < width:
        raise BiremeError(
            f"training.batch_size is {batch_size}, but plan.width is {width}: every replica needs a "
            "sample. Make the batch larger, or the width smaller."
        )
    name = "microbatches" if plan.micro_batch is None else "micro_batch"
    share = plan.microbatches if plan.micro_batch is None else plan.micro_batch
    if share is None or batch_size % (width * share) == 0:
        return
    divisor = f"plan.{name} = {share}"
    if plan.width is not None:
        divisor = f"plan.width = {width} times {divisor}"
    raise BiremeError(
        f"training.batch_size is {batch_size}, which {divisor} does not divide. Make the batch a multiple "
        f"of {width * share}, such as {-(-batch_size // (width * share)) * width * share}."
    )


def _check_delay(plan: Planning, steps: int | None) -> None:
    rule = Rule.SYNCHRONOUS if plan.schedule == "auto" else SCHEDULES[plan.schedule].rule
    if plan.synchronous and rule is not Rule.SYNCHRONOUS:
        raise BiremeError(
            f'plan.synchronous forbids plan.schedule = "{plan.schedule}", whose update rule is {rule}. '
            "Leave out one of the two."
        )
    for name in DELAY_WARMUP:
        if value := getattr(plan, name):
            _check_delay_warmup(plan, steps, f"plan.{name} is {value:g}", rule)


def _check_delay_warmup(plan: Planning, steps: int | None, asked: str, rule: Rule) -> None:
    if plan.synchronous:
        raise BiremeError(f"{asked}, but plan.synchronous forbids delayed updates. Leave out one of the two.")
    if plan.schedule != "auto" and rule is Rule.SYNCHRONOUS:
        raise BiremeError(
            f'{asked}, but plan.schedule is "{plan.schedule}", which delays no updates. Leave out one of '
            "the two."
        )
    if steps is not None and (plan.num_delay_warmup_steps(steps) or 0) > steps:
        raise BiremeError(
            f"{asked}, but training.steps is {steps}: updates would never be delayed. Make it shorter, or "
            "set plan.synchronous."
        )


def _check_links(links: LinksTable) -> None:
    parts = links.schedule
    if parts.first_fraction + parts.last_fraction > 1:
        raise BiremeError(
            f"links.schedule.first_fraction is {parts.first_fraction:g} and last_fraction is "
            f"{parts.last_fraction:g}: together they are more than the whole run. Make one of them smaller."
        )
    named = [one.boundary for one in links.boundaries or ()]
    twice = next((boundary for boundary in named if named.count(boundary) > 1), None)
    if twice is not None:
        raise BiremeError(f"links.boundaries names the boundary {twice} twice. Leave out one of the two.")
    for one in links.boundaries or ():
        with errors_of(f"links.boundaries, boundary {one.boundary}"):
            _ = one.codecs


def _check_machines(cluster: ClusterTable) -> None:
    if cluster.backend == "nccl" and cluster.device == "cpu":
        raise BiremeError(
            'cluster.backend is "nccl", which joins only GPUs, but cluster.device is "cpu". Use "gloo" or '
            '"auto".'
        )


def _check_balance(balance: Balancing, plan: Planning) -> None:
    grows = balance.batch == "grow"
    if balance.mode == "off" and (grows or balance.replan):
        asked = 'batch is "grow"' if grows else "replan is true"
        raise BiremeError(
            f'balance.{asked}, but balance.mode is "off", which measures nothing. Leave out one of the two.'
        )
    if plan.width == 1 and (balance.mode == "start" or grows):
        asked = 'mode is "start"' if balance.mode == "start" else 'batch is "grow"'
        raise BiremeError(
            f"balance.{asked}, but plan.width is 1: with one replica it has no effect. Leave it out, or plan "
            "for more replicas."
        )
