"""`[balance]` of a run file: how much of each batch every replica trains."""

from typing import Annotated, Literal

from pydantic import Field

from bireme.balance.policy import Policy
from bireme.train.run_file.table import Steps, Table

__all__ = ["Balancing"]


class Balancing(Table):
    """`[balance]`."""

    mode: Literal["off", "start", "measured"] | None = Field(
        default=None,
        description="off keeps the plan's shares; start measures every replica before the first step; "
        "measured lets shares follow the speed of the replicas while they train; by default measured where "
        "devices of the plan's replicas differ in speed, else off",
        examples=["measured"],
    )
    batch: Literal["keep", "grow"] = Field(
        default="keep",
        description="grow measures before the first step and sets training.batch_size to the samples that "
        "all replicas train while the slowest one runs at its best rate; training.learning_rate grows in "
        "proportion, with a warm-up",
    )
    margin: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = Field(
        default=Policy().margin, description="Least part of a step's time that a change of shares must save"
    )
    every_steps: Steps = Field(
        default=Policy().every,
        description="Fewest steps between two changes of shares, unless the speed of a device jumps",
    )
    replan: bool = Field(
        default=False,
        description="Make a new plan at the next checkpoint if one stage, not a whole replica, has become "
        "slow",
    )
