"""How ranks and replicas exchange data: codecs of boundaries and of sums, and how replicas agree.

The planner chooses what the run file leaves to it among the ways that are made here. The run keeps the
choice: a run that is resumed has it as its own.
"""

from dataclasses import replace
from typing import Any

from bireme.codec.description import AS_IT_IS, NONE, BoundaryCodecs, CodecPhase, LinkCodecs
from bireme.codec.sum_description import (
    DENSE,
    SiteRounds,
    SumCodec,
    SumCost,
    SumKind,
    parse_sum_codec,
    sum_cost,
)
from bireme.errors import BiremeError, Tell
from bireme.model.graph import Graph
from bireme.model.units import chosen_maps
from bireme.plan.penalties import SUMS_TO_TRY
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan, load_plan
from bireme.plan.plan_request import SyncChoice, may_delay_updates
from bireme.profile.optimizers import kept_gradients, moments_share, sum_cost_of
from bireme.profile.profile import Profile
from bireme.train.folder import RunFolder
from bireme.train.run_file import RunFile
from bireme.train.run_file.checks import of_another_mode
from bireme.train.run_file.planning import AUTO, LinksTable
from bireme.train.run_file.tables import Sync


def sync_choices(run: RunFile, graph: Graph | None, profile: Profile) -> tuple[SyncChoice, ...]:
    """The ways for the run's replicas to agree, the usual one first; none if the run names its way. Codecs
    whose cost depends on shapes need the graph.
    """
    if AUTO not in (run.sync.mode, run.sync.codec):
        return ()
    words = ["none", *SUMS_TO_TRY] if run.sync.codec == AUTO else [run.sync.codec]
    if graph is None:
        words = [word for word in words if parse_sum_codec(word).kind is not SumKind.LOWRANK]
    averages = [(mode, "none") for mode in ("groups", "diloco") if run.sync.mode == AUTO]
    found = []
    for mode, codec in [*(("allreduce", word) for word in words), *averages]:
        alike = with_agreement(run, mode, codec)
        sums = sums_of_profile(alike, profile) if graph is None else sums_of(alike, graph)
        found.append(SyncChoice(sums, rounds_of(alike, graph), _unstudied(alike)))
    return tuple(found)


_STUDIED = ("diloco_rate", "diloco_momentum", "diloco_fragments", "diloco_overlap")
"""The settings of DiLoCo that the study has one value of each of: that of the defaults."""


def _unstudied(run: RunFile) -> str:
    """Why the study has no figure of a run that averages; empty if it may have one, or the run does not."""
    sync, usual, balance = run.sync, Sync(), run.balance
    if not sync.averages:
        return ""
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
    chosen = {key: one for key, one in (("mode", mode), ("codec", codec)) if getattr(run.sync, key) == AUTO}
    found, usual = run.with_keys("sync", **chosen), Sync()
    if "mode" in chosen:
        return found.with_keys("sync", **{key: getattr(usual, key) for key in of_another_mode(found.sync)})
    return found


def with_choices(run: RunFile, plan: Plan) -> RunFile:
    """The run with what the planner chose, as the plan has it; it keeps the choice."""
    return _chosen(run, plan.sync_mode or "allreduce", plan.sum_codec or "none", plan.known_shard)


def with_choices_of(run: RunFile, begun: RunFile) -> RunFile:
    """The run with what the planner chose when it was begun."""
    return _chosen(run, begun.sync.mode, begun.sync.codec, begun.memory.shard)


def _chosen(run: RunFile, mode: str, codec: str, shard: str) -> RunFile:
    run = with_agreement(run, mode, codec)
    return run.with_keys("memory", shard=shard) if run.memory.shard == AUTO else run


# Gradients that a run keeps as principal components: what they take.


def with_kept_gradients(run: RunFile, graph: Graph, profile: Profile) -> Profile:
    """The profile of the run: gradients take what is kept of them."""
    form = run.training.gradient_form
    if form is None:
        return profile
    may_delay = may_delay_updates(run.plan.schedule, synchronous=run.plan.synchronous)
    return kept_gradients(graph, form).counted_in(profile, may_delay=may_delay)


def check_gradient(run: RunFile, graph: Graph) -> None:
    """Refuse patterns of training.gradient_of that name no weight of a linear map."""
    if run.training.gradient_form is not None:
        chosen_maps(graph, run.training.gradient_form)


def gradient_document(run: RunFile, graph: Graph) -> dict[str, Any]:
    """For a document: what the gradients of one batch take, and would if they were whole."""
    form = run.training.gradient_form
    return {} if form is None else {"gradient": kept_gradients(graph, form).document(graph)}


# Sums of gradients over replicas as a run asks for them, and averages of weights: what they cost, and whether
# there are any.


def sums_of(run: RunFile, graph: Graph) -> SumCost:
    """What the run's codec makes of the sums of a model's gradients. An average of weights is as large."""
    codec, form = _sum_codec(run), run.training.gradient_form
    return sum_cost(codec, graph.gradient_shapes) if form is None else sum_cost_of(graph, codec, form)


def _sum_codec(run: RunFile) -> SumCodec:
    """The codec that a run names; none where the planner chooses."""
    return DENSE if run.sync.codec == AUTO else parse_sum_codec(run.sync.codec)


def rounds_of(run: RunFile, graph: Graph | None) -> SiteRounds | None:
    """What the run's replicas, or its sites, send each other as the coordinator grants it; None if they sum
    with each other without one. Runs that average the optimizer's state need the graph.
    """
    sync = run.sync
    if not sync.is_coordinated:
        return None
    if not sync.averages:
        return SiteRounds(in_parts=sync.sites is not None)
    state_share = 0.0
    if sync.average_optimizer and graph is not None:
        state_share = moments_share(graph.parameters, run.training.optimizer)
    in_parts = not sync.average_optimizer or run.memory.shard not in ("none", AUTO)
    is_coded = _sum_codec(run) != DENSE
    if sync.mode == "groups":
        # The means of groups and of windows; with a codec also the drift, and the weights that it is from.
        kept_share = 2 * state_share + (4.0 if is_coded else 2.0)
        return SiteRounds(
            averages=True,
            state_share=state_share,
            in_parts=in_parts,
            kept_share=kept_share,
            connect_every=sync.connect_every,
        )
    return SiteRounds(
        averages=True,
        every=sync.diloco_every,
        fragments=sync.diloco_fragments,
        lag=sync.diloco_overlap,
        state_share=state_share,
        in_parts=in_parts,
        # The start and the momentum, the drift, and the means of rounds and of windows.
        kept_share=2 * state_share + 5.0,
    )


def sums_of_profile(run: RunFile, profile: Profile) -> SumCost:
    """The same if only a profile of the model is there: the gradients of a unit count as one vector."""
    codec, form = _sum_codec(run), run.training.gradient_form
    asked = {
        "training.gradient": (form is not None, "linear maps"),
        "sync.codec": (codec.kind is SumKind.LOWRANK, "matrices"),
        "sync.average_optimizer": (run.sync.average_optimizer, "parameters"),
    }
    for key, (is_asked, shapes) in asked.items():
        if is_asked:
            table, name = key.split(".")
            raise BiremeError(
                f"{key} is {getattr(getattr(run, table), name)}, whose cost depends on the shapes of the "
                f"model's {shapes}, and a profile does not have them. Name the model too: model.source."
            )
    return sum_cost(codec, [(unit.gradient_bytes // 4,) for unit in profile.units])


def idle_keys(run: RunFile, plan: Plan) -> tuple[str, ...]:
    """Sentences about what the run asks of its replicas in vain: there is just one, or it ends too soon."""
    codec = parse_sum_codec(run.sync.codec)
    if plan.width > 1:
        if codec.whole_steps < run.training.steps or not codec.whole_steps:
            return ()
        return (
            f"sync.codec = {run.sync.codec} has no effect: the first {codec.whole_steps} steps send whole "
            f"gradients, and the run has {run.training.steps}. Set training.steps to more, or write "
            f"{replace(codec, whole_steps=0)} to begin at once.",
        )
    found = []
    if codec != DENSE:
        found.append(
            f"sync.codec = {run.sync.codec} has no effect: the plan has one replica, so there are no sums "
            "over replicas. Set plan.width to 2 or more, or leave the codec out."
        )
    if run.memory.shard != "none":
        found.append(
            f"memory.shard = {run.memory.shard} has no effect: the plan has one replica, which has "
            "no other to share with. Set plan.width to 2 or more, or leave it out."
        )
    return tuple(found)


# The codecs of a run's boundaries, batch by batch: from the run file and the plan.
#
# They depend on the number of the batch alone, so a run that is resumed goes on to the last bit.


def main_codecs(run: RunFile, plan: Plan) -> tuple[BoundaryCodecs, ...]:
    """The codecs of each boundary in the middle of a run."""
    num_boundaries = plan.num_stages - 1
    asked = run.links
    if asked.codec is None or asked.codec == AUTO:
        found = [*plan.codecs, *[AS_IT_IS] * (num_boundaries - len(plan.codecs))]
    else:
        found = [BoundaryCodecs(asked.codec, asked.codec)] * num_boundaries
    for one in asked.boundaries or ():
        if one.number < num_boundaries:
            found[one.number] = one.codecs
    return tuple(found)


def link_codecs(run: RunFile, plan: Plan) -> LinkCodecs:
    """The codecs of all boundaries over a run."""
    steps, parts = run.training.steps, run.links.schedule
    num_boundaries = plan.num_stages - 1
    first, last = round(parts.first_fraction * steps), round(parts.last_fraction * steps)
    phases = {0: main_codecs(run, plan)}
    if first:
        phases = {0: _all(parts.first_codec, num_boundaries), first: phases[0]}
    if last:
        phases = {begin: one for begin, one in phases.items() if begin < steps - last}
        phases[steps - last] = _all(parts.last_codec, num_boundaries)
    if all(one.is_none for boundaries in phases.values() for one in boundaries):
        return LinkCodecs()
    return LinkCodecs(tuple(CodecPhase(begin, phases[begin]) for begin in sorted(phases)))


def with_own_codecs(found: SavedPlan, run: RunFile) -> SavedPlan:
    """A plan from a file, for a run that may send over its boundaries by other codecs than the file's: what
    the file promises is then not of this run, and left out.
    """
    check_boundaries(run, found.plan)
    usual = main_codecs(run.model_copy(update={"links": LinksTable()}), found.plan)
    return found if main_codecs(run, found.plan) == usual else replace(found, forecast=None)


def check_boundaries(run: RunFile, plan: Plan) -> None:
    """Refuse codecs for boundaries that the plan does not have, and codecs of one's own that are wrong."""
    for one in run.links.boundaries or ():
        if plan.num_stages == 1:
            raise BiremeError(
                f"links.boundaries names the boundary {one.boundary}, but the plan has one stage, so nothing "
                "is sent between stages. Leave links.boundaries out, or set plan.depth to 2 or more."
            )
        if one.number >= plan.num_stages - 1:
            raise BiremeError(
                f"links.boundaries names the boundary {one.boundary}, but the plan has {plan.num_stages} "
                f"stages, 0 to {plan.num_stages - 1}. Name a boundary between two of them, or set plan.depth."
            )
    codecs = link_codecs(run, plan)
    if codecs.phases:
        from bireme.runtime.message_format import checked  # imports torch

        checked(codecs)


def idle_codec(run: RunFile, plan: Plan) -> tuple[str, ...]:
    """A sentence about a codec that the run asks for, if nothing crosses a boundary of its plan."""
    word = run.links.codec
    if word in (None, AUTO, str(NONE)) or len(set(plan.source.rank_of_stage)) > 1:
        return ()
    return (
        f"links.codec = {word} has no effect: all stages of the plan are on one device, so nothing is sent "
        "between stages. Set plan.depth to 2 or more, or leave the codec out.",
    )


def tell_changed_codecs(run: RunFile, plan: Plan, folder: RunFolder, tell: Tell) -> None:
    """Say that a run goes on with other codecs than it had, which is allowed."""
    before = _named(link_codecs(folder.load_run(), load_plan(folder.plan).plan))
    if (now := _named(link_codecs(run, plan))) != before:
        tell(f"The codecs of the boundaries change from {before} to {now}.")


def _named(codecs: LinkCodecs) -> str:
    """All of them in a sentence: those of a part of the run each once, and where the next part begins."""
    parts = []
    for phase in codecs.phases:
        words = " and ".join(
            dict.fromkeys(
                one.forward
                if one.forward == one.backward
                else f"{one.forward} with gradients in {one.backward}"
                for one in phase.boundaries
            )
        )
        parts.append(f"from step {phase.first_batch + 1} on {words}" if phase.first_batch else words)
    return ", ".join(parts) or "none"


def _all(word: str, num_boundaries: int) -> tuple[BoundaryCodecs, ...]:
    return (BoundaryCodecs(word, word),) * num_boundaries
