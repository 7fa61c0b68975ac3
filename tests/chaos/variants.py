"""The jobs of the driver: small, and they learn, so that equal weights say something.

What decides a job's samples and weights is its `Training`. All variants of one training that are in fixed order and in
reproducible mode end with the same weights, whatever their policy, servers and checkpoints are. So one undisturbed run
is the reference of all of them. [test_chaos_plan: variants_of_one_training]
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.e2e.jobs import small_job
from tests.e2e.moving import POLICIES, TWO_BY_TWO

NUM_GPUS = 4
ROLES = ("actor", "rollout", "inference")
GROUP_SIZE = 4
NUM_SHARDS = 4
_MOVING = ("static", "tide", "rlinf", "dynarl", "growing", "collocated")
_LEARNS: dict[str, Any] = {
    "model__hidden_size": 64,
    "model__ffn_hidden_size": 128,
    "model__head_dim": 16,
    "model__max_seq_len": 80,
    "model__tied_embeddings": True,
    "algorithm__max_new_tokens": 48,
    "algorithm__kl_coefficient": 0.0,
    "actor__warm_up": {"steps": 120, "batch_size": 32, "learning_rate": 5e-3},
    "actor__learning_rate": 2e-3,
}
"""The warm-up brings the mean reward to a place from which it rises in a few updates."""
_PACE: dict[str, Any] = POLICIES["tide"]["cluster__pace"]
_BOUNDS: dict[str, Any] = {
    "runtime__command_deadline_s": 25.0,
    "runtime__collective_timeout_s": 20.0,
    "runtime__work_timeout_s": 60.0,
}
"""What got lost is done again within the time for which a job may stand still. A start takes 15 s on a busy machine."""


@dataclass(frozen=True, slots=True)
class Training:
    """What decides samples and weights."""

    iterations: int
    prompts: int
    minibatches: int

    def draws(self) -> Counter[str]:
        """The id of each sample without its incarnation, once."""
        return Counter(
            f"{iteration}.{iteration * self.prompts + prompt}.{draw}"
            for iteration in range(self.iterations)
            for prompt in range(self.prompts)
            for draw in range(GROUP_SIZE)
        )

    def __str__(self) -> str:
        return f"{self.iterations}x{self.prompts}x{self.minibatches}"


TRAININGS = (Training(3, 16, 4), Training(4, 16, 2), Training(5, 8, 2))


@dataclass(frozen=True, slots=True)
class Variant:
    """A job. `is_reproducible`: updates have the same bits in every layout. `order`: fixed or arrival."""

    training: Training
    policy: str
    order: str
    is_reproducible: bool
    checkpoint_every: int
    checkpoint_keep: int
    has_own_servers: bool
    num_nodes: int
    is_paced: bool
    """Steps wait until the time of a modelled GPU is over: iterations of some 5 s that compute little."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"n{node}" for node in range(self.num_nodes))

    @property
    def gpus(self) -> tuple[str, ...]:
        """The actor begins on the first, engines on the next two, the inference on the last."""
        return tuple(f"{node}/{index}" for node in self.nodes for index in range(NUM_GPUS // self.num_nodes))

    @property
    def moves_gpus(self) -> bool:
        return self.policy != "static"

    @property
    def has_reference(self) -> bool:
        """Whether its weights do not depend on what happens to it."""
        return self.is_reproducible and self.order == "fixed"

    def job(self, name: str, **changes: Any) -> dict[str, Any]:
        """The raw config. Dotted keys change it."""
        sizes: dict[str, Any] = {
            "algorithm__iterations": self.training.iterations,
            "algorithm__prompts_per_iteration": self.training.prompts,
            "algorithm__group_size": GROUP_SIZE,
            "algorithm__n_minibatches": self.training.minibatches,
            "algorithm__minibatch_order": self.order,
            "checkpoint__every": self.checkpoint_every,
            "checkpoint__keep": self.checkpoint_keep,
            "cluster__nodes": dict.fromkeys(self.nodes, NUM_GPUS // self.num_nodes),
        }
        pace = {"cluster__pace": _PACE} if self.is_paced else {}
        shards = {"actor__num_logical_shards": NUM_SHARDS if self.is_reproducible else None}
        return small_job(
            name, **(TWO_BY_TWO | _LEARNS | _BOUNDS | sizes | POLICIES[self.policy] | pace | shards | changes)
        )

    @property
    def servers(self) -> str:
        return "own" if self.has_own_servers else "embedded"

    def on_servers(self, *, is_own: bool) -> Variant:
        return replace(self, has_own_servers=is_own)

    def record(self) -> dict[str, Any]:
        return asdict(self)


def drawn_variant(rng: random.Random) -> Variant:
    order = rng.choice(["fixed", "fixed", "arrival"])
    return Variant(
        training=rng.choice(TRAININGS),
        policy=rng.choice(_MOVING),
        order=order,
        is_reproducible=rng.random() < (0.75 if order == "fixed" else 0.5),
        checkpoint_every=rng.choice([1, 1, 2]),
        checkpoint_keep=rng.choice([1, 2, 2, 3]),
        has_own_servers=rng.random() < 0.5,
        num_nodes=rng.choice([1, 2]),
        is_paced=rng.random() < 0.7,
    )


def reference_of(variant: Variant) -> Variant:
    """The undisturbed job of the same training."""
    return replace(
        variant,
        policy="static",
        order="fixed",
        is_reproducible=True,
        checkpoint_every=1,
        checkpoint_keep=2,
        has_own_servers=False,
        num_nodes=1,
        is_paced=False,
    )
