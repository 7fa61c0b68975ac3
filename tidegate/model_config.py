"""The shape of the models that Tidegate trains and serves: Llama-like (RoPE, GQA, RMSNorm, SwiGLU), plus Qwen.

These are pure values, so that the trainer, the inference and the generation engine read the same shape without
importing each other.

Invariant: a `ModelConfig` is valid when made. [test_model_config: shape_that_no_model_has]
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """RoPE of Llama 3.1 and later. Low frequencies are divided by `factor`, high ones stay; between them it is smooth.

    A frequency is low when its wave is longer than original_max_seq_len / low_freq_factor.
    It is high when its wave is shorter than original_max_seq_len / high_freq_factor.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def __post_init__(self) -> None:
        if not (
            self.factor >= 1 and 0 < self.low_freq_factor < self.high_freq_factor and self.original_max_seq_len > 0
        ):
            raise ValueError(
                f"RoPE scaling {self} makes no frequencies: factor is at least 1, low_freq_factor above 0 and below "
                "high_freq_factor, original_max_seq_len above 0"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`vocab_size` counts real tokens. Tensors may carry padding rows after them, which never get probability.

    `head_dim` is set by itself: num_heads * head_dim need not be hidden_size.
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
    rope_scaling: Llama3Scaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    """A bias on queries, keys and values, and on nothing else (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys, before RoPE (Qwen3)."""
    num_experts: int | None = None
    """The number of experts of size `ffn_hidden_size` in every layer, with a router. None: a dense model."""
    experts_per_token: int | None = None
    """The number of experts that a token goes to. None in a dense model."""
    norm_topk_prob: bool = True
    """Whether the weights of a token's experts add up to 1. If not, they are shares of the softmax over all experts."""

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
        if per_token == 1 and self.norm_topk_prob:
            raise ValueError(
                "model experts_per_token=1 with norm_topk_prob gives that expert weight 1, and the router no gradient: "
                "set norm_topk_prob to false"
            )

    @property
    def num_queries_per_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_size(self) -> int:
        """Rows of the fused projection. Each KV group has its queries, one key and one value."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
