"""The decode step, the cache and the prefill of an engine, against public measurements."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simulator.physics.sections import DecodePhysics
from simulator.physics.shapes import ShapeSection
from tests.unit.simulator.physics_cases import engine, memory, physics

BATCHES = (1, 8, 32, 64, 128, 256)
AICONFIGURATOR = """
Qwen2.5-1.5B    1 1024  2.1/1.9  2.2/1.9   2.3/2.0   2.8/2.3   3.7/3.0  5.4/4.4
Qwen2.5-1.5B    1 8192  2.1/1.9  2.8/2.3   4.7/3.6   7.0/5.3   12/8.7   23/16
Qwen2.5-7B      1 1024  5.9/4.5  6.2/4.8   6.7/5.1   7.7/5.7   9.3/7.0  13/11
Qwen2.5-7B      1 8192  6.0/4.6  7.4/5.6   11/8.1    16/11     26/19    47/34
Qwen2.5-7B      2 8192  3.7/2.9  4.4/3.5   6.4/4.8   8.8/6.5   14/10    25/18
Qwen2.5-32B     2 1024  14.4/10.8 14.4/10.8 15.9/12.0 17.8/13.5 22/17   30/25
Qwen2.5-32B     2 8192  14.5/10.9 17/13    26/19     37/27     60/43    107/78
Qwen2.5-32B     4 1024  8.1/6.8  8.6/7.1   9.2/7.4   10.6/8.4  13/11    18/16
Qwen2.5-32B     4 8192  8.3/6.9  10/8.1    15/11     20/15     32/24    57/43
Qwen3-30B-A3B   1 1024  4.5/3.9  9.9/8.2   20/15     23/18     28/21    33/26
Qwen3-30B-A3B   2 1024  3.3/3.2  6.5/5.4   12/9.3    14/11     16/13    19/15
Qwen3-30B-A3B   2 8192  3.4/3.4  7.5/6.1   16/12     21/16     30/23    48/35
Qwen3-30B-A3B   4 8192  3.0/3.1  5.1/4.4   9.5/7.7   12/9.5    18/14    27/21
Qwen3-235B-A22B 8 8192  9.6/7.5  16/14     32/29     41/33     53/41    76/59
"""
"""Kernel times of SGLang 0.5.14 on H100 / H200 in milliseconds, by model, TP, context and
batch (AIConfigurator 0.12)."""
DENSE_OFF, EXPERTS_OFF = 0.15, 0.20


def rows() -> Iterator[tuple[str, int, int, str, int, float]]:
    """Model, TP, context, GPU, batch, milliseconds."""
    for line in AICONFIGURATOR.strip().splitlines():
        model, num_gpus, context, *cells = line.split()
        for batch, cell in zip(BATCHES, cells, strict=True):
            for gpu, milliseconds in zip(("H100", "H200"), cell.split("/"), strict=True):
                yield model, int(num_gpus), int(context), gpu, batch, float(milliseconds)


def test_a_step_takes_what_aiconfigurator_measured_of_its_kernels() -> None:
    off = {}
    for model, num_gpus, context, gpu, batch, want_ms in rows():
        costs = engine(physics(model, gpu, decode={"host_s": 0.0}), num_gpus)
        found_s = costs.decode_s(running=batch, kv_tokens=batch * context, steps=1)
        off[model, num_gpus, context, gpu, batch] = abs(found_s * 1000 / want_ms - 1)
    assert len(off) == 14 * 6 * 2
    goals = {case: EXPERTS_OFF if "-A" in case[0] else DENSE_OFF for case in off}
    assert not {case: round(found, 3) for case, found in off.items() if found > goals[case]}
    assert sum(off.values()) / len(off) < 0.05


def test_a_step_of_qwen3_8b_takes_the_measured_time_with_its_host() -> None:
    """gpustack: 7.14 to 7.19 ms on one H100 at four requests at once, of ShareGPT's some 500 tokens."""
    shape = ShapeSection(
        num_layers=36,
        hidden_size=4096,
        ffn_hidden_size=12_288,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=151_936,
        qkv_bias=False,
        qk_norm=True,
    )
    costs = engine(physics(shape=shape.model_dump()), 1)
    assert costs.decode_s(running=4, kv_tokens=2000, steps=1) == pytest.approx(7.15e-3, rel=0.05)


CACHES = [
    ("Qwen2.5-1.5B", 1, 2.3e6),
    ("Qwen2.5-7B", 1, 0.92e6),
    ("Qwen2.5-7B", 2, 2.1e6),
    ("Qwen2.5-32B", 2, 0.27e6),
    ("Qwen2.5-32B", 4, 0.79e6),
    ("Qwen3-30B-A3B", 2, 0.76e6),
    ("Qwen3-30B-A3B", 4, 2.1e6),
]
"""What 85 % of an H100's memory holds beside the weights."""


@pytest.mark.parametrize(("model", "num_gpus", "want"), CACHES)
def test_the_cache_holds_what_the_weights_leave(model: str, num_gpus: int, want: float) -> None:
    assert memory(physics(model)).cache_tokens(num_gpus) == pytest.approx(want, rel=0.03)


def test_keys_and_values_divide_over_the_kv_heads_at_most() -> None:
    """Eight GPUs hold each of four KV heads twice."""
    held = memory(physics("Qwen3-235B-A22B"))
    assert (held.kv_parts(4), held.kv_parts(8)) == (4, 4)


PREFILLS = [("Qwen2.5-7B", 1, 45e3), ("Qwen2.5-32B", 2, 9.2e3), ("Qwen3-30B-A3B", 2, 41e3)]
"""Tokens a second and GPU of prompts of 4k tokens on H100, from the same kernel times."""


@pytest.mark.parametrize(("model", "num_gpus", "want"), PREFILLS)
def test_a_prefill_of_4k_tokens_has_the_measured_rate(model: str, num_gpus: int, want: float) -> None:
    found = engine(physics(model), num_gpus).prefill_tokens_per_s / num_gpus
    assert found == pytest.approx(want, rel=0.15)


def test_every_number_of_the_decode_law_slows_a_step_or_shrinks_the_cache() -> None:
    usual = engine(physics("Qwen3-30B-A3B"), 8)
    step = {"running": 64, "kv_tokens": 500_000, "steps": 1}
    for name, value in DecodePhysics():
        if name in ("memory_share", "spread_experts_from_gpus", "prefill_efficiency"):
            continue
        worse = value / 2 if name.endswith(("bandwidth_share", "efficiency")) else value * 2
        if name == "arithmetic_share":
            worse = 1.0
        found = engine(physics("Qwen3-30B-A3B", decode={name: worse}), 8)
        slower = found.decode_s(**step) > usual.decode_s(**step)
        assert slower or found.prefill_tokens_per_s < usual.prefill_tokens_per_s, name
