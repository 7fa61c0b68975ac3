"""SGLang on the device, where SGLANG_PYTHON or this interpreter has it. SGLANG_OPTIONS has further options, in JSON.

Where it fails, the end of the server's log comes before the error.

The seconds of its start, of a weight update, of sleep and wake, the device memory that sleep released, and its tokens a
second by batch. `assumptions` has the simulator's keys for a decode step (`simulator.cost_model`), fitted to the
batches:

    batch / tokens a second = step_base_s + step_per_sequence_s * batch

The seconds of the short prompts are in them. All figures are those of one small model with random weights.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engines import requests_of, timed, weights_of
from benchmarks.gpu.report import PartReport, Skipped
from services.rollout.sglang.engine import SglangEngine
from services.rollout.sglang.server import LOG_NAME, ServerSettings
from tidegate.huggingface.sglang_support import OptionValue, check_options
from tidegate.model_config import ModelConfig

_START_TIMEOUT_S = 120.0
_LOG_LINES = 200
_LEAST_S = 1e-9
"""The simulator refuses a step without a fixed part."""


@dataclass(frozen=True, slots=True)
class Size:
    model: ModelConfig
    batches: tuple[int, ...]


def _model(num_layers: int, hidden_size: int, vocab_size: int) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=3 * hidden_size,
        num_heads=hidden_size // 64,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=vocab_size,
        max_seq_len=320,
    )


SIZES = {
    "cuda": Size(_model(16, 1024, 32_000), batches=(1, 4, 16, 64)),
    "cpu": Size(_model(2, 128, 320), batches=(1, 4)),
}


def measure(device: str, report: PartReport) -> None:
    python = os.environ.get("SGLANG_PYTHON", "")
    if not python and importlib.util.find_spec("sglang") is None:
        raise Skipped("SGLang is not installed here: name the interpreter that has it, SGLANG_PYTHON=PATH make gpu")
    with tempfile.TemporaryDirectory(prefix="tidegate-gpu-") as folder:
        options = further_options(os.environ.get("SGLANG_OPTIONS", ""))
        try:
            measure_with(Path(python or sys.executable), SIZES[device], device, Path(folder), report, options=options)
        except Exception:
            _print_log(Path(folder) / LOG_NAME)
            raise


def further_options(text: str) -> Mapping[str, OptionValue]:
    """The options in this JSON object, none where it is empty. Raises ValueError."""
    options = json.loads(text or "{}")
    if not isinstance(options, dict):
        raise ValueError(f"SGLANG_OPTIONS={text} is not a JSON object of names and values")
    check_options(options)
    return options


def _print_log(path: Path) -> None:
    lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:] if path.exists() else []
    print(f"The last {len(lines)} lines of SGLang's log:", *lines, sep="\n", flush=True)


def measure_with(
    python: Path,
    size: Size,
    device: str,
    folder: Path,
    report: PartReport,
    *,
    options: Mapping[str, OptionValue],
) -> None:
    settings = ServerSettings(
        python=python,
        folder=folder,
        scratch=folder / "scratch",
        model=size.model,
        device=device,
        gpu_index=0,
        dtype="bfloat16",
        max_running_requests=max(size.batches),
        start_timeout_s=_START_TIMEOUT_S,
        may_rest=True,
        options=options,
    )
    began = time.perf_counter()
    engine = SglangEngine(settings)
    try:
        report.note({"start_s": time.perf_counter() - began})
        weights = weights_of(size.model)
        report.note({"first_update_s": _seconds(lambda: engine.update_weights(1, weights))})
        # Warm up: the first requests of a batch size may compile.
        rates = {}
        for batch in size.batches:
            timed(engine, requests_of(batch))
            rates[batch], _ = timed(engine, requests_of(batch))
            report.note({f"batch_{batch}_tokens_per_s": rates[batch]})
        report.note({"assumptions": decode_costs(rates)})
        free_bytes = _free_bytes(device)
        report.note({"sleep_s": _seconds(engine.sleep)})
        report.note({"released_bytes": _free_bytes(device) - free_bytes})
        report.note({"wake_s": _seconds(engine.wake)})
        report.note({"update_s": _seconds(lambda: engine.update_weights(2, weights))})
    finally:
        engine.close()


def decode_costs(rates: Mapping[int, float]) -> dict[str, float]:
    """The keys of the config's `assumptions`, from tokens a second by batch, of two batches or more."""
    step_s = [batch / rate for batch, rate in rates.items()]
    fitted = statistics.linear_regression(list(rates), step_s)
    # A line through noise may fall, or start below 0. No step is free.
    per_sequence_s = max(fitted.slope, 0.0)
    base_s = fitted.intercept if fitted.slope > 0 else statistics.mean(step_s)
    return {
        "costs.engine.step_floor_s": 0.0,
        "costs.engine.step_base_s": max(base_s, _LEAST_S),
        "costs.engine.step_per_sequence_s": per_sequence_s,
        # The batches do not separate it from the sequences.
        "costs.engine.step_per_kv_token_s": 0.0,
    }


def _free_bytes(device: str) -> int:
    """The device memory that no process has. 0 without a device."""
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else 0


def _seconds(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
