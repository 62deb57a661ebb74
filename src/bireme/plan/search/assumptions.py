"""What the forecast of a plan assumes, because neither profile nor cluster gives it: a sentence for each.

Every sentence says what is not known, what counts instead, and how to find it out.
"""

from collections.abc import Iterator

from bireme.cluster.cluster import link_notes
from bireme.codec.description import parse_codec, sum_name
from bireme.codec.sum_description import DENSE
from bireme.plan.plan import device_ranges
from bireme.plan.search.draft import Draft
from bireme.plan.search.problem import PlanningProblem


def assumptions(problem: PlanningProblem, draft: Draft) -> tuple[str, ...]:
    """The assumptions that the forecast of a draft depends on."""
    return (
        *_about_passes(problem, draft),
        *_about_codecs(problem, draft),
        *_about_devices(problem, draft),
    )


def _about_passes(problem: PlanningProblem, draft: Draft) -> Iterator[str]:
    sizes, schedule = sorted(set(draft.outline.sizes)), draft.outline.schedule
    if draft.splits_backward and any(not problem.whole(size).has_halves for size in sizes):
        yield (
            f"The profile does not give the two halves of the backward that {schedule} runs, so each counts "
            "as half of the backward. Measure them with bireme profile --halves."
        )
    halved = [size for size in sizes if size // 2 not in problem.known_sizes]
    if draft.num_sliced and halved:
        names = " and ".join(str(size // 2) for size in halved)
        yield (
            f"The profile does not give the forward of half a micro-batch that {schedule} runs, so it counts "
            f"as half of a forward. Profile micro-batches of {names} too."
        )


def _about_codecs(problem: PlanningProblem, draft: Draft) -> Iterator[str]:
    request, known = problem.request, {rate.codec for rate in problem.profile.codecs}
    own = problem.codecs(draft.outline.rank_of_stage, draft.codecs)
    words = {str(parse_codec(word)) for one in own for word in (one.forward, one.backward) if word != "none"}
    if draft.outline.width > 1 and request.sums.codec != DENSE:
        words.add(sum_name(request.sums.codec))
    if words - known:
        yield (
            f"How long the codecs {', '.join(sorted(words - known))} take on these devices is not known, so "
            "the seconds of one core of another machine count. Measure them: plan from the model, on a "
            "machine that has such a device."
        )


def _about_devices(problem: PlanningProblem, draft: Draft) -> Iterator[str]:
    used = sorted(device for row in draft.grid for device in row)
    scaled = [problem.names[device] for device in used if device in problem.scaled]
    if scaled:
        yield (
            f"The times on {device_ranges(scaled)} are scaled from those on {problem.profile.device} by the "
            "arithmetic rates and memory bandwidths of both. Profile the model there, and plan with "
            "--profile NAME=FILE."
        )
    unknown = [problem.names[device] for device in used if device in problem.unknown_processes]
    if unknown:
        yield (
            f"What a process holds beside tensors on {device_ranges(unknown)} is not known and counts as "
            "nothing. Set process_bytes of these devices in the cluster file."
        )
    servers = {problem.servers[device] for device in used}
    if len(servers) > 1:
        yield from link_notes(problem.cluster, servers)
