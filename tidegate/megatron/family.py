"""What the families share: logical parameters, the divisors of a layout, the size of the padded vocabulary. Pure.

Invariants:
- `check_layout` accepts exactly the layouts that the actor's trainer can build.
- The padded vocabulary is a function of all layouts of the job together, so it never changes within a job.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from tidegate.elastic.plan.gpt import GptShape, gpt_parameters
from tidegate.elastic.plan.parameters import Parameter
from tidegate.model_config import ModelConfig
from tidegate.types import Layout


def padded_vocab_size(config: ModelConfig, tp_sizes: Iterable[int]) -> int:
    """The vocabulary rounded up so that every tp of the job divides it. It is the same for all layouts of a job."""
    multiple = math.lcm(*tp_sizes)
    return math.ceil(config.vocab_size / multiple) * multiple


def possible_tp_sizes(config: ModelConfig, *, num_ranks: int) -> list[int]:
    """The tp sizes that a job on `num_ranks` ranks may use, ascending. The vocabulary is padded for all of them."""
    divisors = _divisors(math.gcd(config.num_heads, config.num_kv_heads, config.ffn_hidden_size))
    return [size for size in divisors if size <= num_ranks]


def model_parameters(config: ModelConfig, *, padded_vocab: int, itemsize: int = 4) -> tuple[Parameter, ...]:
    """The logical parameters, of `itemsize` bytes per element, in order from input to output."""
    return gpt_parameters(
        GptShape(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.ffn_hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            padded_vocab_size=padded_vocab,
            tied_embeddings=config.tied_embeddings,
            qkv_bias=config.qkv_bias,
            qk_norm=config.qk_norm,
            num_experts=config.num_experts,
            itemsize=itemsize,
            sequence_parallel=config.num_experts is not None,
        )
    )


def check_layout(config: ModelConfig, layout: Layout, *, padded_vocab: int) -> None:
    """Raises ValueError, with the equation and the legal choices, where the family does not fit the layout."""
    for axis, issue in (("cp", "context parallelism needs Transformer Engine"), ("ep", "the family has no experts")):
        size = getattr(layout, axis)
        if size != 1:
            raise ValueError(f"layout {layout} does not fit: {axis}={size}, but {issue}; legal {axis}: 1")
    for axis, count, what in (
        ("tp", config.num_heads, "num_heads"),
        ("tp", config.num_kv_heads, "num_kv_heads"),
        ("tp", config.ffn_hidden_size, "ffn_hidden_size"),
        ("tp", padded_vocab, "padded vocabulary"),
        ("pp", config.num_layers, "num_layers"),
    ):
        size = getattr(layout, axis)
        if count % size:
            raise ValueError(
                f"layout {layout} does not fit: {what} % {axis} = {count} % {size} = {count % size}, must be 0; "
                f"legal {axis}: {', '.join(map(str, legal_sizes(config, axis, padded_vocab=padded_vocab)))}"
            )


def legal_sizes(config: ModelConfig, axis: str, *, padded_vocab: int) -> list[int]:
    """The sizes of `tp` or `pp` that fit the family, ascending."""
    if axis == "pp":
        return _divisors(config.num_layers)
    return _divisors(math.gcd(config.num_heads, config.num_kv_heads, config.ffn_hidden_size, padded_vocab))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
