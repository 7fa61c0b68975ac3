"""A real SGLang on the CPU beside the embedded engine: `python -m benchmarks.engines [--json] [--quick] [--save]`.

Both have the same random weights of a small model and generate the same greedy requests. The figures are
- the time of the server's start and of a weight update;
- the server's memory: resident, summed over its processes, so that shared pages count once for each process;
- tokens a second alone and in a batch;
- the distance of SGLang's log-probabilities from those of the embedded engine (fp32), as long as both choose the same
  tokens;
- what a move changes in a response (`benchmarks.engine_moves`);
- an engine that stands by: the memory of its server, and the time from there until it can generate.
The speeds on a CPU say nothing about SGLang on GPUs. SGLANG_PYTHON names its interpreter.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.engine_moves import move_figures
from benchmarks.report import Report, arguments, publish
from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.engine import Engine, GenerationRequest, RequestId, Response, SamplingParams
from services.rollout.sglang.engine import SglangEngine
from services.rollout.sglang.server import ServerSettings
from tidegate.megatron.family import model_parameters
from tidegate.model_config import ModelConfig

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=300,
    max_seq_len=320,
)
BATCH = 16
NUM_TOKENS = 256
"""The tokens of each response. A single response takes about a second."""


def weights_of(model: ModelConfig) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for parameter in model_parameters(model, padded_vocab=model.vocab_size):
        if len(parameter.shape) == 1:
            tensors.append((parameter.name, torch.ones(parameter.shape)))
        else:
            drawn = torch.randn(parameter.shape, generator=generator)
            tensors.append((parameter.name, drawn * parameter.shape[-1] ** -0.5))
    return tensors


def requests_of(num: int) -> list[GenerationRequest]:
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0)
    return [GenerationRequest(RequestId(f"r{index}"), (5, 17, 3 + index), sampling) for index in range(num)]


def timed(engine: Engine, requests: Sequence[GenerationRequest]) -> tuple[float, dict[str, Response]]:
    """Tokens a second, and the responses."""
    began = time.perf_counter()
    for request in requests:
        engine.submit(request)
    responses: dict[str, Response] = {}
    while len(responses) < len(requests):
        responses |= {generation.id: generation.response for generation in engine.poll(wait_s=1.0)}
    seconds = time.perf_counter() - began
    return sum(len(response.tokens) for response in responses.values()) / seconds, responses


def generated(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, Response]:
    _, responses = timed(engine, requests)
    return responses


def drift(engine: EmbeddedEngine, requests: Sequence[GenerationRequest], responses: dict[str, Response]) -> list[float]:
    """|SGLang's log-probability - ours| for each token that both choose after the same tokens."""
    distances = []
    _, ours = timed(engine, requests)
    for name, response in responses.items():
        for theirs, own in zip(
            zip(response.tokens, response.log_probs, strict=True),
            zip(ours[name].tokens, ours[name].log_probs, strict=True),
            strict=True,
        ):
            if theirs[0] != own[0]:
                break
            distances.append(abs(theirs[1] - own[1]))
    return distances


def measured(python: Path, dtype: str, folder: Path) -> dict[str, float]:
    settings = ServerSettings(
        python=python,
        folder=folder,
        scratch=folder / "scratch",
        model=MODEL,
        device="cpu",
        gpu_index=0,
        dtype=dtype,
        max_running_requests=BATCH,
        start_timeout_s=180.0,
    )
    began = time.perf_counter()
    engine = SglangEngine(settings)
    try:
        figures = {"start_s": time.perf_counter() - began}
        began = time.perf_counter()
        engine.update_weights(1, weights_of(MODEL))
        figures["update_s"] = time.perf_counter() - began
        timed(engine, requests_of(1))
        figures["alone_tokens_per_s"], _ = timed(engine, requests_of(1))
        figures["batch_tokens_per_s"], responses = timed(engine, requests_of(BATCH))
        figures["memory_bytes"] = engine.server.memory_bytes
        figures |= move_figures(engine, requests_of(BATCH), responses, generated)
        engine.sleep()
        figures["standby_bytes"] = engine.server_bytes
        began = time.perf_counter()
        engine.wake()
        engine.update_weights(2, weights_of(MODEL))
        figures["wake_s"] = time.perf_counter() - began
    finally:
        engine.close()
    embedded = EmbeddedEngine(MODEL, max_running_requests=BATCH)
    embedded.update_weights(1, weights_of(MODEL))
    distances = drift(embedded, requests_of(BATCH), responses)
    figures["compared_share"] = len(distances) / (BATCH * NUM_TOKENS)
    figures["drift_mean_nats"] = sum(distances) / len(distances)
    figures["drift_max_nats"] = max(distances)
    return figures


def main() -> int:
    options = arguments("a real SGLang on the CPU beside the embedded engine")
    if "SGLANG_PYTHON" not in os.environ:
        sys.exit("set SGLANG_PYTHON to the interpreter of an environment with SGLang; `make .venv-sglang` makes one")
    python = Path(os.environ["SGLANG_PYTHON"])
    figures: dict[str, float] = {}
    embedded = EmbeddedEngine(MODEL, max_running_requests=BATCH)
    embedded.update_weights(1, weights_of(MODEL))
    timed(embedded, requests_of(1))
    figures["embedded_alone_tokens_per_s"], _ = timed(embedded, requests_of(1))
    figures["embedded_batch_tokens_per_s"], _ = timed(embedded, requests_of(BATCH))
    for dtype in ("bfloat16",) if options.quick else ("bfloat16", "float32"):
        with tempfile.TemporaryDirectory() as folder:
            found = measured(python, dtype, Path(folder))
        figures |= {f"{dtype}_{key}": value for key, value in found.items()}
    return publish(Report("engines", figures, against="the embedded engine, fp32"), options)


if __name__ == "__main__":
    sys.exit(main())
