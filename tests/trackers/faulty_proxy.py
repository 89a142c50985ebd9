"""A proxy that stands between a client and a server, and does what servers do on bad days."""

import contextlib
import socket
import threading
from typing import Literal

Mode = Literal["well", "down", "answers 500", "hangs"]
_500 = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\nConnection: close\r\n\r\noops"


class FaultyProxy:
    """Listens on a port of its own."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.mode: Mode = "well"
        self.refused = 0
        """Connections that did not reach the server."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(client, self.mode), daemon=True).start()

    def _serve(self, client: socket.socket, mode: Mode) -> None:
        with client:
            if mode == "well":
                self._forward(client)
                return
            self.refused += 1
            if mode == "answers 500":
                client.recv(1 << 16)
                client.sendall(_500)
            elif mode == "hangs":
                while self.mode == "hangs" and client.recv(1 << 16):
                    pass
                threading.Event().wait(600)

    def _forward(self, client: socket.socket) -> None:
        """Connections that stay open are cut when the mode changes."""
        with socket.create_connection(("127.0.0.1", self._server_port)) as server:
            ends = [
                threading.Thread(target=self._copy, args=pair)
                for pair in ((client, server), (server, client))
            ]
            for end in ends:
                end.start()
            for end in ends:
                end.join()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(1 << 16)) and self.mode == "well":
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
