"""What `bireme evaluate` and `bireme generate` take: a run at its last checkpoint, or a folder with a model.

Either becomes a run file that makes the model, and the place where its weights are.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.sources import load_source
from bireme.model.weights import Weights, check_weights, load_weights
from bireme.plan.plan_file import load_plan
from bireme.train.checkpoint.checkpoint import Checkpoint, newest_good, open_checkpoint
from bireme.train.export import ABOUT, exported_length, exported_step
from bireme.train.folder import RunFolder
from bireme.train.model import RunModel
from bireme.train.resume_checks import base_of_checkpoint, check_same_base
from bireme.train.run_file import RunFile, load_run_file
from bireme.train.run_file.text import toml_value

_BATCH_SIZE = 8

_Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with its weights: those of `checkpoint` or in `folder`, or else those that its source has.

    `run` makes the model, and says which data were kept apart to evaluate it with if `is_run`. `graph` is
    where its graph for evaluation is, if that was captured before. A batch goes through in
    `num_microbatches` parts. `step` is that of the weights, where it is known.
    """

    name: str
    run: RunFile
    step: int | None = None
    checkpoint: Path | None = None
    folder: Path | None = None
    graph: Path | None = None
    num_microbatches: int = 1
    is_run: bool = False

    def weights(self, model: RunModel, graph: Graph) -> Weights:
        """Reads parameters and buffers by name; those that no file holds are initialized."""
        if self.checkpoint is not None:
            checkpoint = open_checkpoint(self.checkpoint)
            if checkpoint.manifest.machines:
                checkpoint = checkpoint.with_holders(None)
            return _of_checkpoint(checkpoint, model.weights(graph))
        if self.folder is not None:
            return _of_folder(self.folder, graph, model)
        return model.weights(graph)

    def check(self, model: RunModel, graph: Graph) -> None:
        """Refuse weights that are not those of the model, or not there."""
        if self.folder is not None:
            check_weights(graph, self.folder, model=model.source.model)
        elif self.checkpoint is not None:
            base = base_of_checkpoint(open_checkpoint(self.checkpoint).manifest)
            if base is not None:
                check_same_base(base, self.run, str(self.checkpoint))
        elif model.source.folder is None:
            raise BiremeError(
                f"{self.name} holds a model without weights: there are no safetensors next to its "
                "config.json."
            )
        else:
            model.check_weights(graph)


def subject_of(text: str, sets: Sequence[str], tell: _Tell) -> Subject:
    """The run or the model that `text` names; `sets` change keys of its run file.

    `tell` is told of checkpoints that are damaged.
    """
    path = Path(text.removeprefix("hf:")).expanduser()
    if not path.is_dir():
        raise BiremeError(
            f"There is no folder {path}. Name the folder of a run, of a model that a run has exported, or of "
            "a transformers model. Nothing is downloaded."
        )
    if RunFolder(path).run_file.is_file():
        return _of_run(RunFolder.of(path), sets, tell)
    if (path / "config.json").is_file():
        run = _run_of(f"hf:{path.resolve()}", exported_length(path), sets)
        return Subject(str(path), run, step=exported_step(path))
    if (path / "adapter_config.json").is_file():
        raise BiremeError(
            f"{path} holds an adapter without the model that it belongs to. Name the folder of its run, or "
            "let `bireme merge RUN --to FOLDER` write the whole model, and name that."
        )
    if (path / ABOUT).is_file():
        source = _exported_source(path / ABOUT)
        run = _run_of(source, exported_length(path) or _length_of_source(source), sets)
        return Subject(str(path), run, exported_step(path), folder=path.resolve())
    raise BiremeError(
        f"{path} is neither the folder of a run nor that of a model: it has no run.toml, no config.json and "
        f"no {ABOUT}. Name one that `bireme train` made, or a folder that transformers can load."
    )


def _of_run(folder: RunFolder, sets: Sequence[str], tell: _Tell) -> Subject:
    before = load_run_file(folder.run_file)
    run = load_run_file(folder.run_file, sets)
    changed = (run.model, run.data.length) != (before.model, before.data.length)
    plan = load_plan(folder.plan).plan
    exported = exported_step(folder.model)
    try:
        checkpoint = newest_good(folder.checkpoints(run), on_bad=tell)
    except BiremeError:
        if exported is None:
            raise
        checkpoint = None
    if checkpoint is None and exported is None:
        raise BiremeError(
            f"{folder.path} has no checkpoint and no exported model yet, so there are no weights to evaluate."
            " Let the run continue until it has saved one."
        )
    kept = checkpoint is not None and (exported is None or checkpoint.manifest.step >= exported)
    return Subject(
        str(folder.path),
        run,
        step=checkpoint.manifest.step if checkpoint is not None and kept else exported,
        checkpoint=checkpoint.folder if checkpoint is not None and kept else None,
        folder=None if kept else folder.model.resolve(),
        graph=None if changed else folder.evaluation_graph,
        num_microbatches=plan.width * plan.num_microbatches,
        is_run=True,
    )


def _run_of(source: str, length: int | None, sets: Sequence[str]) -> RunFile:
    """The run file that makes a model of a folder, as far as `sets` do not change it; without a length the
    samples are as long as those of a run that trains the model.
    """
    own = {"model.source": source, "data.length": length, "training.batch_size": _BATCH_SIZE}
    given = [f"{key}={toml_value(value)}" for key, value in own.items() if value is not None]
    return load_run_file(None, [*given, *sets])


def _exported_source(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["model"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BiremeError(f"{path} does not say which model this is. Export the model again.") from error


def _length_of_source(source: str) -> int:
    """The tokens of the samples that a model was made for; the usual number where it takes no tokens."""
    ids = load_source(source).example_inputs.get("input_ids")
    return RunFile().data.length if ids is None or ids.ndim < 2 else int(ids.shape[1])


def _of_checkpoint(checkpoint: Checkpoint, otherwise: Weights) -> Weights:
    saved = checkpoint.snapshot().tensors

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        keys = ((name, f"{part}/{name}") for name in names for part in ("weights", "buffers"))
        return {name: saved[key] for name, key in keys if key in saved}

    return _with_rest(read, otherwise)


def _of_folder(folder: Path, graph: Graph, model: RunModel) -> Weights:
    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        return load_weights(graph, names, folder, dtype=torch.float32, model=model.source.model)

    return _with_rest(read, model.weights(graph))


def _with_rest(read: Callable[[Sequence[str]], dict[str, torch.Tensor]], otherwise: Weights) -> Weights:
    """The tensors that `read` finds, and those that it does not from elsewhere."""

    def both(names: Sequence[str]) -> dict[str, torch.Tensor]:
        found = read(names)
        rest = [name for name in names if name not in found]
        return found | dict(otherwise(rest)) if rest else found

    return both
