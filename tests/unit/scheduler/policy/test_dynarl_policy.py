"""DynaRL's rules against decisions worked out by hand.

The job: 8 GPUs; actor on 0-1, rollout on 2-5 in engines of one GPU, inference on 6-7; 8 sequences in 2 minibatches, 100
tokens each when finished, 50 while not. A decode step takes 10 ms, a rollout's move 2 + 1 s, the trainer's first load
5 s, a reshard 1 s, inference no time; 2 GPUs train 8 tokens/s, 4 GPUs 16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, inf, log
from typing import Any

import numpy as np
import pytest

from services.scheduler.policy.dynarl import DynaRLMemory, DynaRLPolicy, DynaRLRules, split_of
from services.scheduler.policy.situation import Choice, Situation, Split
from services.scheduler.policy.stages import expected_length, remaining_work, slowest_stage_s
from services.scheduler.state.costs import LengthLaw
from services.scheduler.state.layouts import replicas
from services.scheduler.state.observed import CUT, ENDED, QUEUED, Generation, TrainerRate
from services.scheduler.state.remembered import Assignment, Remembered, as_configured
from services.scheduler.state.values import JobSpec, Placed
from tests.unit.scheduler.situations import after, gpus, job, seen
from tidegate.types import Layout

SPEC = job(actor=2, rollout=4, inference=2, prompts=8, minibatches=2)
PAIRS = job(actor=2, rollout=4, inference=2, prompts=8, group_size=2, minibatches=2)
"""8 sequences a minibatch, so that the trainer may have all GPUs."""
SIXES = job(actor=2, rollout=4, inference=2, prompts=12, minibatches=2)
"""6 sequences a minibatch, which 3 copies divide."""
HOME = as_configured(SPEC)
EVERYWHERE = Assignment((*replicas(gpus(2, 6), 1), *replicas(gpus(0, 2), 1), *replicas(gpus(6, 8), 1)), None, ())
MEASURED = (TrainerRate(Layout(dp=2), 8.0), TrainerRate(Layout(dp=4), 16.0))
POLICY = DynaRLPolicy(DynaRLRules())
LOW_SINCE = Remembered(iteration=0, assignment=EVERYWHERE, own=DynaRLMemory(low_since_ms=1000))


def early(*, spec: JobSpec = SPEC, remembered: Remembered = LOW_SINCE, **fields: Any) -> Situation:
    """Half of the sequences are done, the rollout has everything and is nearly empty for 4 s."""
    usual: dict[str, Any] = {"num_unfinished": 4, "measured": MEASURED, "kv_use": 0.1, "now_ms": 5000}
    return seen(spec, EVERYWHERE, **usual | fields, remembered=remembered)


def memory_of(choice: Choice) -> DynaRLMemory:
    assert isinstance(choice.memory, DynaRLMemory)
    return choice.memory


def split(assignment: Assignment) -> tuple[int, int, int]:
    trainer = assignment.trainer.gpus if assignment.trainer else ()
    return len(assignment.engines), len(trainer), len(assignment.inference)


def with_kv(situation: Situation, num_full: int) -> Situation:
    """The first engines hold half of their KV capacity."""
    full = tuple(replace(each, num_kv_tokens=500) for each in situation.engines[:num_full])
    picture = replace(situation.generation, engines=(*full, *situation.engines[num_full:]))
    return replace(situation, generation=picture)


def test_an_iteration_starts_with_every_gpu_in_the_rollout() -> None:
    choice = POLICY.choose(early(remembered=Remembered()))
    assert (choice.assignment, choice.trains) == (EVERYWHERE, False)


@dataclass(frozen=True)
class Donor:
    situation: Situation
    want: tuple[int, int, int]


STAYS = (8, 0, 0)
DONORS = {
    # 800 tokens to train. Keep 2 engines: 4 GPUs, 800 / 16 + 5 = 55 s. Keep 4: 2 GPUs, 800 / 8 + 5 = 105 s. Keep 3:
    # dp 3, of whose copies one has 2 of 4 sequences: 12 / 1.5 tokens/s, 100 + 5. The rollout has 50 tokens left:
    # 0.5 + 3 s.
    "the least rollout is best while training is the slowest": Donor(early(), (2, 4, 2)),
    # 2 slots an engine: 4 run, 2 engines hold them
    "the survivors' slots just hold what runs": Donor(early(max_running=2), (2, 4, 2)),
    # 1 slot an engine: 4 engines are needed
    "the survivors' slots keep two more": Donor(early(max_running=1), (4, 2, 2)),
    # 8 * 0.28 = 2.24 engines of KV, at most 0.8 used: 2.8 needed, so 3. The trainer's dp 3 divides a minibatch's 6
    # sequences, and 3 GPUs train more than the 2 that keeping 4 engines would leave
    "the survivors' KV keeps one more": Donor(early(spec=SIXES, kv_use=0.28), (3, 3, 2)),
    "with less KV of the same job it does not": Donor(early(spec=SIXES), (2, 4, 2)),
    "one second too soon": Donor(early(now_ms=4999), STAYS),
    "KV use of 0.3 is not low": Donor(early(kv_use=0.3), STAYS),
    # 7 of 8 = 87.5 % are more than 80 %; the one full engine stays
    "seven of eight engines are enough": Donor(with_kv(early(), 1), (2, 4, 2)),
    # 6 of 8 = 75 %
    "six of eight are not": Donor(with_kv(early(), 2), STAYS),
    "while a sequence waits nothing is given": Donor(early(num_unsubmitted=1), STAYS),
}


@pytest.mark.parametrize("name", DONORS)
def test_the_rollout_gives_the_best_candidate_that_its_engines_hold(name: str) -> None:
    case = DONORS[name]
    choice = POLICY.choose(case.situation)
    assert split(choice.assignment) == case.want, choice.reason
    assert choice.trains == (case.want != STAYS)
    assert memory_of(choice).pending_engines is None, "the first move waits for nothing"


def test_a_busy_moment_starts_the_count_of_low_seconds_again() -> None:
    busy = POLICY.choose(early(kv_use=0.5, now_ms=3000))
    assert memory_of(busy).low_since_ms is None
    later = POLICY.choose(early(now_ms=6000, remembered=after(busy)))
    assert memory_of(later).low_since_ms == 6000
    assert POLICY.choose(early(now_ms=9999, remembered=after(later))).assignment == EVERYWHERE
    assert POLICY.choose(early(now_ms=10000, remembered=after(later))).assignment != EVERYWHERE


def test_components_get_their_own_gpus_back_and_the_fullest_engines_stay() -> None:
    moved = POLICY.choose(with_kv(early(), 1)).assignment
    # Engines on 2 (full) and 3 stay; inference has its 6-7, the actor its 0-1 and two of the rollout's.
    want = Assignment(replicas(gpus(2, 4), 1), Placed((*gpus(0, 2), *gpus(4, 6)), Layout(dp=4)), gpus(6, 8))
    assert moved == want


LATE = Assignment(replicas(gpus(2, 6), 1), Placed(gpus(0, 2), Layout(dp=2)), gpus(6, 8))


def late(*, num_done: int, is_at_boundary: bool, num_unfinished: int = 2, **fields: Any) -> Situation:
    """The trainer works; 4 engines have been nearly empty for long enough."""
    known: dict[str, Any] = {"is_begun": True, "low_since_ms": 0}
    memory = DynaRLMemory(**known | fields.pop("known", {}))
    return seen(
        fields.pop("spec", PAIRS),
        LATE,
        num_unfinished=num_unfinished,
        num_done=num_done,
        is_at_boundary=is_at_boundary,
        measured=MEASURED,
        now_ms=9000,
        remembered=Remembered(iteration=0, assignment=LATE, own=memory),
        **fields,
    )


def test_a_later_move_waits_for_the_trainers_update() -> None:
    planned = POLICY.choose(late(num_done=0, is_at_boundary=False))
    # 1, 2 or 3 of 4 engines to keep: with 1 the trainer has dp 5, 16 * (5 / 4) ** 0.4 = 17.5 tokens/s but for one copy
    # with 2 of 8 sequences, where 1.6 are a fair share: 14. With 2 it has dp 4 at 16, the most.
    assert (planned.assignment, memory_of(planned).pending_engines) == (LATE, 2)
    done = late(num_done=1, is_at_boundary=True, known={"pending_engines": 1})
    moved = POLICY.choose(done)
    assert split(moved.assignment) == (1, 5, 2)
    assert (memory_of(moved).pending_engines, memory_of(moved).num_answered) == (None, 1)


def test_the_gpus_of_an_ended_rollout_go_to_the_trainer_after_its_minibatch() -> None:
    waits = POLICY.choose(late(num_done=0, is_at_boundary=False, num_unfinished=0, are_inferred=False))
    assert (waits.assignment, memory_of(waits).pending_engines) == (LATE, 0)
    moved = POLICY.choose(late(num_done=1, is_at_boundary=True, num_unfinished=0, are_inferred=False))
    assert split(moved.assignment) == (0, 6, 2)
    inferred = POLICY.choose(late(num_done=1, is_at_boundary=True, num_unfinished=0))
    assert split(inferred.assignment) == (0, 8, 0)


def test_the_trainer_has_no_more_copies_than_a_minibatch_has_sequences() -> None:
    # 4 sequences a minibatch: dp 4; the 2 GPUs that no copy has are inference's.
    moved = POLICY.choose(late(spec=SPEC, num_done=1, is_at_boundary=True, num_unfinished=0, are_inferred=False))
    assert split(moved.assignment) == (0, 4, 4)


def test_a_trainer_gets_only_copies_that_divide_its_shards_and_is_not_suspended() -> None:
    """A person has it train as three copies of a job of four logical shards; three engines stay."""
    spec = replace(PAIRS, num_logical_shards=4)
    three = Assignment(replicas(gpus(3, 6), 1), Placed(gpus(0, 3), Layout(dp=3)), gpus(6, 8))
    remembered = Remembered(iteration=0, assignment=three, own=DynaRLMemory(is_begun=True, pending_engines=3))
    moved = POLICY.choose(seen(spec, three, num_unfinished=2, num_done=1, remembered=remembered))
    assert moved.assignment == replace(three, trainer=Placed(gpus(0, 2), Layout(dp=2)))
    assert moved.trains


def test_one_boundary_between_minibatches_has_one_move() -> None:
    used = {"num_answered": 1, "pending_engines": 1}
    choice = POLICY.choose(late(num_done=1, is_at_boundary=True, known=used))
    assert (choice.assignment, memory_of(choice).pending_engines) == (LATE, 1)


def test_nothing_is_planned_while_gpus_are_on_their_way() -> None:
    fewer = replace(EVERYWHERE, engines=EVERYWHERE.engines[:-1])
    situation = seen(
        SPEC, fewer, num_unfinished=4, measured=MEASURED, now_ms=5000, moving=gpus(7, 8), remembered=LOW_SINCE
    )
    choice = POLICY.choose(situation)
    assert (choice.assignment, choice.memory) == (EVERYWHERE, LOW_SINCE.own)


def test_after_the_last_minibatch_everything_is_where_it_is_placed() -> None:
    done = late(num_done=2, is_at_boundary=True, num_unfinished=0, num_taken=8)
    assert POLICY.choose(done).assignment == HOME


@pytest.mark.parametrize(("priority", "want"), [(True, (5, 7, 4, 6)), (False, ())])
def test_with_request_priority_the_longest_prompts_go_first(priority: bool, want: tuple[int, ...]) -> None:
    # Of prompts 4-7 none is submitted; 6 and 4 have hints of 10 and 30, 5 of 90, 7 none: the mean of 10, 30, 90 = 43.
    situation = early(num_unsubmitted=4)
    hinted = replace(situation.generation, hints=(0.0, 0.0, 0.0, 0.0, 30.0, 90.0, 10.0, 0.0))
    choice: Choice = DynaRLPolicy(DynaRLRules(request_priority=priority)).choose(replace(situation, generation=hinted))
    assert choice.group_order == want


def test_gpus_that_make_no_copy_of_the_trainer_go_to_inference_or_stay_in_engines() -> None:
    spec = job(actor=4, rollout=4, inference=1, actor_tp=4, prompts=8, minibatches=2)
    everywhere = Assignment(replicas(gpus(0, 9), 1), None, ())
    situation = seen(spec, everywhere, num_unfinished=4)
    # 9 - 2 engines - 1 = 6: dp 1, and 2 more for inference
    assert split_of(situation, 2) == Split(num_engines=2, num_trainer_gpus=4, num_inference_gpus=3)
    done = seen(spec, everywhere)
    # 9 - 0 - 0: dp 2, one GPU makes no copy of 4
    assert split_of(done, 0) == Split(num_engines=0, num_trainer_gpus=8, num_inference_gpus=0)


def test_an_unfinished_sequence_is_expected_to_end_like_those_that_were_longer() -> None:
    # At 10: 1 of 4 ends, survival 3/4. At 20 one is cut off, unfinished. At 30: 1 of 2 ends, then 50: 3/8 each.
    picture = Generation((), 2, lengths=(10, 20, 30, 50), places=(ENDED, QUEUED, ENDED, CUT), queue=(1,))
    expected = expected_length(picture)(np.array([0.0, 20.0, 30.0, 100.0]))
    assert expected == pytest.approx([10 / 4 + (30 + 50) * 3 / 8, 40.0, 50.0, 110.0])


def test_with_nothing_finished_every_sequence_is_expected_to_end_a_tenth_later() -> None:
    picture = Generation((), 2, lengths=(10, 20), places=(QUEUED, QUEUED), queue=(0, 1))
    assert expected_length(picture)(picture.length_of.astype(float)) == pytest.approx([11.0, 22.0])


def test_the_fixed_seconds_of_an_update_count_for_each_minibatch_that_is_not_begun() -> None:
    situation = early()
    slow = replace(situation, costs=replace(situation.costs, update_s=20.0))
    left = remaining_work(slow, uses_hints=False)
    assert left.num_updates == 2
    assert slowest_stage_s(slow, left, Split(2, 4, 2)) == pytest.approx(800 / 16 + 2 * 20 + 5)
    begun = remaining_work(late(num_done=1, is_at_boundary=False), uses_hints=False)
    assert begun.num_updates == 0


def test_groups_that_are_ready_or_taken_are_not_inferred_or_trained_again() -> None:
    # 6 finished sequences of 100, 4 of them in 2 groups that are ready, 1 taken; 10 unfinished ones to end at 100
    situation = seen(PAIRS, EVERYWHERE, num_unfinished=10, ready=(2, 0), num_taken=1)
    left = remaining_work(situation, uses_hints=False)
    assert [left.to_infer_tokens, left.to_train_tokens] == pytest.approx([1200.0, 1400.0])


def test_with_hints_a_sequence_is_expected_to_end_where_its_prompts_posterior_says() -> None:
    situation = early()
    hinted = replace(situation.generation, hints=(500.0,) * 5 + (0.0, 80.0, 120.0))
    # no spread within a group and exact hints: a prompt's length is its hint, or where it has none what the law has
    # left above 50: its mean in the logarithm, by the normal hazard at log(50 / 90)
    law = LengthLaw(log_mean=log(90), sigma_prompt=1.0, sigma_group=0.001, sigma_hint=0.001)
    with_hints = replace(situation, generation=hinted, lengths=law)
    # prompts 0-3 ended at 100, 4-7 are unfinished at 50
    want = 400 + 500 + 90 * exp(0.4651) + 80 + 120
    assert remaining_work(with_hints, uses_hints=True).to_train_tokens == pytest.approx(want, rel=0.02)
    assert remaining_work(with_hints, uses_hints=True).longest_left_tokens == pytest.approx(450, rel=0.01)
    assert remaining_work(with_hints, uses_hints=False).to_train_tokens == 800.0


def test_the_slowest_stage_counts_and_one_without_gpus_never_ends() -> None:
    situation = early()
    left = remaining_work(situation, uses_hints=False)
    assert (left.longest_left_tokens, left.to_infer_tokens, left.to_train_tokens) == (50.0, 400.0, 800.0)
    assert slowest_stage_s(situation, left, Split(2, 4, 2)) == pytest.approx(800 / 16 + 5)
    slow_trainer_out = replace(left, to_train_tokens=8.0)
    assert slowest_stage_s(situation, slow_trainer_out, Split(4, 4, 2)) == pytest.approx(8 / 16 + 5)
    assert slowest_stage_s(situation, replace(left, to_train_tokens=0.0), Split(4, 0, 2)) == pytest.approx(3.5)
    assert slowest_stage_s(situation, left, Split(0, 4, 2)) == inf
    assert slowest_stage_s(situation, left, Split(4, 0, 2)) == inf
    assert slowest_stage_s(situation, left, Split(4, 4, 0)) == inf


@pytest.mark.parametrize(
    ("rules", "want"),
    [
        ({"released_shares": (0.5,)}, "3 to 10 candidates, 2 are named"),
        ({"released_shares": (0.5,) * 10}, "3 to 10 candidates, 11 are named"),
        ({"low_kv_use": 0.0}, "low_kv_use=0.0 is a share"),
        ({"released_shares": (0.5, 1.5)}, "released_shares=1.5 is a share"),
    ],
)
def test_rules_outside_the_published_bounds_are_refused(rules: dict[str, Any], want: str) -> None:
    with pytest.raises(ValueError, match=want):
        DynaRLRules(**rules)
