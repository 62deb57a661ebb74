"""What a process holds for the host's tier where its device is a processor, whose memory is the host's."""

from bireme.train.prepare import PreparedRun

__all__ = ["host_tier_bytes"]


def host_tier_bytes(prepared: PreparedRun, rank: int) -> float:
    """The most that the plan says a rank of a pipeline keeps on the host, if that is memory of its process
    that counts as the device's.
    """
    forecast, names = prepared.plan.forecast, prepared.plan.plan.devices
    if forecast is None or not names:
        return 0.0
    cluster = prepared.machines.cluster
    device = cluster.devices()[cluster.number_of(names[rank][0])].device
    if device.kind != "cpu":
        return 0.0
    return sum(one.peak_bytes for one in forecast.tiers if (one.rank, one.tier) == (rank, "host"))
