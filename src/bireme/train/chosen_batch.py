"""Runs whose batch is not the run file's: the planner has chosen it, or it grew with the replicas' speed.

Once chosen it is kept: the run that a folder remembers has it as its own.
"""

from bireme.train.run_file import RunFile

__all__ = ["chooses_batch", "grown", "with_batch", "with_batch_of"]

WARMUP = 0.05
"""Of the steps of a run: the warm-up of a learning rate that was made larger, where it had none."""


def chooses_batch(run: RunFile) -> bool:
    """Whether the size of the batch is still to be chosen."""
    return run.plan.largest_batch is not None or run.balance.batch == "grow"


def with_batch(run: RunFile, batch_size: int) -> RunFile:
    """The run with the batch that was chosen, which it keeps from then on."""
    return _changed(run, {"batch_size": batch_size})


def with_batch_of(run: RunFile, begun: RunFile) -> RunFile:
    """The run with the batch of the one that was begun, and with the learning rate if that grew along."""
    if run.balance.batch != "grow" or begun.balance.batch == "grow":
        return with_batch(run, begun.training.batch_size)
    names = ("batch_size", "learning_rate", "warmup_steps", "warmup_fraction")
    return _changed(run, {name: getattr(begun.training, name) for name in names})


def grown(run: RunFile, batch_size: int) -> RunFile:
    """The run with a batch of another size and the learning rate in proportion, after a warm-up."""
    training = run.training
    changed: dict[str, object] = {
        "batch_size": batch_size,
        "learning_rate": training.learning_rate * batch_size / training.batch_size,
    }
    if not training.num_warmup_steps and batch_size > training.batch_size:
        changed |= {"warmup_steps": max(1, round(WARMUP * training.steps)), "warmup_fraction": None}
    return _changed(run, changed)


def _changed(run: RunFile, training: dict[str, object]) -> RunFile:
    return run.model_copy(
        update={
            "plan": run.plan.model_copy(update={"largest_batch": None}),
            "balance": run.balance.model_copy(update={"batch": "keep"}),
            "training": run.training.model_copy(update=training),
        }
    )
