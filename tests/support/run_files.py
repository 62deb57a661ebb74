"""Run files for tests: any that could be, and what is said about those that are wrong."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import reject
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.train.run_file import RunFile, load_run_file
from bireme.train.run_file.text import Key, tables_of_keys

__all__ = ["KEYS", "NAMES", "loaded", "run_files", "said", "sentence", "value_at"]

KEYS = [(table.name, key) for table in tables_of_keys() for key in table.keys]
NAMES = [f"{table}.{key.name}" for table, key in KEYS]


def loaded(text: str, tmp_path: Path, *sets: str) -> RunFile:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return load_run_file(path, sets)


def sentence(text: str, tmp_path: Path, *sets: str) -> str:
    """What is said about a wrong file, without its path."""
    with pytest.raises(BiremeError) as caught:
        loaded(text, tmp_path, *sets)
    return str(caught.value).replace(str(tmp_path / "run.toml"), "run.toml")


def said(*sets: str) -> str:
    """What is said about wrong settings."""
    with pytest.raises(BiremeError) as caught:
        load_run_file(None, sets)
    return str(caught.value)


def value_at(run: RunFile, table: str, key: str) -> Any:
    found: Any = run
    for name in (*table.split("."), key):
        found = getattr(found, name)
    return found


WORDS = st.text(min_size=1, max_size=12).filter(lambda text: bool(text.strip()))
PLAIN = st.text("abc-_ äß", min_size=1, max_size=12).filter(lambda text: bool(text.strip()))
CODECS = st.sampled_from(["none", "bfloat16", "int8", "int3", "topk:0.5", "topk:0.25:8"])
AMOUNTS = st.sampled_from(["auto", "6GB", "1.5GiB", "5e9", "4096"])
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "model.loss": st.sampled_from(["cross_entropy", "mse", "my.module:function"]),
    "data.mixture": st.lists(
        st.fixed_dictionaries({"source": WORDS, "weight": st.floats(1e-9, 100)}), min_size=1, max_size=3
    ),
    "data.private": st.dictionaries(st.sampled_from(["a", "b.c", "host-0"]), WORDS, min_size=1),
    "training.betas": st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    "training.gradient": st.sampled_from(["whole", "principal:2", "principal:1:4"]),
    "sync.codec": st.sampled_from(["auto", "none", "int8", "threshold:0.5:7", "lowrank:3"]),
    "checkpoint.folder": PLAIN,
    "log.name": PLAIN,
    "log.prompt": st.text(max_size=12),
    "sync.lease_s": st.floats(0.5, 60),
    "memory.device": AMOUNTS,
    "memory.host": AMOUNTS,
    "memory.disk_bytes": AMOUNTS,
    "memory.copies": st.sampled_from([0, 1]),
    "plan.stage_widths": st.sampled_from(["any", "equal", "3-1"]),
    "memory.copy_rate": st.sampled_from(["50Mbit/s", "6MB/s", "1.5 Gbit/s"]),
    "links.codec": CODECS | st.just("auto"),
    "links.boundaries": st.lists(
        st.fixed_dictionaries({"boundary": st.sampled_from(["0-1", "1-2"]), "forward": CODECS}),
        min_size=1,
        max_size=2,
    ),
    "links.schedule.first_codec": CODECS,
    "links.schedule.last_codec": CODECS,
}


def values_of(table: str, key: Key) -> st.SearchStrategy[Any]:
    """Values that the key may have by itself."""
    name = f"{table}.{key.name}"
    if name in SPECIAL:
        return SPECIAL[name]
    if key.choices:
        return st.sampled_from(key.choices)
    if key.allowed == "true, false":
        return st.booleans()
    if key.allowed == "list of texts":
        return st.lists(WORDS, min_size=1, max_size=3).map(tuple)
    if key.allowed.startswith("whole number"):
        return st.integers(2, 256)
    if key.allowed.startswith("number"):
        return st.floats(1, 100) if table == "plan.penalties" else st.floats(1e-9, 0.999)
    return WORDS


@st.composite
def run_files(draw: st.DrawFn) -> RunFile:
    """Any run file, of a few keys that are not as usual."""
    chosen = draw(
        st.lists(st.sampled_from(KEYS), max_size=8, unique_by=lambda pair: f"{pair[0]}.{pair[1].name}")
    )
    data: dict[str, Any] = {}
    for table, key in chosen:
        place = data
        for name in table.split("."):
            place = place.setdefault(name, {})
        place[key.name] = draw(values_of(table, key), label=f"{table}.{key.name}")
    try:
        return RunFile.model_validate(data)
    except BiremeError:
        reject()
