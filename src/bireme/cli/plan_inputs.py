"""What `bireme plan` starts from: a profile, or a model to measure, and a cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bireme.cli.measuring import Measuring, measure
from bireme.cli.options import refuse
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.cluster.cluster import Cluster
    from bireme.profile.profile import Profile

__all__ = ["cluster_of", "measuring_of", "profile_of", "sizes_of"]

LARGEST_MEASURED = 16
"""Samples of the largest micro-batch that is measured by default."""


def sizes_of(
    batch_size: int, largest: int | None, micro_batch: int | None, given: list[int] | None
) -> list[int]:
    """The micro-batch sizes to measure: those given, the one asked for, or powers of two."""
    if given:
        return given
    if micro_batch is not None:
        return [micro_batch]
    most = min(LARGEST_MEASURED, max(batch_size, largest or 0))
    return [1 << power for power in range(most.bit_length())] if most > 0 else [1]


def measuring_of(
    context: typer.Context, model: str | None, profile: Path | None, sizes: list[int], **how: Any
) -> Measuring | None:
    """What to measure, or to know beside a profile; None where there is a profile alone."""
    if profile is None:
        if model is None:
            raise BiremeError("Give the model with --model, or its profile with --profile.")
        if how["device"] != "meta":
            refuse(context, f"--measure-on {how['device']} measures and does not estimate", "like")
    else:
        refuse(
            context,
            "--profile brings what was measured",
            "measure_batch",
            "measure_on",
            "like",
            "optimizer",
            "fresh",
        )
        if model is None:
            own = ("length", "dtype", "train", "freeze", "lora_rank", "lora_target")
            refuse(context, "--profile brings what was measured", *own)
    if model is None:
        return None
    # The two halves of a backward are what zero-bubble schedules are made of.
    return Measuring(model, sizes, halves=True, **how)


def cluster_of(text: str | None) -> "Cluster":
    """The cluster that --cluster names; this machine if it names none."""
    if text == "":
        raise BiremeError("--cluster is empty. Give a file or the name of a ready cluster, or leave it out.")
    if text is not None:
        from bireme.cluster.cluster_file import load_cluster

        return load_cluster(text)
    from bireme.cluster.discover import discover

    return discover().cluster


def profile_of(path: Path | None, asked: Measuring | None) -> "Profile":
    """The profile of the file, or what is measured now."""
    if path is not None:
        from bireme.profile.profile_file import load_profile

        return load_profile(path)
    assert asked is not None
    from bireme.report.progress import progress_bar

    with progress_bar("capturing the model") as progress:
        return measure(asked, progress)
