"""What the families share: logical parameters, the divisors of a layout, the size of the padded vocabulary. Pure.

Invariants:
- `check_layout` accepts exactly the layouts that the actor's trainer can build and whose ranks can cut padded rows.
  [test_family: accepts_what_the_trainer_builds]
- The padded vocabulary is a function of all layouts of the job together, so it never changes within a job.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tidegate.elastic.plan.gpt import GptShape, gpt_parameters
from tidegate.elastic.plan.parameters import Parameter
from tidegate.megatron.packing import PAD_MULTIPLE
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
    if layout.ep > 1 and config.num_experts is None:
        raise ValueError(f"layout {layout} does not fit: ep={layout.ep}, but the model has no experts; legal ep: 1")
    for each in _equations(config, layout, padded_vocab=padded_vocab):
        size = getattr(layout, each.axis)
        if rest := each.count % (each.factor * size):
            by, value = each.axis, str(size)
            if each.factor_name:
                by, value = f"({each.factor_name} * {by})", f"({each.factor} * {value})"
            legal = ", ".join(map(str, legal_sizes(config, layout, each.axis, padded_vocab=padded_vocab))) or "none"
            raise ValueError(
                f"layout {layout} does not fit: {each.what} % {by} = {each.count} % {value} = {rest}, must be 0; "
                f"legal {each.axis}: {legal}"
            )


def legal_sizes(config: ModelConfig, layout: Layout, axis: str, *, padded_vocab: int) -> list[int]:
    """The sizes of the axis that fit the family beside the other axes of `layout`, ascending."""
    own = [each for each in _equations(config, layout, padded_vocab=padded_vocab) if each.axis == axis]
    least = 2 if axis == "pp" and layout.vpp > 1 else 1
    return [
        size
        for size in _divisors(math.gcd(*(each.count for each in own)))
        if size >= least and not any(each.count % (each.factor * size) for each in own)
    ]


@dataclass(frozen=True, slots=True)
class _Equation:
    """`count` % (`factor` * the axis's size) must be 0."""

    axis: str
    count: int
    what: str
    factor: int = 1
    factor_name: str = ""


def _equations(config: ModelConfig, layout: Layout, *, padded_vocab: int) -> list[_Equation]:
    equations = [
        _Equation("tp", config.num_heads, "num_heads"),
        _Equation("tp", config.num_kv_heads, "num_kv_heads"),
        _Equation("tp", config.ffn_hidden_size, "ffn_hidden_size"),
        _Equation("tp", padded_vocab, "padded vocabulary"),
        _Equation("pp", config.num_layers, "num_layers", layout.vpp, "vpp" if layout.vpp > 1 else ""),
        # Rows are padded to a multiple of PAD_MULTIPLE positions, and a cp rank has two slices of each row.
        _Equation("cp", PAD_MULTIPLE, "positions of a row", 2, "2"),
    ]
    if config.num_experts is not None:
        equations += [
            _Equation("ep", config.num_experts, "num_experts"),
            _Equation("ep", layout.dp * layout.cp, "dp * cp"),
            # Experts under tp need sequence parallelism, which cuts the positions of a cp rank.
            _Equation("tp", PAD_MULTIPLE, "positions of a row", layout.cp, "cp" if layout.cp > 1 else ""),
        ]
    return equations


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
