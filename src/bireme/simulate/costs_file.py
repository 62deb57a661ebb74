"""`costs.json`: what each instruction costs, as a file. One number stands for all stages, a list for each."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool, Tag

from bireme.documents import read_json
from bireme.errors import BiremeError
from bireme.simulate.costs import Costs

__all__ = ["CostsFile", "load_costs"]

NotNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False, strict=True)]


def _form(value: Any) -> str:
    return "<each>" if isinstance(value, list | tuple) else "<all>"


StageValue = Annotated[
    Annotated[NotNegative, Tag("<all>")] | Annotated[list[NotNegative], Tag("<each>")], Discriminator(_form)
]


class CostsFile(BaseModel):
    """Seconds and bytes per stage; what is left out is derived from the rest (see `Costs.per_stage`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    forward_s: StageValue = Field(description="seconds of a micro-batch's forward, per stage")
    backward_s: StageValue = Field(description="seconds of a micro-batch's backward, per stage")
    backward_input_s: StageValue | None = Field(
        None, description="the part of it that gives the input's gradient"
    )
    backward_weight_s: StageValue | None = Field(
        None, description="the part that gives the weights' gradient"
    )
    half_forward_s: StageValue | None = Field(None, description="seconds of half a micro-batch's forward")
    recompute_s: StageValue | None = Field(None, description="seconds to run a forward again")
    update_s: StageValue = Field(0.0, description="seconds of an optimiser step")
    host_update_s: StageValue | None = Field(
        None, description="seconds of an optimiser step that the host makes, where chunks lie there"
    )
    trial_s: StageValue | None = Field(None, description="seconds of a trial step")
    reduce_s: StageValue = Field(0.0, description="seconds of a batch's gradient sync between replicas")
    message_bytes: StageValue = Field(0.0, description="bytes sent after each stage, in each direction")
    gradient_message_bytes: StageValue | None = Field(
        None, description="bytes of the gradients that come back, where they are not as many"
    )
    weight_bytes: StageValue = Field(0.0, description="bytes of one weight version")
    gradient_bytes: StageValue | None = Field(None, description="bytes of one batch's gradient")
    optimizer_bytes: StageValue = Field(0.0, description="bytes of the optimiser's state")
    stash_bytes: StageValue = Field(0.0, description="bytes kept of a micro-batch until its backward")
    input_bytes: StageValue | None = Field(None, description="bytes of a micro-batch's input to the stage")
    master_weights: StrictBool = Field(
        default=False, description="whether the optimiser holds weights of its own"
    )
    rank_speed: list[Positive] = Field(default_factory=list, description="speed of each rank; 1 is as given")

    def costs(self, num_stages: int) -> Costs:
        """The costs of so many stages."""
        return Costs.per_stage(num_stages, **self.model_dump(exclude={"format"}))


def load_costs(path: Path, num_stages: int) -> Costs:
    """The costs in a file, which must fit so many stages."""
    file = read_json(path, CostsFile)
    try:
        return file.costs(num_stages)
    except BiremeError as error:
        raise BiremeError(f"{path}: {error}") from None
