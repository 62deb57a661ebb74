"""The evaluations of a run while it trains: all sets through the pipeline, and what came of the last time."""

from dataclasses import asdict
from time import perf_counter

from bireme.runtime.evaluation import Evaluation
from bireme.runtime.pipeline import Pipeline
from bireme.train.data.mixture import shares_of
from bireme.train.data.prepare import RunData
from bireme.train.evaluation_set import Figures, combined, sets_of_run
from bireme.train.run_file import RunFile

__all__ = ["RunEvaluations"]


class RunEvaluations:
    """`figures` are those of the last evaluation, which was after `step` steps; None where it has no loss.

    `loss_through_codecs` is there where borders had codecs then. `step` is -1 before the first.
    """

    def __init__(self, run: RunFile, data: RunData) -> None:
        self.figures: Figures | None = None
        self.loss_through_codecs: float | None = None
        self.step = -1
        self._data = data
        self._sets = {} if data.evaluation is None else sets_of_run(run, data.evaluation)

    @property
    def has_data(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self._data.evaluation is not None

    def evaluate(self, pipeline: Pipeline, step: int) -> dict[str, object]:
        """Evaluate after so many steps; gives what the log is told."""
        assert self._data.evaluation is not None, "who calls has asked"
        begin_s = perf_counter()
        shares = shares_of(self._data.evaluation)
        found = self._evaluations(pipeline)
        seconds = perf_counter() - begin_s
        figures = combined(found, self._sets, shares, seconds=seconds, tokenizer=self._data.tokenizer)
        more: dict[str, object] = {}
        if pipeline.codecs.held(max(step - 1, 0)).phases:
            coded = self._evaluations(pipeline, through_codecs=True)
            self.loss_through_codecs = combined(coded, self._sets, shares, seconds=0.0, tokenizer=None).loss
            more["loss_through_codecs"] = self.loss_through_codecs
        self.figures = figures if any(one.weight for one in found.values()) else None
        self.step = step
        if len(found) > 1:
            more["sources"] = {name: one.loss if one.weight else None for name, one in found.items()}
        num_samples = sum(one.num_samples for one in found.values())
        return {"num_samples": num_samples, **asdict(figures), **more}

    def _evaluations(self, pipeline: Pipeline, *, through_codecs: bool = False) -> dict[str, Evaluation]:
        wanted = pipeline.cutter.wanted_to_evaluate
        return {
            name: pipeline.evaluate(one.batches(wanted), through_codecs=through_codecs)
            for name, one in self._sets.items()
        }
