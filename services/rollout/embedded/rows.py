"""The layout of one forward pass's tokens as rows, and the attention of each row.

- `DecodeRows`: row i is slot i, with one token each, so the cache is read in place. Other slots compute and write
  nothing.
- `PrefillRows`: segments of consecutive tokens, one after another.

Both give every row the same products (see `attention`), so a sequence may change between them at any token.

Shapes: R rows with padding, N rows without padding, G KV groups, Q queries a group, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.rollout.embedded.attention import BLOCK_TOKENS, KvCache, attend, hidden_keys, num_blocks_for


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of the sequence in `slot` at positions start, start + 1, ... The cache holds the tokens before them."""

    slot: int
    start: int
    tokens: tuple[int, ...]


class Rows(Protocol):
    """The rows of one pass. `attend` stores the keys and values of all rows before any row reads them."""

    tokens_R: torch.Tensor
    positions_R: torch.Tensor

    def attend(self, layer: int, *, q_RGQD: torch.Tensor, k_RGD: torch.Tensor, v_RGD: torch.Tensor) -> torch.Tensor: ...


class DecodeRows:
    """One token for the slot of each segment, on `num_rows` rows. `batch` as in `attention.attend`."""

    def __init__(self, cache: KvCache, segments: Sequence[Segment], *, num_rows: int, batch: int | None) -> None:
        self._cache, self._batch = cache, batch
        device = cache.keys.device
        self._slots_N = torch.tensor([segment.slot for segment in segments], device=device)
        self._positions_N = torch.tensor([segment.start for segment in segments], device=device)
        self.tokens_R = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.tokens_R[self._slots_N] = torch.tensor([segment.tokens[0] for segment in segments], device=device)
        self.positions_R = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.positions_R[self._slots_N] = self._positions_N
        self._num_blocks = num_blocks_for(max(segment.start for segment in segments) + 1)
        num_groups = cache.keys.shape[2]
        lengths_B = (self.positions_R + 1).repeat_interleave(num_groups)
        self._hidden_JB1T = hidden_keys(lengths_B, self._num_blocks)

    def attend(self, layer: int, *, q_RGQD: torch.Tensor, k_RGD: torch.Tensor, v_RGD: torch.Tensor) -> torch.Tensor:
        active = self._slots_N
        self._cache.write(layer, slots=active, positions=self._positions_N, k_NGD=k_RGD[active], v_NGD=v_RGD[active])
        num_rows, stored = q_RGQD.shape[0], self._num_blocks * BLOCK_TOKENS
        keys_BSD = self._cache.keys[layer, :num_rows, :, :stored].flatten(0, 1)
        values_BSD = self._cache.values[layer, :num_rows, :, :stored].flatten(0, 1)
        out_BQD = attend(q_RGQD.flatten(0, 1), keys_BSD, values_BSD, self._hidden_JB1T, batch=self._batch)
        return out_BQD.view_as(q_RGQD)


class PrefillRows:
    """The tokens of some segments on `num_rows` rows, padded with rows whose results are not used. `batch` as in
    `attention.attend`."""

    def __init__(self, cache: KvCache, segments: Sequence[Segment], *, num_rows: int, batch: int | None) -> None:
        self._cache, self._batch = cache, batch
        device = cache.keys.device
        self._spans: list[tuple[int, slice, torch.Tensor]] = []
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        for segment in segments:
            end = segment.start + len(segment.tokens)
            rows = slice(len(tokens), len(tokens) + len(segment.tokens))
            lengths_B = torch.arange(segment.start + 1, end + 1, device=device)
            self._spans.append((segment.slot, rows, hidden_keys(lengths_B, num_blocks_for(end))))
            tokens += segment.tokens
            slots += [segment.slot] * len(segment.tokens)
            positions += range(segment.start, end)
        padding = [0] * (num_rows - len(tokens))
        self.tokens_R = torch.tensor(tokens + padding, device=device)
        self.positions_R = torch.tensor(positions + padding, device=device)
        self._slots_N = torch.tensor(slots, device=device)

    def attend(self, layer: int, *, q_RGQD: torch.Tensor, k_RGD: torch.Tensor, v_RGD: torch.Tensor) -> torch.Tensor:
        num_tokens = len(self._slots_N)
        self._cache.write(
            layer,
            slots=self._slots_N,
            positions=self.positions_R[:num_tokens],
            k_NGD=k_RGD[:num_tokens],
            v_NGD=v_RGD[:num_tokens],
        )
        out_RGQD = torch.zeros_like(q_RGQD)
        for slot, rows, hidden_JB1T in self._spans:
            num_seen, num_rows = hidden_JB1T.shape[0] * BLOCK_TOKENS, rows.stop - rows.start
            for group in range(q_RGQD.shape[1]):
                keys_BSD = self._cache.keys[layer, slot, group, :num_seen].expand(num_rows, -1, -1)
                values_BSD = self._cache.values[layer, slot, group, :num_seen].expand(num_rows, -1, -1)
                out_RGQD[rows, group] = attend(
                    q_RGQD[rows, group], keys_BSD, values_BSD, hidden_JB1T, batch=self._batch
                )
        return out_RGQD
