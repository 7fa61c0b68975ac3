"""Lengths that are drawn, read from a file or refused."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.lengths import BadTrace, LengthLaw, Lengths, LengthSection, draw_lengths, parse_trace


def drawn(section: LengthSection, *, seed: int = 0, num_prompts: int = 400) -> Lengths:
    return draw_lengths(section, num_prompts=num_prompts, group_size=8, rng=np.random.default_rng(seed))


def tokens(lengths: Lengths) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array([[sum(turns) for turns in row] for row in lengths.turns])


def test_a_seed_gives_the_same_lengths_and_another_seed_gives_others() -> None:
    section = LengthSection()
    assert drawn(section, seed=3) == drawn(section, seed=3)
    assert drawn(section, seed=3) != drawn(section, seed=4)


def test_prompts_and_members_have_the_spreads_of_the_section() -> None:
    logs = np.log(tokens(drawn(LengthSection(max_tokens=10**9), num_prompts=4000)))
    assert logs.std(axis=1, ddof=1).mean() == pytest.approx(0.25, abs=0.02)
    assert logs.mean(axis=1).std() == pytest.approx(0.51, abs=0.03)
    assert np.exp(np.median(logs)) == pytest.approx(7050, rel=0.03)


def test_a_long_tail_makes_some_prompts_much_longer_and_leaves_the_median() -> None:
    plain = LengthSection(max_tokens=10**9)
    body = tokens(drawn(plain))
    tail = tokens(drawn(plain.model_copy(update={"law": LengthLaw.LONG_TAILED})))
    assert np.median(tail) == pytest.approx(np.median(body), rel=0.1)
    assert 0 < (tail > body).all(axis=1).mean() < 0.12


def test_lengths_stay_within_their_limits() -> None:
    found = tokens(drawn(LengthSection(min_tokens=5000, max_tokens=9000)))
    assert found.min() == 5000
    assert found.max() == 9000


def test_a_hint_correlates_with_the_lengths_of_its_prompt() -> None:
    section = LengthSection(hint_sigma=0.1)
    lengths = drawn(section)
    logs = np.log(tokens(lengths)).mean(axis=1)
    assert np.corrcoef(logs, np.log(lengths.hints))[0, 1] > 0.9


def test_the_turns_add_up_to_the_response_and_none_is_empty() -> None:
    section = LengthSection(mean_turns=3.0)
    several, one = drawn(section), drawn(LengthSection())
    assert (tokens(several) == tokens(one)).all()
    assert np.mean([len(turns) for row in several.turns for turns in row]) == pytest.approx(3.0, abs=0.1)
    assert all(part > 0 for row in several.turns for turns in row for part in turns)


def test_a_trace_has_a_line_a_prompt_and_plus_signs_between_turns() -> None:
    text = "# run 7\n12 8+3\n\n5 6 # short\n"
    want = (((12,), (8, 3)), ((5,), (6,)))
    assert parse_trace(text, name="t.txt", group_size=2, max_tokens=100) == want


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("12", "t.txt:2: 1 responses, a group has group_size=2"),
        ("12 x", "t.txt:2: 'x' is no response"),
        ("12 0", "t.txt:2: '0' is no response"),
        ("12 -5", "t.txt:2: '-5' is no response"),
        ("12 8++3", "t.txt:2: '8++3' is no response"),
        ("12 000", "t.txt:2: '000' is no response"),
        (
            "12 " + "9" * 5000,
            "t.txt:2: '999999999999...9999999999999' has a number of over 18 digits; lengths.max_tokens",
        ),
        ("12 60+50", "t.txt:2: '60+50' has 110 tokens, lengths.max_tokens is 100"),
    ],
)
def test_a_bad_line_is_refused_with_its_file_and_number(line: str, want: str) -> None:
    with pytest.raises(BadTrace) as caught:
        parse_trace(f"1 2\n{line}\n", name="t.txt", group_size=2, max_tokens=100)
    assert str(caught.value).startswith(want)
