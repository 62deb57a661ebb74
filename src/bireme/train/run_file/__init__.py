"""`run.toml`: what `bireme train` is to do, as a file that people write."""

from bireme.train.run_file.paths import settings_within, with_absolute_paths, with_paths_within
from bireme.train.run_file.reference import reference_markdown
from bireme.train.run_file.run import RunFile, load_run_file, with_model_defaults
from bireme.train.run_file.tables import (
    LOSSES,
    Balancing,
    Checkpoints,
    Data,
    Export,
    Links,
    Log,
    Lora,
    Machines,
    Memory,
    Model,
    Penalties,
    Planning,
    Training,
)
from bireme.train.run_file.text import commented_toml, to_toml

__all__ = [
    "LOSSES",
    "Balancing",
    "Checkpoints",
    "Data",
    "Export",
    "Links",
    "Log",
    "Lora",
    "Machines",
    "Memory",
    "Model",
    "Penalties",
    "Planning",
    "RunFile",
    "Training",
    "commented_toml",
    "load_run_file",
    "reference_markdown",
    "settings_within",
    "to_toml",
    "with_absolute_paths",
    "with_model_defaults",
    "with_paths_within",
]
