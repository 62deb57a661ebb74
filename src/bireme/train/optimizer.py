"""The optimiser of a run, as its file asks for it."""

from bireme.runtime.optimizers import OptimizerFactory, named_optimizer
from bireme.train.run_file.training import Training

__all__ = ["optimizer_of"]


def optimizer_of(training: Training) -> OptimizerFactory:
    """Makes the optimisers of the parameters that it is given."""
    return named_optimizer(
        training.optimizer,
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        betas=training.betas,
        momentum=training.momentum,
        rest_lr=training.rest_learning_rate,
    )
