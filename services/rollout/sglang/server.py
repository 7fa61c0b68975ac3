"""One SGLang server: its options, its start, the watch over its process, its end.

It runs in an environment of its own, by the interpreter that the config names, and shares no package with this process.
A start takes these steps:
1. The model's config and the server's own config (mode 0600, with its token) are written into the folder.
2. The process starts, with arbitrary weights; the real ones come later.
3. The server answers a health check.

Invariants:
- It listens only on 127.0.0.1. [test_sglang_server: listens_on_loopback_only]
- It answers nobody without the token. [test_sglang_engine: answers_nobody_without_its_token]
- It dies with the process that started it. [test_sglang_keeper: no_process_and_no_shared_memory_remains]
- If it dies without being stopped, `on_death` is called once, at once. [test_sglang_server: kill_9_in_mid_generation]
  That it ends by itself before it is up is a failed start instead. [test_engine_start: killed_while_it_starts]
- After any end, its only remains are in its two folders. [test_sglang_keeper: no_process_and_no_shared_memory_remains]
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from services.rollout.engine import EngineFailed
from services.rollout.sglang import keeper
from services.rollout.sglang.client import CallFailed, SglangClient
from services.rollout.sglang.features import SglangFeatures, features_of
from services.rollout.sglang.names import SPARE_POSITIONS, served_config
from tidegate.huggingface.sglang_support import OptionValue
from tidegate.model_config import ModelConfig
from tidegate.runtime import dies_with_parent

_LOOPBACK = "127.0.0.1"
_CPU_LAUNCHER = Path(__file__).parent / "cpu" / "launch.py"
TOKENS_A_MESSAGE = 8
"""The tokens of a running request that the server's scheduler collects for one message. SGLang's default is 50.

A request that is aborted while retracted ends with the last message: later tokens are lost and must be made again. A
message takes some 90 us of one process's time, so one message per token would slow large batches. Measured with 64
requests, 2 layers and 2 cores: 4,603 tokens/s with 50, and 3,285 with 1."""
LOG_NAME = "sglang.log"
_LOOK_AGAIN_S = 0.1
"""The pause between health checks of a starting server. Its death ends the wait at once."""
_ANSWER_TIMEOUT_S = 10.0
_HANG_UP_TO_DEATH_S = 1.0
_LOG_TAIL_BYTES = 2000
_STATIC_SHARE = 0.8
"""The part of a shared slot's memory that holds weights and KV cache. The rest is for activations and CUDA's context.

SGLang's defaults for a whole GPU are near it. With more, a full slot makes another one run out of memory. Nobody has
measured it here."""
_PYTHON_VARIABLES = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV"})
"""The variables that would bring this process's Python environment into SGLang's."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of a server.

    - python: an interpreter of an environment with SGLang.
    - folder: the server's config and log.
    - scratch: its sockets while it runs. A short path: the kernel allows 107 bytes for a socket's path.
    - gpu_index: the index of its GPU, on CUDA.
    - num_sharing: the slots that share this GPU.
    - may_rest: whether it is to give its memory back while its engine sleeps, where it can.
    - options: further options of the server, by SGLang's names, none of which Tidegate sets itself.
    """

    python: Path
    folder: Path
    scratch: Path
    model: ModelConfig
    device: str
    gpu_index: int
    dtype: str
    max_running_requests: int
    start_timeout_s: float
    num_sharing: int = 1
    may_rest: bool = False
    options: Mapping[str, OptionValue] = field(default_factory=dict)


class SglangServer:
    """A server that runs from its construction to `stop`. It calls `on_death` from another thread."""

    def __init__(self, settings: ServerSettings, *, on_death: Callable[[str], None] | None = None) -> None:
        """Raises EngineFailed with the end of its log when it does not start, ValueError for a model it cannot
        serve."""
        self._settings = settings
        self._on_death = on_death
        self._stopping = False
        # Use hex: SGLang would read a token that begins with a dash as an option.
        self.client = SglangClient(_free_port(), secrets.token_hex(24))
        self._process = self._launch()
        try:
            self.features = self._until_up()
        except BaseException:
            self.stop()
            raise
        self._watch = threading.Thread(target=self._report_death, name="watch-sglang", daemon=True)
        self._watch.start()

    @property
    def log_path(self) -> Path:
        return self._settings.folder / LOG_NAME

    @property
    def memory_bytes(self) -> int:
        """The resident memory of all its processes. Memory that they share is counted for each."""
        return sum(_resident_bytes(process) for process in self.processes())

    @property
    def private_bytes(self) -> int:
        """The resident memory of all its processes without files and shared memory, such as its libraries' code."""
        return sum(_resident_bytes(process, private=True) for process in self.processes())

    def failure(self) -> str | None:
        """The description of its death. None while it runs."""
        status = self._process.poll()
        return None if status is None else self._description(status)

    def failure_soon(self) -> str | None:
        """As `failure`, for use after a call failed: a dying process closes its connections before it ends."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_HANG_UP_TO_DEATH_S)
        return self.failure()

    def stop(self) -> None:
        """Kill all its processes, because an orderly end takes 5 s or more and saves nothing. Idempotent."""
        self._stopping = True
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._settings.scratch, ignore_errors=True)

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = self._settings
        model = settings.folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        # Remove the files of a killed server, which would keep this one from starting.
        shutil.rmtree(settings.scratch, ignore_errors=True)
        settings.scratch.mkdir(parents=True, mode=0o700)
        (model / "config.json").write_text(json.dumps(served_config(settings.model, dtype=settings.dtype)))
        config = settings.folder / "server.yaml"
        config.touch(mode=0o600)
        config.write_text(yaml.safe_dump(server_options(settings, model, self.client)))
        launcher = [str(_CPU_LAUNCHER)] if settings.device == "cpu" else ["-m", "sglang.launch_server"]
        command = [str(settings.python), *launcher, "--config", str(config)]
        environment = {name: value for name, value in os.environ.items() if name not in _PYTHON_VARIABLES}
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
                raise self._ended(self._process.wait(_LOOK_AGAIN_S))
            with suppress(CallFailed):
                self.client.get("/health", timeout_s=_ANSWER_TIMEOUT_S)
                features = features_of(self.client.get("/server_info", timeout_s=_ANSWER_TIMEOUT_S))
                self._unlink_shared_memory()
                return features
        raise EngineFailed(
            f"SGLang did not answer within rollout.sglang.start_timeout_s={self._settings.start_timeout_s:g} s: raise "
            f"it, or see {self.log_path}\n{self._log_tail()}"
        )

    def _ended(self, status: int) -> EngineFailed:
        """A server that ends by itself does not start. One that is killed may start the next time: that is a death."""
        if status < 0 and self._on_death is not None:
            self._on_death(self._description(status))
        return EngineFailed(self._description(status))

    def _unlink_shared_memory(self) -> None:
        """Remove the name of the shared file with the server's load, once the server has it open.

        Nothing needs the name after that. If all processes died before the keeper looks, it would remain."""
        self.client.get("/v1/loads?include=core", timeout_s=_ANSWER_TIMEOUT_S)
        for process in self.processes():
            for path in keeper.shared_memory(process.pid):
                path.unlink(missing_ok=True)

    def _report_death(self) -> None:
        status = self._process.wait()
        if not self._stopping and self._on_death is not None:
            self._on_death(self._description(status))

    def processes(self) -> list[psutil.Process]:
        """The keeper first, then the server, then the server's children."""
        try:
            keeper_process = psutil.Process(self._process.pid)
            return [keeper_process, *keeper_process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _description(self, status: int) -> str:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"SGLang's server ended with {how}; its log is {self.log_path}\n{self._log_tail()}"

    def _log_tail(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")


def server_options(settings: ServerSettings, model: Path, client: SglangClient) -> dict[str, object]:
    """The server's options, by SGLang's names."""
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
        # Avoid stale prefixes: a request after an update would read a prefix from before it.
        "disable-radix-cache": True,
        # Publish its load to shared memory at every step.
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
            # A share of the host's memory, which the server shares with others. The line above is the real limit.
            "mem-fraction-static": 0.1,
        }
    else:
        options |= {
            # Without it, each server of a node takes the first GPU.
            "base-gpu-id": settings.gpu_index,
            # Draws by seed. Only attention on CUDA supports it.
            "enable-deterministic-inference": True,
        }
        if settings.may_rest:
            # Weights, KV cache and CUDA graphs at addresses that keep while their memory is given back.
            options["enable-memory-saver"] = True
        if settings.num_sharing > 1:
            # Without it, a server takes nearly all memory that is free when it starts.
            options["mem-fraction-static"] = round(_STATIC_SHARE / settings.num_sharing, 3)
    return {**options, **settings.options}


def server_environment(settings: ServerSettings, client: SglangClient) -> dict[str, str]:
    """The options that SGLang takes only from its environment."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_FORCE_STREAM_INTERVAL": str(TOKENS_A_MESSAGE),
        # The folder of the sockets between its processes.
        "TMPDIR": str(settings.scratch),
        # Its ranks meet at a file, because torch's own store would listen on every interface.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{settings.scratch.absolute()}/ranks",
        "GLOO_SOCKET_IFNAME": "lo",
        # The port makes the names of shared memory differ between engines of one machine: a file has no port to do so.
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(client.port),
    }
    return environment | ({"SGLANG_USE_CPU_ENGINE": "1"} if settings.device == "cpu" else {})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _resident_bytes(process: psutil.Process, *, private: bool = False) -> int:
    try:
        memory = process.memory_info()
    except psutil.Error:
        return 0
    return memory.rss - memory.shared if private else memory.rss
