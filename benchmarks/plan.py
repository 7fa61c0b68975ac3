"""The time in which one rank plans its part of a reshard, on one core: `python -m benchmarks.plan [--json] [--quick]`.

The models have real shapes: bf16 with fp32 main parameters and Adam moments under the distributed optimizer. The
optimizer's ranges are those of Megatron's buffers. They are read before the clock starts, as in a job. The timed part
is all work of a rank from these inputs to its frozen, validated part: its sends, its receives and its local copies.
Nothing is kept between runs. The figure of a case is the median of its slowest rank among those tried.

    bytes_over_minimum = received bytes / bytes in the target that the rank did not hold in the source

is summed over all tried ranks. The denominator is computed here from each rank's own two shards, without the planner.
`--save` keeps the result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.report import Report, arguments, publish, spread
from tidegate.elastic.plan.gpt import GptShape, gpt_parameters
from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.elastic.plan.planner import Planner
from tidegate.elastic.plan.ranges import with_optimizer
from tidegate.types import Layout

RANKS_PER_HOST = 8
QWEN25_32B = GptShape(
    num_layers=64,
    hidden_size=5120,
    ffn_hidden_size=27648,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151_665,
    padded_vocab_size=152_064,
    qkv_bias=True,
)
LLAMA3_405B = GptShape(
    num_layers=126,
    hidden_size=16384,
    ffn_hidden_size=53248,
    num_heads=128,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    padded_vocab_size=128_256,
)
QWEN3_235B_A22B = GptShape(
    num_layers=94,
    hidden_size=4096,
    ffn_hidden_size=1536,
    num_heads=64,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151_669,
    padded_vocab_size=151_936,
    qk_norm=True,
    num_experts=128,
)


@dataclass(frozen=True, slots=True)
class Switch:
    figure: str
    name: str
    shape: GptShape
    source: Mesh
    target: Mesh


def mesh(layout: Layout, chunks: tuple[tuple[int, ...], ...], first: int = 0) -> Mesh:
    return Mesh(replace(layout, vpp=len(chunks)), tuple(range(first, first + layout.num_ranks)), chunks)


def stages(num_layers: int, pp: int) -> tuple[tuple[int, ...], ...]:
    """Stages that are as equal as possible."""
    return (tuple(num_layers // pp + (stage < num_layers % pp) for stage in range(pp)),)


def switches() -> Iterator[Switch]:
    dense = "plan_32b_128_s"
    a, b = Layout(tp=8, pp=4, dp=4), Layout(tp=4, pp=2, dp=16)
    yield Switch(dense, f"{a} to {b}", QWEN25_32B, mesh(a, stages(64, 4)), mesh(b, stages(64, 2)))
    yield Switch(dense, f"{b} to {a}, vpp 4", QWEN25_32B, mesh(b, stages(64, 2)), mesh(a, even_chunks(64, pp=4, vpp=4)))
    c = Layout(tp=8, dp=8)
    yield Switch(dense, f"{c} to {a}, grown", QWEN25_32B, mesh(c, stages(64, 1)), mesh(a, stages(64, 4)))
    large = "plan_405b_1024_s"
    a, b = Layout(tp=8, pp=16, dp=8), Layout(tp=8, pp=8, dp=8, cp=2)
    yield Switch(large, f"{a} to {b}", LLAMA3_405B, mesh(a, stages(126, 16)), mesh(b, stages(126, 8)))
    c = Layout(tp=4, pp=8, dp=32)
    yield Switch(large, f"{a} to {c}", LLAMA3_405B, mesh(a, stages(126, 16)), mesh(c, stages(126, 8)))
    moe = "plan_235b_moe_1024_s"
    a, b = Layout(tp=4, pp=8, dp=32, ep=8), Layout(tp=2, pp=16, dp=32, ep=16)
    yield Switch(moe, f"{a} to {b}", QWEN3_235B_A22B, mesh(a, stages(94, 8)), mesh(b, stages(94, 16)))
    c = Layout(tp=4, pp=4, dp=64, ep=8)
    yield Switch(moe, f"{c} to {a}", QWEN3_235B_A22B, mesh(c, stages(94, 4)), mesh(a, stages(94, 8)))


def main() -> int:
    options = arguments("Plan one rank's part of a reshard.")
    num_runs, num_ranks = (3, 2) if options.quick else (7, 4)
    seconds: dict[str, float] = {}
    cases = []
    received = minimum = 0
    for switch in switches():
        parameters = gpt_parameters(switch.shape)
        source, target = with_optimizer(parameters, switch.source), with_optimizer(parameters, switch.target)
        ranks = sorted({*switch.source.ranks, *switch.target.ranks})
        hosts = {rank: f"host-{rank // RANKS_PER_HOST}" for rank in ranks}
        for rank in ranks[:: (len(ranks) - 1) // (num_ranks - 1)]:
            took = []
            for _ in range(num_runs):
                began = time.perf_counter()
                part = Planner(parameters, source, target, hosts=hosts).part(rank)
                took.append(time.perf_counter() - began)
            received += part.received_bytes
            minimum += part.minimum_bytes
            times = spread(took)
            seconds[switch.figure] = max(seconds.get(switch.figure, 0.0), times["median"])
            cases.append(
                {
                    "case": switch.name,
                    "figure": switch.figure,
                    "rank": rank,
                    "num_parameters": len(parameters),
                    "num_copies": len(part.local) + len(part.sends) + len(part.receives),
                    "received_bytes": part.received_bytes,
                    "sent_bytes": part.sent_bytes,
                    **{f"{key}_s" if key != "runs" else key: value for key, value in times.items()},
                }
            )
            print(f"{switch.figure:22} {switch.name:40} rank {rank:4} {times['median']:.3f} s")
    report = Report(
        name="plan",
        figures=seconds | {"bytes_over_minimum": received / minimum},
        goals={
            "plan_32b_128_s": "<= 0.2",
            "plan_405b_1024_s": "<= 1.0",
            "plan_235b_moe_1024_s": "<= 1.0",
            "bytes_over_minimum": "<= 1.0",
        },
        cases=cases,
        against="bytes that a rank needs in the target and did not hold in the source",
    )
    return publish(report, options)


if __name__ == "__main__":
    sys.exit(main())
