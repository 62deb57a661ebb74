"""What pytest-xdist starts in place of a Python: it has the template make the worker, and lives as long."""

import os
import select
import signal
import socket
import sys

NUMBER_BYTES = 8


def main(address: str) -> None:
    """Hand the own input and output to a new worker, and wait for its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as way:
        way.connect(address)
        socket.send_fds(way, [b"worker"], [0, 1, 2])
        told = way.recv(NUMBER_BYTES)
    if not told:
        raise SystemExit("There is no template that workers are copies of; what it printed says why.")
    worker = os.pidfd_open(int.from_bytes(told, "little"))
    signal.signal(signal.SIGTERM, lambda *_: signal.pidfd_send_signal(worker, signal.SIGKILL))
    os.close(0)
    os.close(1)
    select.select([worker], [], [])


main(sys.argv[1])
