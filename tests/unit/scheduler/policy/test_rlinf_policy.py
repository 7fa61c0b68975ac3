"""RLinf's rules against decisions worked out by hand.

The job: 64 GPUs; actor on 0-15 (tp 4, so dp 4), rollout on 16-55 (20 engines of 2), inference on 56-63; 512 prompts of
16 sequences in 4 minibatches, so 128 prompts each: legal dp are 1, 2, 4, 8, 16. At most 128 sequences run in an engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from services.scheduler.policy.rlinf import RLinfMemory, RLinfPolicy, RLinfRules, valid_dp
from services.scheduler.state.layouts import Replica, replicas
from services.scheduler.state.remembered import Assignment, Remembered, as_configured
from services.scheduler.state.values import JobSpec, Placed
from tests.unit.scheduler.situations import after, gpus, job, seen
from tidegate.types import Layout

SPEC = job(actor=16, rollout=40, inference=8, actor_tp=4, rollout_tp=2, prompts=512, group_size=16, minibatches=4)
HOME = as_configured(SPEC)
INFERENCE = gpus(56, 64)


def policy(*, pre: bool = False, wait: bool = False, max_running: int = 128) -> RLinfPolicy:
    rules = RLinfRules(
        max_running_requests=max_running,
        auto_scheduler=True,
        use_pre_process_policy=pre,
        use_wait_before_last_iter_policy=wait,
    )
    return RLinfPolicy(rules)


def actor(*parts: tuple[int, int]) -> Placed:
    held = tuple(gpu for start, end in parts for gpu in gpus(start, end))
    return Placed(held, Layout(tp=4, dp=len(held) // 4))


def engines(first: int) -> tuple[Replica, ...]:
    return replicas(gpus(first, 56), 2)


@dataclass(frozen=True)
class Case:
    """After minibatch `done`, with so many sequences unfinished, from where to where; `holds`: the actor stays
    blocked."""

    done: int
    unfinished: int
    before: Assignment
    want: Assignment
    wait: bool = False
    holds: bool = False
    are_inferred: bool = True


DP4 = HOME
DP8 = Assignment(engines(32), actor((0, 32)), INFERENCE)
ROLLOUT_GONE = Assignment((), actor((0, 32)), INFERENCE)

CASES = {
    # 2000 / 128 -> 16 engines needed, 4 to spare = 8 GPUs; dp 8 needs (8 - 4) * 4 = 16
    "8 GPUs to spare make no legal step": Case(1, 2000, DP4, DP4),
    # 1536 / 128 = 12 needed, 8 to spare = 16 GPUs: exactly dp 8
    "16 GPUs to spare are dp 8": Case(1, 1536, DP4, DP8),
    # 1537 / 128 -> 13 needed, 7 to spare = 14 GPUs
    "one sequence more keeps an engine and so all": Case(1, 1537, DP4, DP4),
    # 1 / 128 -> 1 needed, 19 to spare = 38 GPUs; dp 16 needs 48, so dp 8: 8 engines go, 12 stay for one sequence
    "38 GPUs to spare are dp 8 still": Case(1, 1, DP4, DP8),
    # 12 engines, 1 needed: 22 GPUs; dp 16 needs (16 - 8) * 4 = 32
    "22 GPUs are too few for dp 16": Case(2, 1, DP8, DP8),
    # 5000 / 128 -> 40 needed of 20: none to spare
    "more backlog than engines keeps all": Case(1, 5000, DP4, DP4),
    # all 12 engines go: 24 GPUs; inference is not done and keeps 8; dp 16 needs 32
    "a rollout that is done leaves 24 GPUs to nobody": Case(2, 0, DP8, ROLLOUT_GONE, are_inferred=False),
    # the 24 ownerless and inference's 8 are 32
    "what lay idle is used once inference gives its own": Case(3, 0, ROLLOUT_GONE, Assignment((), actor((0, 64)), ())),
    # 40 + 8 = 48 GPUs = (16 - 4) * 4
    "all at once when all is done": Case(1, 0, DP4, Assignment((), actor((0, 64)), ())),
    # 40 GPUs: dp 8 takes 16, 24 are left over
    "without inference's GPUs the rollout's 40 are dp 8": Case(1, 0, DP4, ROLLOUT_GONE, are_inferred=False),
    "one engine that still works stays": Case(
        2,
        3,
        Assignment(engines(54), actor((0, 32)), INFERENCE),
        Assignment(engines(54), actor((0, 32)), INFERENCE),
    ),
    # 38 GPUs lie idle: dp 8 takes 16 of them, dp 16 would need (16 - 4) * 4 = 48
    "free GPUs of before count, and engines give none": Case(
        2,
        3,
        Assignment(engines(54), actor((0, 16)), INFERENCE),
        Assignment(engines(54), actor((0, 32)), INFERENCE),
    ),
    "before the last minibatch the actor waits for the rollout": Case(3, 7, DP8, DP8, wait=True, holds=True),
    # the rollout's rule without the wait: 7 / 128 -> 1, 11 to spare = 22 GPUs < 32
    "without the wait policy it does not": Case(3, 7, DP8, DP8),
    "with the wait policy an earlier minibatch does not wait": Case(1, 1536, DP4, DP8, wait=True),
    "before the last minibatch the actor waits for inference too": Case(
        3, 0, DP8, Assignment((), actor((0, 32)), INFERENCE), wait=True, holds=True, are_inferred=False
    ),
    "with the wait policy inference is waited for once no engine is left": Case(
        1, 0, DP4, Assignment((), actor((0, 16)), INFERENCE), wait=True, holds=True, are_inferred=False
    ),
    # 24 + 8 = 32 = (16 - 8) * 4
    "when both are done the last minibatch has all": Case(3, 0, DP8, Assignment((), actor((0, 64)), ()), wait=True),
    "after the last minibatch everything is where it is placed": Case(4, 0, Assignment((), actor((0, 64)), ()), HOME),
}


def begun(assignment: Assignment, *, num_answered: int = 0) -> Remembered:
    return Remembered(iteration=0, assignment=assignment, own=RLinfMemory(is_begun=True, num_answered=num_answered))


@pytest.mark.parametrize("name", CASES)
def test_after_a_minibatch_gpus_go_by_the_rules_of_rlinf(name: str) -> None:
    case = CASES[name]
    before = begun(case.before, num_answered=case.done - 1)
    situation = seen(
        SPEC,
        case.before,
        num_unfinished=case.unfinished,
        num_done=case.done,
        are_inferred=case.are_inferred,
        remembered=before,
    )
    choice = policy(wait=case.wait).choose(situation)
    assert (choice.assignment, choice.trains) == (case.want, not case.holds), choice.reason
    assert choice.memory == RLinfMemory(is_begun=True, num_answered=case.done - case.holds)


def test_inference_gives_all_of_its_gpus_or_none() -> None:
    given = set()
    for case in CASES.values():
        situation = seen(
            SPEC,
            case.before,
            num_unfinished=case.unfinished,
            num_done=case.done,
            are_inferred=case.are_inferred,
            remembered=begun(case.before, num_answered=case.done - 1),
        )
        given.add(policy(wait=case.wait).choose(situation).assignment.inference)
    assert given == {INFERENCE, ()}


def opened(spec: JobSpec, *, unfinished: int, unsubmitted: int = 0, pre: bool = True) -> tuple[Assignment, bool]:
    """Where everything is to be, and whether the actor may go."""
    lent = Assignment((*replicas(gpus(0, 16), 2), *HOME.engines), None, INFERENCE)
    situation = seen(
        spec, lent, num_unfinished=unfinished, num_unsubmitted=unsubmitted, remembered=Remembered(), max_running=4096
    )
    choice = policy(pre=pre).choose(situation)
    return choice.assignment, choice.trains


def test_the_actors_gpus_generate_until_half_of_the_sequences_are_done() -> None:
    lent = Assignment((*replicas(gpus(0, 16), 2), *HOME.engines), None, INFERENCE)
    assert opened(SPEC, unfinished=4097) == (lent, False)
    assert opened(SPEC, unfinished=4096) == (HOME, True)
    assert opened(SPEC, unfinished=4096, unsubmitted=1) == (lent, False)


def test_a_threshold_takes_the_place_of_the_half() -> None:
    rules = RLinfRules(max_running_requests=128, auto_scheduler=True, use_pre_process_policy=True)
    tuned = RLinfPolicy(replace(rules, preprocess_threshold=300))
    lent = Assignment((*replicas(gpus(0, 16), 2), *HOME.engines), None, INFERENCE)
    for running, want in ((301, False), (300, True)):
        situation = seen(SPEC, lent, num_unfinished=running, remembered=Remembered(), max_running=4096)
        assert tuned.choose(situation).trains is want


@pytest.mark.parametrize("name", ["max_running_requests", "preprocess_threshold"])
def test_a_rule_of_less_than_one_sequence_is_refused(name: str) -> None:
    rules = RLinfRules(max_running_requests=1)
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        replace(rules, **{name: 0})  # type: ignore[arg-type]  # the names are those of numbers


def test_without_the_pre_process_policy_the_actor_trains_at_once() -> None:
    assert opened(SPEC, unfinished=8192, unsubmitted=8192, pre=False) == (HOME, True)


def test_an_engine_goes_whole_for_half_of_its_gpus_and_the_rest_is_stranded() -> None:
    # 3 prompts a minibatch: legal dp 1 and 3. 2 engines of 4, 1 needed: 4 GPUs to spare, dp 3 takes 2 of them.
    spec = job(actor=1, rollout=8, inference=1, rollout_tp=4, prompts=9, minibatches=3)
    home = as_configured(spec)
    before = begun(home)
    choice = policy().choose(seen(spec, home, num_unfinished=2, num_done=1, remembered=before))
    assert choice.assignment == Assignment((gpus(5, 9),), Placed(gpus(0, 3), Layout(dp=3)), gpus(9, 10))


def test_between_two_minibatches_nothing_moves_whatever_is_idle() -> None:
    answered = begun(DP8, num_answered=1)
    choice = policy().choose(seen(SPEC, DP8, num_done=1, is_at_boundary=False, remembered=answered))
    assert (choice.assignment, choice.memory) == (DP8, answered.own)


def test_the_actor_is_blocked_while_the_minibatch_is_open_and_until_it_is_answered() -> None:
    answered = begun(DP8, num_answered=1)
    opened = policy().choose(seen(SPEC, DP8, num_done=1, is_at_boundary=False, remembered=answered))
    before = policy().choose(seen(SPEC, DP8, num_done=1, remembered=answered))
    assert (opened.trains, before.trains) == (False, True)


def test_a_minibatch_is_answered_once_however_often_it_is_asked() -> None:
    before = begun(DP4)
    situation = seen(SPEC, DP4, num_unfinished=1536, num_done=1, remembered=before)
    first = policy().choose(situation)
    again = policy().choose(seen(SPEC, DP8, num_unfinished=0, num_done=1, remembered=after(first)))
    assert (again.assignment, again.memory) == (DP8, first.memory)


def test_while_gpus_are_on_their_way_the_actor_stays_blocked() -> None:
    before = begun(DP4)
    moved = Assignment(engines(18), DP4.trainer, INFERENCE)
    situation = seen(SPEC, moved, num_unfinished=1, num_done=1, moving=gpus(16, 18), remembered=before)
    choice = policy().choose(situation)
    assert (choice.assignment, choice.trains, choice.memory) == (DP4, False, before.own)


def test_a_lost_gpu_is_not_given_away() -> None:
    before = begun(DP4)
    situation = seen(SPEC, replace(DP4, engines=engines(24)), num_done=1, remembered=before)
    # 16 engines leave 32 GPUs and inference 8; with the 8 that are lost it would be dp 16, without dp 8
    lost = replace(situation, free=())
    assert policy().choose(lost).assignment.trainer == actor((0, 16), (24, 40))


def test_a_component_whose_last_gpu_died_gets_back_what_it_was_assigned() -> None:
    remembered = begun(HOME)
    dead = Assignment((), HOME.trainer, ())
    situation = seen(
        SPEC, dead, num_unfinished=7, num_unsubmitted=7, num_done=1, are_inferred=False, remembered=remembered
    )
    choice = policy().choose(situation)
    assert (choice.assignment.engines, choice.assignment.inference) == (HOME.engines, HOME.inference)


def test_without_auto_scheduler_everything_stays_where_it_is_placed() -> None:
    situation = seen(SPEC, HOME, num_done=2)
    choice = RLinfPolicy(RLinfRules(max_running_requests=128)).choose(situation)
    assert (choice.assignment, choice.trains) == (HOME, True)


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        (SPEC, (1, 2, 4, 8, 16)),
        (job(actor=2, rollout=3, inference=1, prompts=24, minibatches=2), (1, 2, 3, 4, 6)),
        (job(actor=2, rollout=3, inference=1, actor_tp=2, prompts=24, minibatches=2), (1, 2, 3)),
        (job(actor=2, rollout=3, inference=1, prompts=10, minibatches=2), (1, 5)),
        (replace(job(actor=2, rollout=3, inference=1, prompts=24, minibatches=2), num_logical_shards=4), (1, 2, 4)),
        (replace(job(actor=2, rollout=3, inference=1, prompts=24, minibatches=2), fewest_actor_copies=3), (3, 4, 6)),
    ],
    ids=[
        "128 prompts, 64/4",
        "12 prompts, 6/1",
        "12 prompts, 6/2",
        "5 prompts, 6/1",
        "4 logical shards",
        "3 have room",
    ],
)
def test_legal_dp_divides_the_prompts_of_a_minibatch(spec: JobSpec, want: tuple[int, ...]) -> None:
    assert valid_dp(spec) == want


def test_what_rlinf_could_not_start_is_refused_with_the_legal_dp() -> None:
    stranded = job(actor=48, rollout=8, inference=8, actor_tp=2, prompts=512, minibatches=4)
    with pytest.raises(
        ValueError, match=r"dp=24 does not divide 128 prompts a minibatch; legal dp: 1, 2, 4, 8, 16, 32"
    ):
        policy().check(stranded)
    odd = job(actor=2, rollout=6, inference=1, rollout_tp=3, prompts=8, minibatches=2)
    with pytest.raises(ValueError, match="lends the actor's 2 GPUs to engines of 3"):
        policy(pre=True).check(odd)
    policy().check(odd)
    policy(pre=True).check(SPEC)
