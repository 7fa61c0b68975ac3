"""The shape of the one model family Tidegate trains and serves: Llama-like (RoPE, GQA, RMSNorm, SwiGLU, no biases).

Pure values, so that the trainer, the inference and the generation engine read the same shape without importing each
other. Invariant: a `ModelConfig` is valid when made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`vocab_size` counts real tokens: tensors may carry padding rows after them, which never get probability.

    `head_dim` is its own number: num_heads * head_dim need not be hidden_size.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    tied_embeddings: bool = False
    num_experts: int | None = None
    """Experts of `ffn_hidden_size` in every layer, with a router; None: a dense model."""
    experts_per_token: int | None = None
    """How many of them a token goes to; None in a dense model."""

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
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"model {name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            legal = ", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)
            raise ValueError(
                f"model num_heads={self.num_heads} does not divide by num_kv_heads={self.num_kv_heads}; "
                f"legal num_kv_heads: {legal}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model head_dim={self.head_dim} is odd; RoPE rotates halves: make it even")
        for name in ("rope_theta", "rms_norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model {name}={getattr(self, name)} must be positive")
        self._check_experts()

    def _check_experts(self) -> None:
        experts, per_token = self.num_experts, self.experts_per_token
        if experts is None and per_token is None:
            return
        if experts is None or per_token is None or not 1 <= per_token <= experts:
            raise ValueError(
                f"model num_experts={experts} with experts_per_token={per_token}: a token goes to 1 up to num_experts "
                "experts; a dense model sets neither"
            )

    @property
    def num_queries_per_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        """Rows of the fused projection: per KV group its queries, a key and a value."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
