"""One SGLang server: what it is told, its start, the watch over its process, its end.

It runs in an environment of its own, by the interpreter that the config names, and shares no package with this process.
Order of a start: the model's config and the server's own (mode 0600, with its token) in the folder, the process, its
health. The weights come later: it starts with arbitrary ones.
Invariants: it listens on 127.0.0.1 alone and answers nobody without the token; it dies with the process that started
it; its death while nobody stops it is told once, at once; however it ends, what is left lies in its two folders.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from services.rollout.engine import EngineFailed
from services.rollout.sglang import keeper
from services.rollout.sglang.client import CallFailed, SglangClient
from services.rollout.sglang.features import SglangFeatures, features_of
from services.rollout.sglang.names import SPARE_POSITIONS, served_config
from tidegate.model_config import ModelConfig
from tidegate.runtime import dies_with_parent

_LOOPBACK = "127.0.0.1"
_CPU_LAUNCHER = Path(__file__).parent / "cpu" / "launch.py"
TOKENS_A_MESSAGE = 8
"""That its scheduler lets come together before it tells of a running request; its own choice is 50. Whoever is aborted
retracted ends with the last message: what came after is made again. A message is some 90 us of one process's time (64
requests of 2 layers on 2 cores: 4,603 tokens/s with 50, 3,285 with 1), so that one a token would slow large batches."""
_LOOK_AGAIN_S = 0.1
"""Between questions to a server that is not up yet; its death ends the wait at once."""
_ANSWER_TIMEOUT_S = 10.0
_HANG_UP_TO_DEATH_S = 1.0
_LOG_TAIL_BYTES = 2000
_OURS = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV"})
"""What would bring this process's environment into SGLang's."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`python` is an interpreter with SGLang; `folder` keeps the server's config and log, `scratch` its sockets, for as
    long as it runs: a short path, since the kernel takes 107 bytes for a socket's. Of `gpu_index` is its device, where
    that is CUDA's."""

    python: Path
    folder: Path
    scratch: Path
    model: ModelConfig
    device: str
    gpu_index: int
    dtype: str
    max_running_requests: int
    start_timeout_s: float


class SglangServer:
    """A server that is up, from its making to `stop`. `on_death` is called from another thread."""

    def __init__(self, settings: ServerSettings, *, on_death: Callable[[str], None] | None = None) -> None:
        """EngineFailed, with the end of its log, when it does not come up; ValueError for a model it cannot hold."""
        self._settings = settings
        self._on_death = on_death
        self._stopping = False
        # In hex: SGLang would read a token that begins with a dash as an option.
        self.client = SglangClient(_free_port(), secrets.token_hex(24))
        self._process = self._launch()
        try:
            self.features = self._until_up()
        except BaseException:
            self.stop()
            raise
        self._watch = threading.Thread(target=self._tell_death, name="watch-sglang", daemon=True)
        self._watch.start()

    @property
    def log_path(self) -> Path:
        return self._settings.folder / "sglang.log"

    @property
    def memory_bytes(self) -> int:
        """Resident, of all its processes; what they share is counted for each."""
        return sum(_resident_bytes(process) for process in self.processes())

    def failure(self) -> str | None:
        """How it died; None while it runs."""
        status = self._process.poll()
        return None if status is None else self._told(status)

    def failure_soon(self) -> str | None:
        """As `failure`, after a call broke off: a dying process hangs up first."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_HANG_UP_TO_DEATH_S)
        return self.failure()

    def stop(self) -> None:
        """Kill all its processes: an orderly end takes it 5 s or more, and nothing of it is kept. Idempotent."""
        self._stopping = True
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._settings.scratch, ignore_errors=True)

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = self._settings
        model = settings.folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        # What a server that was killed left there would stand in the way of this one.
        shutil.rmtree(settings.scratch, ignore_errors=True)
        settings.scratch.mkdir(parents=True, mode=0o700)
        (model / "config.json").write_text(json.dumps(served_config(settings.model, dtype=settings.dtype)))
        config = settings.folder / "server.yaml"
        config.touch(mode=0o600)
        config.write_text(yaml.safe_dump(server_options(settings, model, self.client)))
        launcher = [str(_CPU_LAUNCHER)] if settings.device == "cpu" else ["-m", "sglang.launch_server"]
        command = [str(settings.python), *launcher, "--config", str(config)]
        environment = {name: value for name, value in os.environ.items() if name not in _OURS}
        environment |= server_environment(settings, self.client)
        self.log_path.touch(mode=0o600)
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), dies_with_parent.__file__, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=settings.folder,
                env=environment,
                start_new_session=True,
            )

    def _until_up(self) -> SglangFeatures:
        deadline_s = time.monotonic() + self._settings.start_timeout_s
        while time.monotonic() < deadline_s:
            with suppress(subprocess.TimeoutExpired):
                raise EngineFailed(self._told(self._process.wait(_LOOK_AGAIN_S)))
            with suppress(CallFailed):
                self.client.get("/health", timeout_s=_ANSWER_TIMEOUT_S)
                features = features_of(self.client.get("/server_info", timeout_s=_ANSWER_TIMEOUT_S))
                self._unlink_shared_memory()
                return features
        raise EngineFailed(
            f"SGLang did not answer within rollout.sglang.start_timeout_s={self._settings.start_timeout_s:g} s: raise "
            f"it, or see {self.log_path}\n{self._log_tail()}"
        )

    def _unlink_shared_memory(self) -> None:
        """Whoever is asked for the load opens the file that holds it; after that its name serves nobody, and would stay
        where all processes die before the keeper looks."""
        self.client.get("/v1/loads?include=core", timeout_s=_ANSWER_TIMEOUT_S)
        for process in self.processes():
            for path in keeper.shared_memory(process.pid):
                path.unlink(missing_ok=True)

    def _tell_death(self) -> None:
        status = self._process.wait()
        if not self._stopping and self._on_death is not None:
            self._on_death(self._told(status))

    def processes(self) -> list[psutil.Process]:
        """The keeper first, then the server, then its own."""
        try:
            keeper_process = psutil.Process(self._process.pid)
            return [keeper_process, *keeper_process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _told(self, status: int) -> str:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"SGLang's server ended with {how}; its log is {self.log_path}\n{self._log_tail()}"

    def _log_tail(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")


def server_options(settings: ServerSettings, model: Path, client: SglangClient) -> dict[str, object]:
    """What the server is told, by the names of its own options."""
    options: dict[str, object] = {
        "model-path": str(model),
        "load-format": "dummy",
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "host": _LOOPBACK,
        "port": client.port,
        "api-key": client.token,
        "device": settings.device,
        "dtype": settings.dtype,
        "max-running-requests": settings.max_running_requests,
        # A prefix kept from before an update would be read by what comes after it.
        "disable-radix-cache": True,
        # Steps between its looks at its own load, which go to shared memory: every step.
        "load-snapshot-publish-interval": 1,
        # Without it an idle server keeps a core busy.
        "sleep-on-idle": True,
        "log-level": "warning",
    }
    if settings.device == "cpu":
        room = settings.max_running_requests * (settings.model.max_seq_len + SPARE_POSITIONS)
        options |= {
            "attention-backend": "torch_native",
            "disable-overlap-schedule": True,
            "max-total-tokens": room,
            # Of the host's memory, which is not the server's alone; the line above is what counts.
            "mem-fraction-static": 0.1,
        }
    else:
        options |= {
            # Without it each server of a node takes the first.
            "base-gpu-id": settings.gpu_index,
            # Draws by seed; only attention on CUDA has it.
            "enable-deterministic-inference": True,
        }
    return options


def server_environment(settings: ServerSettings, client: SglangClient) -> dict[str, str]:
    """What only its environment tells it."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_FORCE_STREAM_INTERVAL": str(TOKENS_A_MESSAGE),
        # The sockets between its processes.
        "TMPDIR": str(settings.scratch),
        # Its ranks meet at a file: torch's own store would listen on every interface.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{settings.scratch.absolute()}/ranks",
        "GLOO_SOCKET_IFNAME": "lo",
        # Names apart what engines of one machine keep in shared memory, where the meeting has no port to do it by.
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(client.port),
    }
    return environment | ({"SGLANG_USE_CPU_ENGINE": "1"} if settings.device == "cpu" else {})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0
