"""The Llama-like family: its sizes, what a layout must divide, and the size of its padded vocabulary. Pure.

Invariants: a `ModelConfig` is consistent when made; `check_layout` accepts exactly the layouts that `build_model_chunks`
can build; the padded vocabulary is a function of the job's layouts together, so that it never changes within a job.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tidegate.types import Layout


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-like decoder: RoPE, grouped-query attention, RMSNorm, SwiGLU, no biases, no dropout."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_seq_len",
            "rope_theta",
            "rms_norm_eps",
        ):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"model {name}={value} must be greater than 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model num_heads={self.num_heads} does not divide by num_kv_heads={self.num_kv_heads}: "
                f"each key/value head serves as many query heads; legal num_kv_heads: {_divisors(self.num_heads)}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model head_dim={self.head_dim} must be even: rotary embeddings turn pairs of elements")

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def padded_vocab_size(config: ModelConfig, tp_sizes: Iterable[int]) -> int:
    """The vocabulary rounded up so that every tp of the job divides it: the same for all layouts of a job."""
    multiple = math.lcm(*tp_sizes)
    return math.ceil(config.vocab_size / multiple) * multiple


def check_layout(config: ModelConfig, layout: Layout, *, padded_vocab: int) -> None:
    """ValueError, with the equation and the legal choices, where the family does not fit the layout."""
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
