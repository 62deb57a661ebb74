"""Whether a run may go on from a checkpoint: with the same model, and where it was in the same data.

A checkpoint says which batch comes next. That is the right one only if batches are what they were.
"""

from pydantic import JsonValue

from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.graph_file import graph_hash
from bireme.train.checkpoint.checkpoint import Checkpoint
from bireme.train.data.prepare import RunData
from bireme.train.folder import RunFolder
from bireme.train.run_file import RunFile, load_run_file

__all__ = ["check_finds_checkpoints", "check_goes_on", "circumstances"]

BATCH_SIZE, NUM_SAMPLES, OPTIMIZER = "batch_size", "num_samples", "optimizer"


def circumstances(run: RunFile, data: RunData) -> dict[str, JsonValue]:
    """What a checkpoint keeps, beside the seed and the batch's number, of what it was made under."""
    return {
        BATCH_SIZE: run.training.batch_size,
        NUM_SAMPLES: len(data.training),
        OPTIMIZER: run.training.optimizer,
    }


def check_finds_checkpoints(run: RunFile, folder: RunFolder) -> None:
    """Refuse a run that would look for its checkpoints elsewhere than they were written, and find none."""
    if not folder.run_file.is_file():
        return
    before, now = folder.checkpoints(load_run_file(folder.run_file)), folder.checkpoints(run)
    if now != before:
        raise BiremeError(
            f"The checkpoints of {folder.path} are in {before}, and checkpoint.folder is {now.name}: the run "
            "would begin again without them. Leave checkpoint.folder as it was."
        )


def check_goes_on(checkpoint: Checkpoint, run: RunFile, graph: Graph, data: RunData) -> None:
    """Refuse a checkpoint of another model, or of other data in another order."""
    manifest, where = checkpoint.manifest, checkpoint.folder
    # That of a graph for one size of micro-batches is another one for every size.
    if graph.any_batch and manifest.graph_hash != graph_hash(graph):
        raise BiremeError(
            f"{where} is of another model than model.source = {run.model.source} makes with data.length = "
            f"{run.data.length}. Set them to what the run was trained with, or begin a new run."
        )
    optimizer = manifest.extra.get(OPTIMIZER, run.training.optimizer)
    if optimizer != run.training.optimizer:
        raise BiremeError(
            f"{where} has the state of {optimizer}, and training.optimizer is {run.training.optimizer}. Set "
            "it to what it was, or begin a new run."
        )
    now = {"data.seed": run.data.seed, **_named(circumstances(run, data))}
    before = {"data.seed": manifest.seed, **_named(manifest.extra)}
    for name, value in now.items():
        if name in before and before[name] != value:
            raise BiremeError(
                f"{where} was written with {name} = {before[name]}, and now it is {value}, so samples would "
                "be missed or come twice. Set it to what it was, or begin a new run."
            )


def _named(position: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """A position in the data in words that people know."""
    words = {BATCH_SIZE: "training.batch_size", NUM_SAMPLES: "the number of samples in data.source"}
    return {words[key]: value for key, value in position.items() if key in words}
