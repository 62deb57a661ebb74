"""`profile.json`: a `Profile` as a file. What is read equals what was written."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bireme.documents import as_dataclass, read_json_object
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.profile.profile import Profile

__all__ = ["FORMAT", "load_profile", "plain_profile", "save_profile"]

FORMAT = 1


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile to a file: whole, or not at all."""
    write_text_atomically(path, json.dumps(plain_profile(profile), allow_nan=False, indent=1) + "\n")


def load_profile(path: Path) -> Profile:
    """The profile in a file."""
    plain = read_json_object(path)
    _complete(plain)
    profile = as_dataclass(plain, Profile, number=FORMAT, source=str(path))
    for index, unit in enumerate(profile.units):
        sizes = [cost.micro_batch for cost in unit.costs]
        if sizes != list(dict.fromkeys(profile.micro_batches)):
            raise BiremeError(
                f"{path} is damaged: unit {index} has costs for micro-batches of {sizes} samples, where each "
                f"unit must have those of {list(dict.fromkeys(profile.micro_batches))} once."
            )
        if unit.same_as is not None and not _is_first(profile, unit.same_as, index):
            raise BiremeError(f"{path} is damaged: unit {index} cannot be the same as unit {unit.same_as}.")
    return profile


def _complete(plain: dict[str, Any]) -> None:
    """Say what older files, which know one kind of step and no sums, leave out."""
    units = plain.get("units")
    for unit in units if isinstance(units, list) else ():
        if isinstance(unit, dict) and "update_s" in unit:
            unit.setdefault("trial_s", unit["update_s"])
            unit.setdefault("reduce_s", 0.0)


def _is_first(profile: Profile, first: int, index: int) -> bool:
    """Whether the unit at `index` can be the same as that one, which comes before and is a first one."""
    return 0 <= first < index and profile.units[first].same_as is None


def plain_profile(profile: Profile) -> dict[str, Any]:
    """The profile in the words of JSON."""
    plain = asdict(profile)
    if not profile.codecs:
        del plain["codecs"]
    for unit in plain["units"]:
        for one in (unit, *unit["tied"]):
            if not one["frozen_bytes"]:
                del one["frozen_bytes"]
        for cost in unit["costs"]:
            for name in ("returned_bytes", "waiting_bytes", "halves_workspace_bytes"):
                if cost[name] is None:
                    del cost[name]
    return {"format": FORMAT, **plain}
