"""`run.toml`: what `bireme train` is to do, as a file that people write."""

from bireme.train.run_file.paths import settings_within, with_absolute_paths, with_paths_within
from bireme.train.run_file.planning import Balancing, LinksTable, Memory, Penalties, Planning
from bireme.train.run_file.run import RunFile, load_run_file, with_model_defaults
from bireme.train.run_file.tables import LOSSES, Checkpoints, ClusterTable, ExportTable, Log, Lora, Model
from bireme.train.run_file.text import commented_toml, reference_markdown, to_toml
from bireme.train.run_file.training import Data, Training

__all__ = [
    "LOSSES",
    "Balancing",
    "Checkpoints",
    "ClusterTable",
    "Data",
    "ExportTable",
    "LinksTable",
    "Log",
    "Lora",
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
