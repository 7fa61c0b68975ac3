"""A rank of the inference rests, works again and changes its world, with the same bits and without leaving anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.component_bench import job_config
from tests.integration.inference.real_copies import sections
from tests.integration.inference.standby_ranks import NUM_MOVES
from tests.ranks import RankServer, Results
from tidegate.config.job_config import JobConfig
from tidegate.job import load_job

RANKS = "tests.integration.inference.standby_ranks"
MODEL = {
    "num_layers": 4,
    "hidden_size": 512,
    "ffn_hidden_size": 1024,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 64,
    "max_seq_len": 80,
}
"""Some 42 MB of weights, of which each of two ranks has half."""


@pytest.fixture(scope="module")
def job(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[JobConfig, Path]:
    folder = tmp_path_factory.mktemp("weights")
    config = job_config(folder.with_name("job"), **sections({"tp": 2}), model=MODEL)
    arguments = {"config": config.to_json(), "folder": str(folder)}
    ranks.run("tests.integration.inference.real_copies:write_weights", 1, arguments)
    return config, folder


@pytest.fixture(scope="module")
def lives(ranks: RankServer, job: tuple[JobConfig, Path]) -> list[Results]:
    config, folder = job
    return ranks.run(f"{RANKS}:life", 2, {"config": config.to_json(), "folder": str(folder)}, timeout_s=120)


def bits(lives: list[Results], what: str) -> dict[str, bytes]:
    """By sample, of the ranks that computed it."""
    found = [
        {key.removeprefix(f"{what}/"): values.tobytes() for key, values in life.items() if key.startswith(f"{what}/")}
        for life in lives
    ]
    assert any(found)
    return {key: value for each in found for key, value in each.items()}


def test_a_rank_gives_the_same_bits_after_a_rest(lives: list[Results]) -> None:
    want = bits(lives, "first")
    assert bits(lives, "again 0") == bits(lives, "again 1") == want


def test_a_rank_that_joins_another_world_gives_the_same_bits(lives: list[Results]) -> None:
    assert bits(lives, "swapped") == bits(lives, "first")
    assert bits(lives, "alone").keys() == bits(lives, "first").keys()


def test_a_second_start_in_a_row_is_refused_and_changes_nothing(lives: list[Results]) -> None:
    for life in lives:
        for kind in ("second start", "second start with a rendezvous"):
            assert str(life[f"refused/{kind}"]) == "the scorer is started already, in the world a"
    assert bits(lives, "after the refusals") == bits(lives, "first")


@pytest.mark.parametrize(
    ("what", "why"),
    {
        "wake in no world": "this worker is in no world, not in a: name a rendezvous to all of its copy",
        "start without a world": "a scorer works in the world of its copy: name it",
        "another world": "this worker is in the world a, not in b: name a rendezvous to all of its copy",
        "score at rest": "the scorer is not started; send StartScorer first",
        "score without weights": "group of prompt 0 was drawn from version 0, but the loaded version is None",
        "score in no world": "the scorer is not started; send StartScorer first",
    }.items(),
)
def test_a_call_in_the_wrong_state_is_refused(lives: list[Results], what: str, why: str) -> None:
    assert [str(life[f"refused/{what}"]) for life in lives] == [why, why]


def test_a_rest_frees_the_memory_of_the_weights(lives: list[Results], job: tuple[JobConfig, Path]) -> None:
    _, folder = job
    weights_bytes = sum(file.stat().st_size for file in folder.iterdir())
    for life in lives:
        for number in range(2):
            assert int(life[f"freed bytes/{number}"]) > 0.8 * weights_bytes / 2
            assert int(life[f"held bytes/{number}"]) == 0, "a CPU has no device memory"


def test_a_world_that_was_left_leaves_no_descriptor_and_no_thread(
    ranks: RankServer, job: tuple[JobConfig, Path]
) -> None:
    config, folder = job
    assert load_job(config).model.num_layers == MODEL["num_layers"]
    arguments = {"config": config.to_json(), "folder": str(folder)}
    for counts in ranks.run(f"{RANKS}:moves", 2, arguments, timeout_s=120):
        # A rank serves a store from its first world as the first rank on. A peer may close a connection to it late, so
        # one count may be higher.
        for each in (counts["descriptors"].tolist(), counts["threads"].tolist()):
            assert len(each) == NUM_MOVES == 6
            assert min(each[4:]) <= min(each[2:4])
