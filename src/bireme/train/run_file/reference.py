"""The reference of the run file, `docs/run-file.md`, made from the tables themselves."""

from collections.abc import Iterator

from bireme.train.run_file.keys import Key, tables_of_keys
from bireme.train.run_file.text import toml_value

__all__ = ["reference_markdown"]

REFERENCE_BEGINNING = """\
# The run file

<!-- Made by bireme.train.run_file.reference_markdown(), not by hand. -->

A run file tells `bireme train` what to do. Without one, or with an empty one, it trains a small byte-level
GPT on the sources of Python's standard library. `bireme init` writes a file with every key, commented out
and explained.

```
bireme init run.toml
bireme train run.toml
bireme train run.toml --set training.steps=500 --set model.dtype=bfloat16
```

A run file sets only what differs from the defaults:

```toml
format = 1

[model]
source = "gpt:layers=8,width=256,heads=8,vocab=257,context=256"

[data]
source = "texts/"
length = 256

[training]
steps = 2000
learning_rate = 1e-3

[plan]
schedule = "2bw"
depth = 2
microbatches = 4
```

`--set table.key=value` sets one key and overrides the file. The value is TOML, or else a string. An empty
value, as in `--set plan.depth=`, removes the key, so that its default applies. The last setting of a key
wins.

A key that is not known is refused with the nearest right name, and so are keys that contradict each other:
the run does not begin.

Paths are relative to the folder that `bireme train` is called in. The `run.toml` that a run keeps in its own
folder has them absolute, so that `bireme resume` works from anywhere; those that begin with `./` are within
that folder, wherever it is moved.
"""


def reference_markdown() -> str:
    """All of `docs/run-file.md`."""
    lines = [REFERENCE_BEGINNING]
    for table in tables_of_keys():
        lines += [f"## [{table.name}]", "", table.meaning, "", "| key | default | allowed | meaning |"]
        lines += ["|---|---|---|---|", *map(_row, table.keys), *_more(table.name), ""]
    return "\n".join(lines[:-1]) + "\n"


def _row(key: Key) -> str:
    default = "not set" if key.default is None else f"`{toml_value(key.default)}`"
    cells = (f"`{key.name}`", default, key.allowed, key.meaning)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _more(table: str) -> Iterator[str]:
    """Where to read on about a table."""
    further = {
        "data": "[data.md](data.md) explains sources, mixtures, conversations and packing, "
        "[private-data.md](private-data.md) private samples.",
        "plan": "[plan.md](plan.md) explains planning, [schedules.md](schedules.md) the schedules.",
        "balance": "[balance.md](balance.md) explains shares.",
        "links": "[codecs.md](codecs.md) explains codecs.",
        "memory": "[tiers.md](tiers.md) explains paging and shared optimizers.",
        "cluster": "[cluster.md](cluster.md) explains cluster files.",
        "sync": "[agreement.md](agreement.md) explains the modes, [replicas.md](replicas.md) quorum, "
        "[gradient-codecs.md](gradient-codecs.md) codecs of sums.",
    }
    if table in further:
        yield from ("", further[table])
