"""What the simulator moves: parcels, and the channels that they go through one after the other."""

from array import array
from collections import deque

from bireme.simulate.network import Path
from bireme.timeline.timeline import Transfers

__all__ = ["SimulatedChannel", "SimulatedMessage"]


class SimulatedChannel:
    """The messages from one rank to another, or the gradient syncs of one rank: one after the other."""

    def __init__(self, source: int, destination: int, path: Path) -> None:
        self.path = path
        self.free_s = 0.0
        self.is_busy = False
        self.queue: deque[SimulatedMessage] = deque()
        self.transfers = Transfers(
            source, destination, array("d"), array("d"), array("d"), array("q"), array("q")
        )

    def book(self, parcel: "SimulatedMessage", start_s: float, end_s: float) -> None:
        """A parcel was on its way from then to then."""
        self.transfers.start_s.append(start_s)
        self.transfers.end_s.append(end_s)
        self.transfers.num_bytes.append(parcel.num_bytes)
        self.transfers.sent_by.append(parcel.sent_by)
        self.transfers.received_by.append(parcel.received_by)


class SimulatedMessage:
    """A message between the moment one end is ready for it and its arrival."""

    __slots__ = ("channel", "key", "late_s", "num_bytes", "ready_s", "received_by", "sent_by")

    def __init__(self, key: int, channel: int) -> None:
        self.key = key
        self.channel = channel
        self.num_bytes = 0.0
        self.late_s = 0.0
        """Seconds on top of the transfer itself."""
        self.ready_s = 0.0
        self.sent_by = self.received_by = -1
