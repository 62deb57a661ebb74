"""Made-up profiles to plan and rehearse with."""

from collections.abc import Sequence

import numpy as np

from bireme.profile.profile import Profile, UnitCost, UnitProfile

__all__ = ["profile_of", "unequal_units"]


def unequal_units(num_units: int = 40, unit_s: float = 0.004, seed: int = 0) -> Profile:
    """Units whose forward with one sample takes half to one and a half times `unit_s`, a backward twice
    that.

    A second sample adds nine tenths. A unit has 8 MB of parameters, keeps 10 MB and sends 0.5 MB per
    sample.
    """
    random = np.random.default_rng(seed)
    units = []
    for place in range(num_units):
        forward_s = unit_s * float(random.uniform(0.5, 1.5))
        costs = tuple(
            UnitCost(
                micro_batch=size,
                forward_s=forward_s * (0.1 + 0.9 * size),
                backward_s=2 * forward_s * (0.1 + 0.9 * size),
                recompute_backward_s=3 * forward_s * (0.1 + 0.9 * size),
                backward_input_s=None,
                backward_weight_s=None,
                spread=0.0,
                saved_bytes=10_000_000 * size,
                boundary_bytes=500_000 * size,
                workspace_bytes=0,
                shared=(),
            )
            for size in (1, 2)
        )
        units.append(
            UnitProfile(
                name=f"layers.{place // 2}.{'attention' if place % 2 == 0 else 'feed_forward'}",
                structure=f"unit {place}",
                same_as=None,
                receives=(f"h{place}",) if place else (),
                sends=(f"h{place + 1}",) if place < num_units - 1 else (),
                inputs=(),
                parameter_bytes=8_000_000,
                gradient_bytes=8_000_000,
                optimizer_bytes=16_000_000,
                buffer_bytes=0,
                update_s=0.0005,
                trial_s=0.0005,
                reduce_s=0.0,
                tied=(),
                costs=costs,
            )
        )
    return Profile(
        model="synthetic",
        graph="synthetic",
        device="emulated",
        device_kind="cpu",
        num_threads=1,
        versions="synthetic",
        is_measured=False,
        optimizer="adamw",
        num_operators=num_units,
        parameter_bytes=8_000_000 * num_units,
        units=tuple(units),
    )


def profile_of(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    sizes: Sequence[int] = (1,),
    parameter_bytes: Sequence[int] = (),
    kept_bytes: Sequence[int] = (),
    boundary_bytes: Sequence[int] = (),
    update_s: Sequence[float] = (),
) -> Profile:
    """Units that share nothing; what is for one sample is in proportion for several."""
    num_units = len(forward_s)
    nothing = [0] * num_units
    parameters, kept, boundary = (
        list(values) or nothing for values in (parameter_bytes, kept_bytes, boundary_bytes)
    )
    update = list(update_s) or [0.0] * num_units
    units = tuple(
        UnitProfile(
            name=f"layers.{place}",
            structure=f"structure {place}",
            same_as=None,
            receives=(f"value {place}",) if place else (),
            sends=(f"value {place + 1}",),
            inputs=(),
            parameter_bytes=parameters[place],
            gradient_bytes=parameters[place],
            optimizer_bytes=2 * parameters[place],
            buffer_bytes=0,
            update_s=update[place],
            trial_s=update[place],
            reduce_s=0.0,
            tied=(),
            costs=tuple(
                UnitCost(
                    micro_batch=size,
                    forward_s=size * forward_s[place],
                    backward_s=size * backward_s[place],
                    recompute_backward_s=size * (forward_s[place] + backward_s[place]),
                    backward_input_s=None,
                    backward_weight_s=None,
                    spread=0.0,
                    saved_bytes=size * kept[place],
                    boundary_bytes=size * boundary[place],
                    workspace_bytes=0,
                    shared=(),
                )
                for size in sizes
            ),
        )
        for place in range(num_units)
    )
    return Profile("m", "g", "d", "emulated", 1, "", False, "adamw", num_units, sum(parameters), units)
