"""A real nats-server from the installed package, on a free loopback port that it keeps through restarts.

Clients retry while it starts, so nobody waits for it here.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

_BINARY = Path(sys.executable).parent / "nats-server"


class NatsServer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        arguments = ["-js", "-sd", str(self._folder), "-a", "127.0.0.1", "-p", str(self.port)]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([_BINARY, *arguments], stdout=log, stderr=log)

    def kill(self) -> None:
        """As a power cut would end it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait()
