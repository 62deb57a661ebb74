"""How long the search takes, and what it makes of the published models.

    python -m benchmarks.search

Processor time of one process. The profile is of GPTs from arithmetic; its state is scaled so that what forces
a deep pipeline can be seen beside what does not.
"""

import time
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from tests.planning import profile_of
from tests.published_2bw import GPT_1_3B, GPT_2_2B, p3_16xlarge, profile_of_model

from bireme.cluster.cluster import Cluster, Server
from bireme.cluster.device import Device
from bireme.cluster.links import Card, Link, Mesh
from bireme.plan.forecast import Answer
from bireme.plan.search.search import find_plan
from bireme.plan.wishes import Wishes
from bireme.profile.profile import Profile

GIB = 2**30


def servers(count: int, *, unequal: bool) -> Cluster:
    """Of eight devices; unequal ones differ in speed, memory and network card."""
    found = []
    places = tuple(range(8))
    for number in range(count):
        device = Device("gpu", "cuda", 16 * GIB)
        rate = 1.2e9
        if unequal:
            speed = 1.0 if number % 2 else 0.6
            device = replace(device, memory_bytes=(16 + 8 * (number % 3)) * GIB, speed=speed)
            rate *= 1 + number % 2
        mesh = Mesh("nvlink", places, Link(100e9, 3e-6))
        card = Card("eth0", places, Link(rate, 20e-6))
        found.append(Server(f"server{number}", (device,) * 8, (), (mesh,), (card,)))
    return Cluster(tuple(found))


def even_profile(num_units: int, state_bytes: float) -> Profile:
    """Units that are all the same and hold so many bytes of parameters together."""
    each = round(state_bytes / num_units)
    return profile_of(
        [0.010] * num_units,
        [0.020] * num_units,
        sizes=(1, 2, 4),
        parameter_bytes=[each] * num_units,
        kept_bytes=[20 * 10**6] * num_units,
        boundary_bytes=[4 * 10**6] * num_units,
        update_s=[0.001] * num_units,
    )


def main() -> None:
    table = Table("case", "seconds of processor", "best plan", "samples/s", "how", title="find_plan")
    cases = [
        ("64 equal devices, 48 units, 4 GB", even_profile(48, 4e9), servers(8, unequal=False), 256),
        ("64 equal devices, 48 units, 20 GB", even_profile(48, 20e9), servers(8, unequal=False), 256),
        ("1,024 unequal devices, 200 units, 8 GB", even_profile(200, 8e9), servers(128, unequal=True), 4096),
        (
            "1,024 unequal devices, 200 units, 80 GB",
            even_profile(200, 80e9),
            servers(128, unequal=True),
            4096,
        ),
        ("GPT 1.3B, 8 V100, batch 256", profile_of_model(GPT_1_3B), p3_16xlarge(), 256),
        ("GPT 2.2B, 8 V100, batch 64", profile_of_model(GPT_2_2B), p3_16xlarge(), 64),
        ("GPT 2.2B, 64 V100, batch 512", profile_of_model(GPT_2_2B), p3_16xlarge(8), 512),
    ]
    for name, profile, cluster, batch_size in cases:
        begin = time.process_time()
        answer = find_plan(profile, cluster, Wishes(batch_size))
        spent_s = time.process_time() - begin
        if not isinstance(answer, Answer):
            table.add_row(name, f"{spent_s:.2f}", str(answer), "", "")
            continue
        plan, forecast = answer.best.plan, answer.best.forecast
        sizes = "/".join(map(str, sorted(set(plan.micro_batch_sizes))))
        depth = plan.num_ranks // plan.width
        words = f"{plan.schedule}, {depth} deep, {plan.width} wide, micro-batches of {sizes}"
        table.add_row(name, f"{spent_s:.2f}", words, f"{forecast.samples_per_s:.1f}", answer.origin.how)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
