"""The forward pass over rows: embedding, layers, logits. fp32, RoPE by halves as in Megatron and Hugging Face Llama.

Each operation either works on one row alone, or is a linear layer on a row count from `RowCounts`, which gives every
row the same bits. A token's logits thus depend only on its own sequence.

Shapes: R rows, H hidden_size, G KV groups, Q queries a group, D head_dim, F ffn_hidden_size, E experts, K of them a
token, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from services.rollout.embedded.attention import KvCache
from services.rollout.embedded.rows import DecodeRows, PrefillRows, Rows, Segment
from services.rollout.embedded.weights import CPU, DecoderWeights, FeedForwardWeights, LayerWeights
from tidegate.megatron.rope import inverse_frequencies
from tidegate.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The row counts, ascending, on which a row's result is the same to the bit."""

    counts: tuple[int, ...]
    attention_batch: int | None = None
    """The number of rows of attention that are computed at once for it. None: any number."""

    @property
    def largest(self) -> int:
        return self.counts[-1]

    def at_least(self, num_rows: int) -> int:
        """The smallest count that holds `num_rows`, which is at most `largest`."""
        return next(count for count in self.counts if count >= num_rows)


class Decoder:
    """A model's computation on `device`. Callers pass weights on that device and a cache from `new_cache`."""

    def __init__(self, config: ModelConfig, row_counts: RowCounts, device: torch.device = CPU) -> None:
        self._config = config
        self._device = device
        self.row_counts = row_counts
        positions_S = torch.arange(config.max_seq_len, device=CPU).float()
        angles_SD = torch.outer(positions_S, inverse_frequencies(config)).repeat(1, 2)
        self._cos_SD, self._sin_SD = angles_SD.cos().to(device), angles_SD.sin().to(device)

    def new_cache(self, num_slots: int) -> KvCache:
        """A cache with a slot for every row that a decode of up to `num_slots` slots computes."""
        return KvCache(self._config, num_slots=self.row_counts.at_least(num_slots), device=self._device)

    @torch.inference_mode()
    def prefill(self, weights: DecoderWeights, cache: KvCache, segments: Sequence[Segment]) -> torch.Tensor:
        """Run segments of different slots. Returns the logits after the last token of each, [segments, V]."""
        last_rows: list[torch.Tensor] = []
        for chunk in _cut(segments, self.row_counts.largest):
            num_tokens = sum(len(piece.tokens) for piece, _ in chunk)
            num_rows = self.row_counts.at_least(num_tokens)
            pieces = [piece for piece, _ in chunk]
            rows = PrefillRows(cache, pieces, num_rows=num_rows, batch=self.row_counts.attention_batch)
            hidden_RH = self._layers(weights, rows)
            end = 0
            for piece, is_last in chunk:
                end += len(piece.tokens)
                if is_last:
                    last_rows.append(hidden_RH[end - 1])
        hidden_NH = torch.stack(last_rows)
        padding = self.row_counts.at_least(len(segments)) - len(segments)
        return self._logits(weights, functional.pad(hidden_NH, (0, 0, 0, padding)))[: len(segments)]

    @torch.inference_mode()
    def decode(self, weights: DecoderWeights, cache: KvCache, segments: Sequence[Segment]) -> torch.Tensor:
        """Run one token for each of some slots. Returns their logits in the order of `segments`, [segments, V]."""
        slots = [segment.slot for segment in segments]
        num_rows = self.row_counts.at_least(max(slots) + 1)
        rows = DecodeRows(cache, segments, num_rows=num_rows, batch=self.row_counts.attention_batch)
        return self._logits(weights, self._layers(weights, rows))[slots]

    def _layers(self, weights: DecoderWeights, rows: Rows) -> torch.Tensor:
        hidden_RH = weights.embedding_VH[rows.tokens_R]
        cos_R11D = self._cos_SD[rows.positions_R][:, None, None]
        sin_R11D = self._sin_SD[rows.positions_R][:, None, None]
        for index, layer in enumerate(weights.layers):
            normed_RH = self._norm(hidden_RH, layer.attention_norm_H)
            hidden_RH = hidden_RH + self._attention(index, layer, rows, normed_RH, (cos_R11D, sin_R11D))
            normed_RH = self._norm(hidden_RH, layer.mlp_norm_H)
            hidden_RH = hidden_RH + self._feed_forward(layer, normed_RH)
        return hidden_RH

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        rows: Rows,
        normed_RH: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        config = self._config
        queries = config.num_queries_per_group
        fused = functional.linear(normed_RH, layer.qkv_XH, layer.qkv_bias_X)
        fused = fused.view(-1, config.num_kv_heads, queries + 2, config.head_dim)
        q_RGQD, k_RG1D = fused[:, :, :queries], fused[:, :, queries : queries + 1]
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q_RGQD, k_RG1D = self._norm(q_RGQD, layer.q_norm_D), self._norm(k_RG1D, layer.k_norm_D)
        q_RGQD = _rotate(q_RGQD, *rope) * config.head_dim**-0.5
        k_RGD = _rotate(k_RG1D, *rope).squeeze(2)
        out_RGQD = rows.attend(index, q_RGQD=q_RGQD, k_RGD=k_RGD, v_RGD=fused[:, :, queries + 1])
        return functional.linear(out_RGQD.flatten(1), layer.proj_HX)

    def _feed_forward(self, layer: LayerWeights, x_RH: torch.Tensor) -> torch.Tensor:
        if layer.router_EH is None:
            return _swiglu(x_RH, layer.experts[0])
        shares_RE = functional.linear(x_RH, layer.router_EH).softmax(dim=-1)
        top_RK, chosen_RK = shares_RE.topk(self._config.experts_per_token or 0, dim=-1)
        if self._config.norm_topk_prob:
            top_RK = top_RK / top_RK.sum(dim=-1, keepdim=True)
        weights_RE = torch.zeros_like(shares_RE).scatter_(1, chosen_RK, top_RK)
        out_RH = torch.zeros_like(x_RH)
        # Add in the experts' order for every row: its sum then has the same bits whichever experts other rows use.
        for index, expert in enumerate(layer.experts):
            rows_N = weights_RE[:, index].nonzero().squeeze(1)
            if len(rows_N):
                padding = self.row_counts.at_least(len(rows_N)) - len(rows_N)
                part_NH = _swiglu(functional.pad(x_RH[rows_N], (0, 0, 0, padding)), expert)[: len(rows_N)]
                out_RH[rows_N] += part_NH * weights_RE[rows_N, index].unsqueeze(1)
        return out_RH

    def _norm(self, hidden_RH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
        """RMS normalisation over the last dim."""
        mean_square = hidden_RH.square().mean(dim=-1, keepdim=True)
        return hidden_RH * torch.rsqrt(mean_square + self._config.rms_norm_eps) * weight_H

    def _logits(self, weights: DecoderWeights, hidden_RH: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._norm(hidden_RH, weights.final_norm_H), weights.output_VH)


def _swiglu(x_RH: torch.Tensor, weights: FeedForwardWeights) -> torch.Tensor:
    gate_RF, up_RF = functional.linear(x_RH, weights.gate_up_XH).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate_RF) * up_RF, weights.down_HF)


def _rotate(x_RGXD: torch.Tensor, cos_R11D: torch.Tensor, sin_R11D: torch.Tensor) -> torch.Tensor:
    first, second = x_RGXD.chunk(2, dim=-1)
    return x_RGXD * cos_R11D + torch.cat((-second, first), dim=-1) * sin_R11D


def _cut(segments: Sequence[Segment], limit: int) -> list[list[tuple[Segment, bool]]]:
    """The segments in order, cut into chunks of up to `limit` tokens. A flag says whether a piece ends its segment."""
    chunks: list[list[tuple[Segment, bool]]] = [[]]
    room = limit
    for segment in segments:
        begin = 0
        while begin < len(segment.tokens):
            if room == 0:
                chunks.append([])
                room = limit
            tokens = segment.tokens[begin : begin + room]
            piece = Segment(slot=segment.slot, start=segment.start + begin, tokens=tokens)
            begin += len(tokens)
            room -= len(tokens)
            chunks[-1].append((piece, begin == len(segment.tokens)))
    return chunks
