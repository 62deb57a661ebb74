"""The curves of a run for Weights & Biases.

Where they go is said in the words of that package: WANDB_MODE=offline keeps them in the run's folder, from
where `wandb sync` sends them later. A run that resumes goes on in the same curves.
"""

import importlib
import secrets
from pathlib import Path
from typing import Any

from bireme.files import write_text_atomically
from bireme.train.tracker import BackgroundTracker

__all__ = ["WandB"]

BEGIN_S = 60.0
"""So long may it take to reach the server."""


class WandB(BackgroundTracker):
    """Sends curves to a run of a project; `config` is what is shown of the run with them."""

    title = "Weights & Biases"

    def __init__(self, folder: Path, project: str, config: dict[str, Any]) -> None:
        self._folder, self._project, self._config = folder, project, config
        self._wandb: Any = None
        self._run: Any = None
        super().__init__()

    def _begin(self) -> None:
        self._wandb = importlib.import_module("wandb")
        kept = self._folder / "wandb-id"
        if not kept.is_file():
            write_text_atomically(kept, secrets.token_hex(4))
        self._run = self._wandb.init(
            dir=str(self._folder),
            project=self._project,
            name=self._folder.name,
            id=kept.read_text(encoding="utf-8").strip(),
            resume="allow",
            config=self._config,
            settings=self._wandb.Settings(init_timeout=BEGIN_S, console="off", silent=True),
        )
        # Its own count of steps only rises, and a run that resumes may train some again.
        self._run.define_metric("*", step_metric="step")

    def _send(self, step: int, curves: dict[str, float]) -> None:
        self._run.log({"step": step, **curves})

    def _end(self) -> None:
        self._run.finish()
        self._wandb.teardown()
