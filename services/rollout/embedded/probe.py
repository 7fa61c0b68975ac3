"""Finds the row counts that give every row the same bits on this device, at start, on two layers of random weights.

Matrix libraries choose kernels by shape. On AVX512, a linear layer of 1-3 rows differs from one of 4 and more rows in
the last bits of 83-90 % of elements. The probe puts a sequence behind another one, in the middle of a count's rows, and
decodes its last token. It keeps the count if the sequence leaves the same cache and logits as alone on `REFERENCE_ROWS`
rows, prefilled whole. The second layer's cache has what attention made of each token. Where this leaves out the
reference count, attention is computed in batches of one size.
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
    for attention_batch in (None, REFERENCE_ROWS):
        counts = _alike(config, device, attention_batch)
        if REFERENCE_ROWS in counts:
            return RowCounts(counts, attention_batch)
    if device.type == "cpu":
        remedy = f"try OMP_NUM_THREADS=1, there are {torch.get_num_threads()} torch threads"
    else:
        remedy = "rollout.engine=sglang starts without that promise"
    raise RuntimeError(
        f"a row's result depends on its place among {REFERENCE_ROWS} rows on this machine's {device.type}, for a width "
        f"of {config.hidden_size} and heads of {config.head_dim}: a sequence would not be reproducible; {remedy}"
    )


def _alike(config: ModelConfig, device: torch.device, attention_batch: int | None) -> tuple[int, ...]:
    """The row counts that give a sequence the bits that it has alone on the reference count."""
    two_layers = replace(config, num_layers=2)
    generator = torch.Generator(device).manual_seed(0)
    weights = load_weights(
        two_layers,
        version=0,
        tensors=[
            (parameter.name, _drawn(parameter.shape, generator))
            for parameter in model_parameters(two_layers, padded_vocab=config.vocab_size)
        ],
        device=device,
    )
    num_tokens = min(config.max_seq_len, 2 * BLOCK_TOKENS)
    tokens = torch.randint(config.vocab_size, (num_tokens,), generator=generator, device=device).tolist()
    alone = RowCounts((REFERENCE_ROWS,), attention_batch)
    want = _run(two_layers, weights, tokens, alone, neighbour=[], num_decoded=0)

    def is_alike(count: int) -> bool:
        counts = RowCounts((count,), attention_batch)
        found = _run(two_layers, weights, tokens, counts, neighbour=tokens[:NEIGHBOUR_TOKENS], num_decoded=1)
        return all(map(torch.equal, found, want))

    return tuple(filter(is_alike, CANDIDATE_ROWS))


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    scale: float = shape[-1] ** -0.5
    return torch.randn(shape, generator=generator, device=generator.device) * scale


def _run(
    config: ModelConfig,
    weights: DecoderWeights,
    tokens: list[int],
    row_counts: RowCounts,
    *,
    neighbour: list[int],
    num_decoded: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logits, keys and values of the sequence in slot 1, with the neighbour's segment in front of it. The last
    `num_decoded` tokens are decoded, the others prefilled."""
    decoder = Decoder(config, row_counts, weights.final_norm_H.device)
    cache = decoder.new_cache(num_slots=2)
    num_prefilled = len(tokens) - num_decoded
    segments = [Segment(slot=0, start=0, tokens=tuple(neighbour))] if neighbour else []
    segments.append(Segment(slot=1, start=0, tokens=tuple(tokens[:num_prefilled])))
    logits = decoder.prefill(weights, cache, segments)
    for position in range(num_prefilled, len(tokens)):
        logits = decoder.decode(weights, cache, [Segment(slot=1, start=position, tokens=(tokens[position],))])
    return logits[-1], cache.keys[:, 1], cache.values[:, 1]
