"""What a run leaves to the planner beside the plan itself: what replicas share, and how they agree.

The ways that the planner may choose are made here, and its choice is put into the run, which keeps it: a run
that is resumed has it as its own.
"""

from collections.abc import Iterator

from bireme.codec.sum_description import SumKind, parse_sum_codec
from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.plan.penalties import SUMS_TO_TRY
from bireme.plan.plan import Plan
from bireme.plan.plan_request import SyncChoice
from bireme.profile.profile import Profile
from bireme.train.link_codecs import rounds_of, sums_of, sums_of_profile
from bireme.train.run_file import RunFile
from bireme.train.run_file.checks import of_another_mode
from bireme.train.run_file.planning import AUTO
from bireme.train.run_file.tables import Sync


def sync_choices(run: RunFile, graph: Graph | None, profile: Profile) -> tuple[SyncChoice, ...]:
    """The ways for the run's replicas to agree, the usual one first; none if the run names its way. Codecs
    whose cost depends on shapes need the graph.
    """
    if not run.sync.is_chosen_by_planner:
        return ()
    return tuple(_choices(run, graph, profile))


def _choices(run: RunFile, graph: Graph | None, profile: Profile) -> Iterator[SyncChoice]:
    def choice(mode: str, codec: str) -> SyncChoice:
        alike = with_agreement(run, mode, codec)
        sums = sums_of_profile(alike, profile) if graph is None else sums_of(alike, graph)
        rounds = rounds_of(alike, graph)
        return SyncChoice(sums, rounds, _unstudied(alike) if alike.sync.averages else "")

    for word in ("none", *SUMS_TO_TRY) if run.sync.codec == AUTO else (run.sync.codec,):
        if graph is not None or parse_sum_codec(word).kind is not SumKind.LOWRANK:
            yield choice("allreduce", word)
    for mode in ("groups", "diloco") if run.sync.mode == AUTO else ():
        yield choice(mode, "none")


_STUDIED = ("diloco_rate", "diloco_momentum", "diloco_fragments", "diloco_overlap")
"""The settings of DiLoCo that the study has one value of each of: that of the defaults."""


def _unstudied(run: RunFile) -> str:
    """Why the study has no figure of the averages of a run; empty if it may have one."""
    sync, usual, balance = run.sync, Sync(), run.balance
    if sync.average_optimizer:
        return "with sync.average_optimizer"
    if balance.mode == "start" or balance.batch == "grow" or balance.replan:
        return "with shares of a batch that [balance] sets"
    names = [name for name in _STUDIED if getattr(sync, name) != getattr(usual, name)]
    return f"with sync.{names[0]} = {getattr(sync, names[0])}" if sync.mode == "diloco" and names else ""


def with_agreement(run: RunFile, mode: str, codec: str) -> RunFile:
    """The run with this mode and this codec of sums, as far as it left them to the planner, and without keys
    that the mode does not use.
    """
    sync = run.sync
    chosen = {
        "mode": mode if sync.mode == AUTO else sync.mode,
        "codec": codec if sync.codec == AUTO else sync.codec,
    }
    found = sync.model_copy(update=chosen)
    if sync.mode == AUTO:
        usual = Sync()
        found = found.model_copy(update={name: getattr(usual, name) for name in of_another_mode(found)})
    return run.model_copy(update={"sync": found})


def check_mode(run: RunFile) -> None:
    """Refuse to leave the mode to the planner if a launcher or several machines start the processes."""
    if run.sync.mode == AUTO:
        raise BiremeError(
            'sync.mode is "auto", but the mode decides which processes each machine starts, and here they '
            "are started before anything is planned. Run bireme plan with a cluster file, and set sync.mode "
            "to the mode that it chooses."
        )


def with_choices(run: RunFile, plan: Plan) -> RunFile:
    """The run with what the planner chose, as the plan has it; it keeps the choice."""
    return _with_shard(
        with_agreement(run, plan.sync_mode or "allreduce", plan.sum_codec or "none"), plan.known_shard
    )


def with_choices_of(run: RunFile, begun: RunFile) -> RunFile:
    """The run with what the planner chose when it was begun."""
    return _with_shard(with_agreement(run, begun.sync.mode, begun.sync.codec), begun.memory.shard)


def _with_shard(run: RunFile, shard: str) -> RunFile:
    if run.memory.shard != AUTO:
        return run
    return run.model_copy(update={"memory": run.memory.model_copy(update={"shard": shard})})
