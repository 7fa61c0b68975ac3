"""The law of modelled slots: its units, its directions, and the published figures that its numbers are from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.config.sections.pace import PaceSection
from tidegate.pace.law import PaceLaw
from tidegate.types import Layout

LAW = PaceLaw(PaceSection())
ONE = Layout()

sizes = st.integers(0, 10_000)
layouts = st.builds(Layout, tp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 2]), dp=st.sampled_from([1, 2, 4]))
scalings = st.builds(
    lambda tokens, responses: PaceLaw(PaceSection(tokens_per_token=tokens, responses_per_response=responses)),
    st.integers(1, 200),
    st.integers(1, 64),
)


def times(law: PaceLaw, *, sequences: int, tokens: int, layout: Layout = ONE) -> list[float]:
    """A step of each kind."""
    return [
        law.decode_s(num_sequences=sequences, num_kv_tokens=tokens),
        law.prefill_s(tokens),
        law.training_s([[tokens]] * layout.dp, layout),
        law.scoring_s(tokens, layout),
    ]


@given(law=scalings, layout=layouts, sequences=sizes, tokens=sizes, more=st.integers(0, 1000))
def test_more_work_takes_no_less_time(law: PaceLaw, layout: Layout, sequences: int, tokens: int, more: int) -> None:
    less = times(law, sequences=sequences, tokens=tokens, layout=layout)
    greater = times(law, sequences=sequences + more, tokens=tokens + more, layout=layout)
    assert all(some_s <= more_s for some_s, more_s in zip(less, greater, strict=True))


@given(law=scalings, sequences=sizes, tokens=sizes, scale=st.floats(1e-3, 1e3))
def test_time_scale_multiplies_every_kind_of_step_alike(
    law: PaceLaw, sequences: int, tokens: int, scale: float
) -> None:
    scaled = PaceLaw(law.pace.model_copy(update={"time_scale": scale}))
    want = [scale * each for each in times(law, sequences=sequences, tokens=tokens)]
    assert times(scaled, sequences=sequences, tokens=tokens) == pytest.approx(want)


@given(layout=layouts, portions=st.lists(st.lists(sizes, min_size=1, max_size=4), min_size=1, max_size=4))
def test_portions_of_an_update_take_as_long_as_the_whole(layout: Layout, portions: list[list[int]]) -> None:
    flat = replace(layout, pp=1)
    whole = [[tokens for portion in portions for tokens in portion]] * flat.dp
    parts_s = sum(LAW.portion_s([portion] * flat.dp, flat) for portion in portions)
    assert parts_s + LAW.update_s == pytest.approx(LAW.training_s(whole, flat))


@given(tokens=st.integers(1, 300), sequences=st.integers(1, 64), kv_tokens=st.integers(0, 1000))
def test_a_step_of_several_modelled_tokens_is_the_sum_of_its_modelled_steps(
    tokens: int, sequences: int, kv_tokens: int
) -> None:
    law = PaceLaw(PaceSection(tokens_per_token=tokens, responses_per_response=3))
    want = sum(
        LAW.decode_s(num_sequences=3 * sequences, num_kv_tokens=3 * (tokens * kv_tokens + sequences * step))
        for step in range(tokens)
    )
    assert law.decode_s(num_sequences=sequences, num_kv_tokens=kv_tokens) == pytest.approx(want)


@pytest.mark.parametrize(
    ("batch", "context", "want_ms"),
    [
        (1, 1024, 5.9),
        (64, 1024, 7.7),
        (128, 1024, 9.3),
        (256, 1024, 13),
        (32, 8192, 11),
        (128, 8192, 26),
        (256, 8192, 47),
    ],
)
def test_the_decode_law_meets_the_published_kernel_times(batch: int, context: int, want_ms: float) -> None:
    law = PaceLaw(PaceSection(decode_host_share=0))
    assert law.decode_s(num_sequences=batch, num_kv_tokens=batch * context) * 1e3 == pytest.approx(want_ms, rel=0.05)


@pytest.mark.parametrize(("tokens_per_s", "want_s"), [(5300, 368), (4800, 200), (4000, 112)])
def test_the_training_law_meets_the_published_iterations_on_64_128_and_256_gpus(
    tokens_per_s: float, want_s: float
) -> None:
    """RLinf's figure 9: the rate of a GPU, and the seconds of the four updates of an iteration."""
    tokens = round(tokens_per_s * want_s / 4)
    assert 4 * LAW.training_s([[tokens]], ONE) == pytest.approx(want_s, rel=0.02)


def test_twice_the_gpus_train_a_batch_less_than_twice_as_fast_and_the_less_the_smaller_it_is() -> None:
    gains = [
        LAW.training_s([[tokens]], ONE) / LAW.training_s([[tokens // 2]] * 2, ONE) for tokens in (10**6, 10**5, 10**4)
    ]
    assert 2 > gains[0] > gains[1] > gains[2] > 1


def test_the_utilisation_of_an_update_saturates() -> None:
    assert LAW.mfu(LAW.pace.train_half_tokens) == pytest.approx(LAW.pace.train_mfu / 2)
    assert LAW.mfu(1e12) == pytest.approx(LAW.pace.train_mfu)
    tokens = 300_000
    want_s = 6 * LAW.pace.parameters * tokens / (LAW.pace.peak_flops * LAW.mfu(tokens))
    assert LAW.training_s([[tokens]], ONE) == pytest.approx(want_s)


def test_the_busiest_replica_sets_the_time_of_an_update_and_a_pipeline_waits_for_its_ends() -> None:
    assert LAW.portion_s([[10, 30], [60]], Layout(dp=2)) == LAW.portion_s([[60]], ONE)
    assert LAW.portion_s([[10, 10]], Layout(pp=2)) == pytest.approx(LAW.portion_s([[15]], ONE))
    assert LAW.portion_s([[20]], Layout(tp=2)) == pytest.approx(LAW.portion_s([[10]], ONE))


def test_each_policy_of_a_scoring_takes_a_pass() -> None:
    assert LAW.scoring_s(100, ONE, num_policies=2) == pytest.approx(2 * LAW.scoring_s(100, ONE))
    assert LAW.scoring_s(19_200, ONE) == pytest.approx(1.0)
