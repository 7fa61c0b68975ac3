"""Sums of fates depend on their ids alone."""

from __future__ import annotations

import itertools

from services.scheduler.state.values import DIGEST_MODULUS, Fate, total

# The hashes wrap around the modulus when they are added.
IDS = tuple(Fate(num_samples=1, ids_digest=DIGEST_MODULUS - hashed) for hashed in (1, 70, 900, 11_000))


def test_equal_ids_have_equal_sums_in_whatever_order_and_parts() -> None:
    want = total(IDS)

    for order in itertools.permutations(IDS):
        for cut in range(len(order) + 1):
            assert total((total(order[:cut]), total(order[cut:]))) == want
    assert want.ids_digest < DIGEST_MODULUS


def test_a_missing_or_doubled_id_changes_the_sum() -> None:
    want = total(IDS)

    for index, each in enumerate(IDS):
        others = (*IDS[:index], *IDS[index + 1 :])
        assert total(others) != want
        assert total((*IDS, each)) != want
        for other in others:
            assert total((*others, other)).ids_digest != want.ids_digest, "one is missing and another doubled"
