"""Servers of texts: to processes of a run, and over HTTP to browsers and collectors of figures.

The coordinator and the store of a run are servers of the first kind: one thread, one authenticated connection
for each client. Messages to a client wait until the kernel takes them. A message replaces an earlier one of
the same kind, so a client that reads slowly gets only the last.
"""

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from bireme.errors import BiremeError
from bireme.wire.connection import Connection, Poller
from bireme.wire.listener import Caller, Listener

MOST_BYTES = 1 << 24
"""Of a text."""
LONGEST_S = 1.0
"""How long a server waits at most before it refuses callers that do not answer."""


class Client:
    """A connection to a client, and the messages that it gets next, by their kind."""

    def __init__(self, made: socket.socket) -> None:
        self.connection = Connection(made)
        self.file = made.fileno()
        self.next: dict[type, Any] = {}

    def send(self, message: Any) -> None:
        """Send a message after those that wait, in place of one of its kind that waits."""
        self.next[type(message)] = message


class TextServer:
    """Serves at a socket from `start` to `close`; `failure` is why it ended by itself.

    `hear` acts on a message of a client, in the server's thread. A client whose text `decode` refuses with a
    `BiremeError` is disconnected.
    """

    def __init__(
        self,
        listening: socket.socket,
        key: str,
        encode: Callable[[Any], bytes],
        decode: Callable[[bytes], Any],
    ) -> None:
        self.failure: Exception | None = None
        self.port: int = listening.getsockname()[1]
        """Where it listens."""
        self._encode, self._decode = encode, decode
        self._poller = Poller()
        self._listener = Listener(key, [listening], self._poller, self._accept)
        self._clients: set[Client] = set()
        self._came: list[Client] = []
        """Clients from which something has come."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"bireme {type(self).__name__}", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def close(self) -> None:
        """End it."""
        self._is_closing = True
        self._poller.ring()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def hear(self, client: Client, message: Any) -> None:
        """Act on a message. An error ends the server."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except Exception as error:  # it is told where somebody asks
            self.failure = error
        finally:
            self._hang_up()
            self._listener.close()
            self._poller.close()

    def _turn(self) -> None:
        """Wait for what comes, act on it, and send what is to be sent."""
        self._poller.wait(LONGEST_S)
        self._take()
        self._flush()

    def _take(self) -> None:
        """Hear all that has come."""
        self._listener.sweep()
        came, self._came = self._came, []
        for client in came:
            messages = []
            try:
                while (text := client.connection.next_text(MOST_BYTES)) is not None:
                    messages.append(self._decode(text))
            except (OSError, BiremeError):
                self._forget(client)
            for message in messages:
                self.hear(client, message)

    def _flush(self) -> None:
        """Send to each client what the kernel takes."""
        for client in tuple(self._clients):
            connection = client.connection
            try:
                connection.write()
                while client.next and not connection.outgoing:
                    connection.say(self._encode(client.next.pop(next(iter(client.next)))))
                    connection.write()
            except OSError:
                self._forget(client)
            else:
                self._want(client, select.POLLIN | (select.POLLOUT if connection.outgoing else 0))

    def _accept(self, caller: Caller) -> None:
        client = Client(caller.socket)
        self._clients.add(client)
        self._want(client, select.POLLIN)

    def _want(self, client: Client, events: int) -> None:
        self._poller.want(client.file, events, lambda: self._came.append(client))

    def _hang_up(self) -> None:
        for client in tuple(self._clients):
            self._forget(client)

    def _forget(self, client: Client) -> None:
        """Disconnect a client."""
        if client in self._clients:
            self._clients.discard(client)
            self._poller.forget(client.file)
            client.connection.close()


class HttpServer(ThreadingTCPServer):
    """Answers GET requests, each in a thread. Port 0 is a free one.

    `answer` gets the host that a request names and its path. It gives the status, the text, and its type.
    """

    allow_reuse_address = daemon_threads = True

    def __init__(self, host: str, port: int, answer: Callable[[str, str], tuple[int, str, str]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.answer = answer
        super().__init__((host, port), _HttpHandler)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])


class _HttpHandler(BaseHTTPRequestHandler):
    server: HttpServer

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        status, text, kind = self.server.answer(host, self.path)
        found = text.encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(found))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
        ):
            self.send_header(name, value)
        with suppress(OSError):  # the reader has left
            self.end_headers()
            self.wfile.write(found)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (as the standard library calls it)
        """Requests are not logged."""
