"""Drawn lengths of responses, for benchmarks: every policy, split and seed of a job gets the same long-tailed work.

    length = median_tokens * exp(sigma_prompt * z_prompt + sigma_group * z_draw), within [1, max_new_tokens]

The numbers z are standard normal. They follow from the law's own seed and the sample's iteration, prompt and draw, not
from the job's seed or its incarnation. The engine ignores stop tokens and ends the response at its length.

Invariants:
- A sample's length depends on nothing but the law and the sample's place. [test_length_law: depends_only_on]
- Every length is between 1 and the limit. [test_length_law: within_its_limits]
"""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist

from tidegate.config.engines.length_law import LengthLawSection
from tidegate.types import SampleId

_NORMAL = NormalDist()
_BITS = 52
"""The bits of a drawn number: each fraction of 2**-52 is exact in a float, and none is 0 or 1."""


def drawn_length(law: LengthLawSection, sample: SampleId, *, max_new_tokens: int) -> int:
    """The tokens of the sample's response, the stop token's place included."""
    prompt = f"{law.seed}/length/{sample.iteration}/{sample.prompt}"
    spread = law.sigma_prompt * _normal(prompt) + law.sigma_group * _normal(f"{prompt}/{sample.draw}")
    return min(max_new_tokens, max(1, round(law.median_tokens * math.exp(spread))))


def _normal(text: str) -> float:
    drawn = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - _BITS)
    return _NORMAL.inv_cdf((drawn + 0.5) / 2**_BITS)
