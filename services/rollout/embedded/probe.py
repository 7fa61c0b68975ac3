"""Finds the row counts that give every row the same bits on this device, at start, on one layer of random weights.

Matrix libraries choose kernels by shape. On AVX512, a linear layer of 1-3 rows differs from one of 4 and more rows in
the last bits of 83-90 % of elements. The probe puts a sequence behind another one, in the middle of a count's rows. It
keeps the count if the sequence leaves the same cache and logits as alone on `REFERENCE_ROWS` rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from services.rollout.embedded.attention import BLOCK_TOKENS
from services.rollout.embedded.decoder import Decoder, RowCounts
from services.rollout.embedded.rows import Segment
from services.rollout.embedded.weights import CPU, DecoderWeights, load_weights
from tidegate.megatron.family import model_parameters
from tidegate.model_config import ModelConfig

CANDIDATE_ROWS = (4, 8, 16, 32, 64, 128, 256)
REFERENCE_ROWS = 64
NEIGHBOUR_TOKENS = 5
"""Odd, so that the sequence under test is on other rows than when alone, across every tile of 4, 8 or 16 rows."""


def probe_row_counts(config: ModelConfig, device: torch.device = CPU) -> RowCounts:
    """The row counts. Raises RuntimeError when even the reference count gives a row other bits at another place."""
    one_layer = replace(config, num_layers=1)
    generator = torch.Generator(CPU).manual_seed(0)
    weights = load_weights(
        one_layer,
        version=0,
        tensors=[
            (parameter.name, _drawn(parameter.shape, generator))
            for parameter in model_parameters(one_layer, padded_vocab=config.vocab_size)
        ],
        device=device,
    )
    num_tokens = min(config.max_seq_len, 2 * BLOCK_TOKENS)
    tokens = torch.randint(config.vocab_size, (num_tokens,), generator=generator, device=CPU).tolist()
    want = _run(one_layer, weights, tokens, num_rows=REFERENCE_ROWS, neighbour=())
    neighbour = tuple(tokens[:NEIGHBOUR_TOKENS])
    counts = tuple(
        count
        for count in CANDIDATE_ROWS
        if all(map(torch.equal, _run(one_layer, weights, tokens, num_rows=count, neighbour=neighbour), want))
    )
    if REFERENCE_ROWS not in counts:
        raise RuntimeError(
            f"a row's result depends on its place among {REFERENCE_ROWS} rows on this machine's {device.type} "
            f"({torch.get_num_threads()} torch threads): a sequence would not be reproducible; try OMP_NUM_THREADS=1"
        )
    return RowCounts(counts)


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    scale: float = shape[-1] ** -0.5
    return torch.randn(shape, generator=generator, device=CPU) * scale


def _run(
    config: ModelConfig, weights: DecoderWeights, tokens: list[int], *, num_rows: int, neighbour: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logits, keys and values of the sequence in slot 1, with the neighbour's segment in front of it."""
    decoder = Decoder(config, RowCounts((num_rows,)), weights.final_norm_H.device)
    cache = decoder.new_cache(num_slots=2)
    segments = [Segment(slot=0, start=0, tokens=neighbour)] if neighbour else []
    segments.append(Segment(slot=1, start=0, tokens=tuple(tokens)))
    logits = decoder.prefill(weights, cache, segments)
    return logits[-1], cache.keys[:, 1], cache.values[:, 1]
