"""Attention and its KV cache, in blocks of keys, so that a row's bits do not depend on the rows around it.

A row is one token of one sequence. Each row's products have fixed shapes, [Q, D] x [D, T] and [Q, T] x [T, D]. They are
batched and never merged, and blocks are added in order. A block past a row's length adds exact zeros. A longer
neighbour makes the cache of all rows longer, but thus changes no bit of them.

Some devices choose another kernel for another number of products: an H200 does, with heads of 128. There `batch` says
how many are computed at once, always.

Shapes: B independent rows, Q queries a KV group, D head_dim, T tokens a block, J blocks, S = J * T, G KV groups.
"""

from __future__ import annotations

import math

import torch

from tidegate.model_config import ModelConfig

BLOCK_TOKENS = 64
"""The keys in a block. A multiple of 16 avoids the scalar tail of vector operations, whose exp rounds differently."""


class KvCache:
    """The keys and values of `num_slots` sequences of up to max_seq_len tokens.

    They are zero where nothing was written."""

    def __init__(self, config: ModelConfig, *, num_slots: int, device: torch.device) -> None:
        shape = _cache_shape(config, num_slots)
        self.keys = torch.zeros(shape, device=device)
        self.values = torch.zeros(shape, device=device)

    def clear(self, slot: int) -> None:
        """Zero a slot. Old values of a former sequence could be NaN, and a weight of zero would not hide them."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0

    def write(
        self, layer: int, *, slots: torch.Tensor, positions: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor
    ) -> None:
        self.keys[layer][slots, :, positions] = k_NGD
        self.values[layer][slots, :, positions] = v_NGD


def cache_bytes(config: ModelConfig, *, num_slots: int) -> int:
    """The memory of a cache of this size."""
    return 2 * math.prod(_cache_shape(config, num_slots)) * torch.float32.itemsize


def _cache_shape(config: ModelConfig, num_slots: int) -> tuple[int, ...]:
    num_blocks = num_blocks_for(config.max_seq_len)
    return (config.num_layers, num_slots, config.num_kv_heads, num_blocks * BLOCK_TOKENS, config.head_dim)


def num_blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


def hidden_keys(lengths_B: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A mask [J, B, 1, T], true where a key is at or past the row's length."""
    positions_JT = torch.arange(num_blocks * BLOCK_TOKENS, device=lengths_B.device)
    positions_JT = positions_JT.view(num_blocks, 1, 1, BLOCK_TOKENS)
    return positions_JT >= lengths_B.view(1, -1, 1, 1)


def attend(
    q_BQD: torch.Tensor,
    keys_BSD: torch.Tensor,
    values_BSD: torch.Tensor,
    hidden_JB1T: torch.Tensor,
    *,
    batch: int | None = None,
) -> torch.Tensor:
    """Softmax attention of scaled queries. Each row must see at least one key. `batch`: the rows of each product; None:
    all at once."""
    num_rows = len(q_BQD)
    if batch is None or num_rows == batch:
        return _attend(q_BQD, keys_BSD, values_BSD, hidden_JB1T)
    if num_rows < batch:
        q_BQD, keys_BSD, values_BSD = (_filled_up(each, batch) for each in (q_BQD, keys_BSD, values_BSD))
        hidden_BJ1T = _filled_up(hidden_JB1T.transpose(0, 1), batch)
        return _attend(q_BQD, keys_BSD, values_BSD, hidden_BJ1T.transpose(0, 1))[:num_rows]
    out_BQD = torch.empty_like(q_BQD)
    # The last batch computes some rows again, to be as large as the others.
    for start in (*range(0, num_rows - batch, batch), num_rows - batch):
        rows = slice(start, start + batch)
        out_BQD[rows] = _attend(q_BQD[rows], keys_BSD[rows], values_BSD[rows], hidden_JB1T[:, rows])
    return out_BQD


def _filled_up(rows: torch.Tensor, count: int) -> torch.Tensor:
    """More rows, like the first one."""
    if rows.stride(0) == 0:
        return rows[:1].expand(count, *rows.shape[1:])
    return torch.cat((rows, rows[:1].expand(count - len(rows), *rows.shape[1:])))


def _attend(
    q_BQD: torch.Tensor, keys_BSD: torch.Tensor, values_BSD: torch.Tensor, hidden_JB1T: torch.Tensor
) -> torch.Tensor:
    num_blocks = hidden_JB1T.shape[0]
    blocks = [slice(j * BLOCK_TOKENS, (j + 1) * BLOCK_TOKENS) for j in range(num_blocks)]
    scores_JBQT = torch.empty(num_blocks, *q_BQD.shape[:2], BLOCK_TOKENS, device=q_BQD.device)
    for j, block in enumerate(blocks):
        torch.bmm(q_BQD, keys_BSD[:, block].transpose(1, 2), out=scores_JBQT[j])
    scores_JBQT.masked_fill_(hidden_JB1T, float("-inf"))
    weights_JBQT = scores_JBQT.sub_(scores_JBQT.amax(dim=(0, 3), keepdim=True)).exp_()
    sums_JBQ = weights_JBQT.sum(dim=-1)
    total_BQ = sums_JBQ[0]
    out_BQD = torch.bmm(weights_JBQT[0], values_BSD[:, blocks[0]])
    for j in range(1, num_blocks):
        total_BQ = total_BQ + sums_JBQ[j]
        out_BQD.baddbmm_(weights_JBQT[j], values_BSD[:, blocks[j]])
    return out_BQD.div_(total_BQ.unsqueeze(-1))
