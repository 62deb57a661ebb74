"""Options that verbs had and that are now keys of the run file: each is refused with the name of its key.

An entry is a key, or a key and its value if the option was a flag. An entry that begins with `--` is another
option. An option of which one value has another entry is listed with that value too.
"""

import shlex
from collections.abc import Sequence

_LEARNING = {
    "--length": "data.length",
    "--dtype": "model.dtype",
    "--optimizer": "training.optimizer",
}
_PART = {
    "--train": "model.train",
    "--freeze": "model.freeze",
    "--lora-rank": "model.lora.rank",
    "--lora-target": "model.lora.targets",
}
_TIERS = {
    "--device-memory": "memory.device",
    "--host-memory": "memory.host",
    "--disk": "memory.disk_bytes",
}
MOVED: dict[str, dict[str, str]] = {
    "plan": {
        **_LEARNING,
        **_PART,
        **_TIERS,
        "--batch-size": "training.batch_size",
        "-B": "training.batch_size",
        "--model": "model.source",
        "--cluster": "cluster.source",
        "--schedule": "plan.schedule",
        "-s": "plan.schedule",
        "--synchronous": "plan.synchronous=true",
        "--objective": "plan.objective",
        "--penalty": "plan.penalties.delayed",
        "--delay-warmup": "plan.delay_warmup_fraction",
        "--depth": "plan.depth",
        "--width": "plan.width",
        "--micro-batch": "plan.micro_batch",
        "--largest-batch": "plan.largest_batch",
        "--memory-fraction": "plan.memory_fraction",
        "--devices": "plan.devices",
        "--recompute": "plan.recompute",
        "--lookahead": "plan.lookahead=true",
        "--no-lookahead": "plan.lookahead=false",
        "--codec": "links.codec",
        "--sync-codec": "sync.codec",
        "--gradient": "training.gradient",
        "--gradient-of": "training.gradient_of",
        "--shard": "memory.shard",
        "--memory-optimizer": "memory.optimizer",
        "--memory-updates": "memory.updates",
        "--pin": "plan.pin",
        "--together": "plan.together",
        "--whole-layers": "plan.whole_layers=true",
        "--measure-batch": "plan.micro_batch",
        "--measure-on": "cluster.device",
        "--measure-on meta": "--like laptop",
    },
    "profile": {
        **_LEARNING,
        **_PART,
        "--codec": "links.codec",
        "--device": "cluster.device",
        "--device meta": "--like laptop",
    },
    "memory": {
        **_LEARNING,
        "--batch": "training.batch_size",
        "-b": "training.batch_size",
        "--device": "cluster.device",
    },
    "simulate": {
        **_TIERS,
        "--schedule": "plan.schedule",
        "-s": "plan.schedule",
        "--stages": "plan.depth",
        "-d": "plan.depth",
        "--microbatches": "plan.microbatches",
        "-m": "plan.microbatches",
        "--recompute": "plan.recompute=always",
        "--updates-apart": "memory.updates=apart",
        "--overlap": "--link-overlap full",
        "--no-overlap": "--link-overlap receiver",
    },
}
"""By verb and option."""


def moved(verb: str, option: str, words: Sequence[str]) -> str | None:
    """The sentence that refuses an option of a verb, with its value among the words of the command line; None
    if the verb never had it.
    """
    known = MOVED.get(verb, {})
    if option not in known:
        return None
    value = _value_of(option, words)
    asked = f"{option} {value}".strip()
    entry = known.get(asked, known[option])
    if entry.startswith("--"):
        return f"`{asked}` is now the option {entry}."
    key, equals, own = entry.partition("=")
    setting = shlex.quote(f"{key}={own if equals else value or '…'}")
    return f"`{option}` is now the key {key}: bireme {verb} RUN.toml --set {setting}"


def _value_of(option: str, words: Sequence[str]) -> str:
    """The value of an option: after an equals sign, in the next word, or empty."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else "" if after.startswith("-") else after
    return ""
