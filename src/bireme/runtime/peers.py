"""What a rank is told when another one is gone. That is nobody's wrong input, so it is no `BiremeError`."""

__all__ = ["PeerLost"]


class PeerLost(Exception):  # noqa: N818 (it is an event, which others act on)
    """The connection to a rank broke: its process has ended, or has given up itself.

    `rank` is its place in the pipeline, `reason` what the transport said.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason

    def __str__(self) -> str:
        return f"Rank {self.rank} is gone: {self.reason}"
