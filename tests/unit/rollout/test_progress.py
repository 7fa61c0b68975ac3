"""The rollout's picture holds each sequence once, and the scheduler accepts every picture."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engine import RequestId
from services.rollout.groups import GroupsInProgress
from services.rollout.progress import EngineProgress, IterationProgress
from services.rollout.sglang.estimates import SentRequest, estimated_lengths
from services.scheduler.shell.codecs.observed_codec import generation_of
from services.scheduler.state.observed import AWAY, CUT, ENDED, QUEUED
from tidegate.candidates import Candidates
from tidegate.codec import encode_sample_id
from tidegate.types import GpuId, SampleId
from tidegate.v1 import workers_pb2 as wire

FIRST, GROUP = 10, 2
GPUS = (GpuId("n0/0"), GpuId("n0/1"), GpuId("n1/0"))


def sample(index: int) -> SampleId:
    return SampleId(1, 3, FIRST + index // GROUP, index % GROUP)


def load(lengths: dict[int, int], *, waiting: int = 0, used: int = 0, capacity: int = 100) -> wire.EngineLoad:
    return wire.EngineLoad(
        num_running=len(lengths) - waiting,
        num_waiting=waiting,
        num_used_tokens=used,
        num_capacity_tokens=capacity,
        samples=[encode_sample_id(sample(index)) for index in lengths],
        num_tokens=list(lengths.values()),
    )


def test_a_sequence_is_on_its_engine_queued_ended_cut_or_away() -> None:
    progress = IterationProgress(FIRST, GROUP, max_running=8, hints={FIRST: 30.0})
    progress.end(sample(0), 7, is_cut=False)
    progress.end(sample(1), 9, is_cut=True)
    first, second = EngineProgress(held={sample(2), sample(3)}), EngineProgress()
    first.see(load({2: 4, 3: 5}, used=30), now_s=0.0)
    second.see(load({}), now_s=0.0)

    picture = generation_of(
        progress.picture(
            range(FIRST, FIRST + 4), [(GPUS[0], first), (GPUS[1], second)], [sample(6), sample(4)], {FIRST}
        )
    )

    assert picture.places == (ENDED, CUT, 0, 0, QUEUED, AWAY, QUEUED, AWAY)
    assert picture.lengths == (7, 9, 4, 5, 0, 0, 0, 0)
    assert picture.queue == (6, 4)
    assert picture.hints == (30.0, 0.0, 0.0, 0.0)
    assert [engine.gpus for engine in picture.engines] == [(GPUS[0],), (GPUS[1],)]
    assert (picture.engines[0].num_running, picture.engines[0].num_kv_tokens) == (2, 30)


def test_a_group_that_an_earlier_lead_published_counts_with_the_mean_length_that_this_lead_saw() -> None:
    progress = IterationProgress(FIRST, GROUP, max_running=8)
    progress.end(sample(2), 10, is_cut=False)
    progress.end(sample(3), 21, is_cut=False)

    picture = generation_of(progress.picture(range(FIRST, FIRST + 2), [], [], {FIRST, FIRST + 1}))

    assert (picture.places, picture.lengths) == ((ENDED,) * 4, (16, 16, 10, 21))


def test_an_engine_without_a_look_is_not_in_the_picture_and_its_sequences_are_away() -> None:
    picture = generation_of(
        IterationProgress(FIRST, GROUP, max_running=8).picture(
            range(FIRST, FIRST + 1), [(GPUS[0], EngineProgress(held={sample(0)}))], [sample(1)], set()
        )
    )
    assert (picture.engines, picture.places) == ((), (AWAY, QUEUED))


def test_an_engines_rate_is_that_of_its_present_sequences_at_the_speed_of_those_that_ran_the_whole_time() -> None:
    engine = EngineProgress(held={sample(index) for index in range(4)})
    engine.see(load({0: 10, 1: 10, 2: 0}), now_s=100.0)
    assert engine.rate_tokens_per_s == 0.0

    engine.end(sample(0), 40)
    engine.see(load({1: 30, 2: 0, 3: 4}, waiting=1), now_s=102.0)

    assert engine.rate_tokens_per_s == 2 * 20 / 2


def test_where_no_sequence_ran_the_whole_time_an_engines_rate_counts_the_tokens_that_it_made() -> None:
    engine = EngineProgress(held={sample(0), sample(1)})
    engine.see(load({0: 10}), now_s=100.0)
    engine.end(sample(0), 40)
    engine.see(load({1: 30}), now_s=102.0)

    assert engine.rate_tokens_per_s == (40 + 30 - 10) / 2


def test_the_time_between_two_iterations_counts_for_no_rate() -> None:
    engine = EngineProgress(held={sample(0)})
    engine.see(load({0: 10}), now_s=0.0)
    engine.end(sample(0), 50)
    engine.see(load({}), now_s=1.0)
    engine.begin()
    engine.held.add(sample(1))
    engine.see(load({1: 1}), now_s=500.0)
    assert engine.rate_tokens_per_s == 0.0

    engine.see(load({1: 21}), now_s=501.0)
    assert engine.rate_tokens_per_s == 20.0


def test_sequences_beyond_max_running_wait_and_an_old_look_counts_no_more_than_the_engine_holds() -> None:
    engine = EngineProgress(held={sample(index) for index in range(6)})
    engine.see(load(dict.fromkeys(range(6), 1), waiting=1), now_s=0.0)
    message = engine.message(GPUS[0], max_running=4)
    assert (message.num_running, message.num_waiting) == (4, 2)

    engine.num_waiting = 5
    engine.held = {sample(0)}
    message = engine.message(GPUS[0], max_running=4)
    assert (message.num_running, message.num_waiting) == (0, 1)


steps = st.lists(st.tuples(st.sampled_from(["give", "end", "abort", "lose", "look", "add"]), st.integers(0, 9)))


@settings(max_examples=200, deadline=None)
@given(steps, st.integers(1, 3))
def test_whatever_engines_do_every_picture_is_whole(actions: list[tuple[str, int]], max_running: int) -> None:
    candidates = Candidates(FIRST, 3, max_extra_prompts=2)
    groups: GroupsInProgress[int] = GroupsInProgress(1, 3, tuple(candidates.prompts), GROUP)
    progress = IterationProgress(FIRST, GROUP, max_running)
    engines = [(gpu, EngineProgress()) for gpu in GPUS]
    for action, number in actions:
        gpu, engine = engines[number % len(engines)]
        held = sorted(engine.held)
        match action:
            case "give":
                engine.held.update(groups.take(number))
            case "end" if held:
                ended = held[number % len(held)]
                engine.end(ended, number)
                progress.end(ended, number, is_cut=number % 2 == 0)
                if groups.add(ended, number) is not None:
                    known = candidates.prompts
                    candidates.add(ended.prompt, has_spread=number > 4)
                    groups.extend(range(known.stop, candidates.prompts.stop))
            case "abort" if held:
                engine.end(held[0], number)
                groups.give_back(held[:1])
            case "lose":
                groups.give_back(held)
                engines[number % len(engines)] = (gpu, EngineProgress())
            case "look":
                indices = [(each.prompt - FIRST) * GROUP + each.draw for each in held]
                engine.see(load(dict.fromkeys(indices, number), waiting=min(number, len(held))), now_s=float(number))
            case _:
                pass

        picture = generation_of(progress.picture(candidates.prompts, engines, groups.waiting, candidates.seen))
        assert picture.num_groups == len(candidates.prompts)
        assert picture.num_unfinished == groups.num_waiting + sum(len(each.held) for _, each in engines)


CUT_SOON, WENT_ON = RequestId("cut soon"), RequestId("went on")


def sent(name: str, *, prompt: int = 10, partial: int = 0, longest: int = 1000, age_s: float = 1.0) -> SentRequest:
    return SentRequest(RequestId(name), prompt, partial, longest, age_s)


def test_the_tokens_in_a_servers_cache_are_shared_among_running_requests_by_their_age() -> None:
    inside = [sent("new", age_s=1.0), sent("old", age_s=3.0), sent("waits", age_s=0.5)]

    assert estimated_lengths(inside, num_running=2, num_used_tokens=20 + 80) == {"new": 20, "old": 60, "waits": 0}


def test_an_estimated_length_is_below_the_limit_and_not_below_the_partial() -> None:
    inside = [sent(CUT_SOON, longest=50, age_s=9.0), sent(WENT_ON, partial=30, age_s=1.0)]

    assert estimated_lengths(inside, num_running=2, num_used_tokens=2000)[CUT_SOON] == 49
    assert estimated_lengths(inside, num_running=2, num_used_tokens=0) == {CUT_SOON: 0, WENT_ON: 30}
    assert estimated_lengths([sent("sent now", age_s=0.0)], num_running=1, num_used_tokens=90) == {"sent now": 0}
