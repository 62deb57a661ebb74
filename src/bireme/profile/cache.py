"""What was measured before, on disk: profiles of the same graph, the engine, and codecs, on the same device
with the same software.

They lie in `$BIREME_CACHE`, or in `bireme` under `$XDG_CACHE_HOME` or `~/.cache`. A cache that cannot be
read or written is as good as an empty one.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from bireme.cluster.engine_cost import EngineCost
from bireme.codec.rate import CodecRate
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.profile.profile import Profile
from bireme.profile.profile_file import load_profile, save_profile

__all__ = ["cache_folder", "cache_path", "cached_figures", "cached_profile", "keep_figures", "keep_profile"]


Figures = TypeVar("Figures", EngineCost, CodecRate)


def cache_folder() -> Path:
    """Where profiles are kept."""
    own = os.environ.get("BIREME_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bireme"


def cache_path(what: Sequence[object], kind: str = "profiles") -> Path:
    """The file of what these words, all that its numbers depend on, describe."""
    return cache_folder() / kind / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:24]}.json"


def cached_profile(path: Path) -> Profile | None:
    """The profile in a file of the cache, None where there is none that can be used."""
    try:
        return load_profile(path)
    except BiremeError:
        return None


def keep_profile(profile: Profile, path: Path) -> None:
    """Put a profile into the cache, if that is possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(profile, path)
    except (OSError, BiremeError):
        return


def cached_figures(path: Path, kind: Callable[..., Figures]) -> Figures | None:
    """Figures of the engine or of a codec in a file of the cache; None where none can be used."""
    try:
        return kind(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, BiremeError):
        return None


def keep_figures(figures: EngineCost | CodecRate, path: Path) -> None:
    """Put them into the cache, if that is possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(asdict(figures)) + "\n")
    except (OSError, BiremeError):
        return
