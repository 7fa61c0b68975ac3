"""What happens next to the jobs of a cluster: who is placed where, who is stopped, who has ended. Pure.

The queue goes by priority, then by age. Its head waits for its GPUs, and nobody passes it: a large job would wait for
ever behind small ones. A cluster may come back with other nodes. A job that has no room in all of it waits for a larger
one, and others pass it.

A job whose start was interrupted, and that nobody cancelled, goes back to its place in the queue and then goes on from
its checkpoint: at once after the first interruption, later each time after further ones. After `MAX_INTERRUPTIONS` in a
row it ends interrupted; a start that has brought it further ends the row. The end of an agent, as by `tidegate down`,
is none.

On each of its nodes a job needs host memory too. The ledger of a machine is what its jobs need of it, and a job waits
for room there as for GPUs.

A node may be drained: it gets no job. What runs on it is interrupted, which does not count, and goes on where there is
room; or it stays until it ends. A node whose machine is away for long gets no job either, and all leave it. While the
queue is paused no job starts.

Read the records first, and then what the agents tell: a record that says `running` was written after its agent had
told so.

Invariants:
- No GPU has two jobs. [test_queue: no_gpu_has_two_jobs]
- Jobs of a machine need no more host memory than it has. [test_queue: no_gpu_has_two_jobs]
- Nobody passes a job for which the cluster has room. [test_queue: nobody_passes_the_head]
  [test_queue: waits_for_a_larger_one]
- A job that is interrupted at once is started later each time. [test_queue: started_later_each_time]
- A job keeps its GPUs until no process of it lives. [test_queue: keeps_its_gpus_until]
- A drained node gets no job. Those on it leave, or stay where that is asked for. [test_queue: drained_node_gets_no_job]
  [test_queue: stays_until_it_ends]
- While the queue is paused no job starts, and those that run go on. [test_queue: paused]
- Nor does one whose machine is away for long. [test_queue: job_whose_machine_is_away_for_long_goes_on]
- A start that has not begun is repeated as it was asked for. [test_queue: has_not_begun]
- An ended job stays as it is, and what still runs of it is stopped. [test_queue: an_ended_job_stays]
- What an ended job has in NATS and Redis goes, once no process of it lives. [test_queue: is_cleared_once]
- Deciding again on the result changes nothing. [test_queue: deciding_again_changes_nothing]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidegate.cluster.placement import HostMemory, Room, memory_told, placed_gpus
from tidegate.cluster.submissions import Submission, SubmissionState, Treatment
from tidegate.launcher.outcome import End
from tidegate.short_lists import counted
from tidegate.sizes import host_memory_text
from tidegate.types import Drain, GpuId, JobId, NodeId, node_of

KEPT = 256
"""The records of ended jobs that stay, beside those that the agent knows still. The folders of the jobs have the rest.
"""
MAX_INTERRUPTIONS = 5
"""A job that ends its launcher again and again would repeat its last iteration for ever."""
LONGEST_WAIT_MS = 1000 * 2 ** (MAX_INTERRUPTIONS - 2)


@dataclass(frozen=True, slots=True)
class Ran:
    """The last start of a job, as its agent tells. `end` is None while a process of it lives. `has_begun`: it may have
    changed the job's folder. `iteration`: where its checkpoints would let it go on."""

    start: int
    end: End | None = None
    message: str = ""
    has_begun: bool = True
    iteration: int = 0


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is there.

    - `nodes`: slots by node.
    - `memory`: the host memory of machines, as far as they have told it.
    - `free`: GPUs that nobody has in the ownership map.
    - `ran`: the last start of each job.
    - `drained`: nodes that get no jobs, with what theirs do.
    - `lost`: those whose machines are away for long.
    - `now_unix_ms`: by the store's clock.
    - `is_paused`: no job starts.
    """

    nodes: Mapping[NodeId, int]
    free: Collection[GpuId]
    ran: Mapping[JobId, Ran]
    drained: Mapping[NodeId, Drain] = field(default_factory=dict)
    lost: Collection[NodeId] = ()
    memory: tuple[HostMemory, ...] = ()
    now_unix_ms: int = 0
    is_paused: bool = False

    def leaves_for(self, submission: Submission) -> str:
        """Why the job cannot stay on its GPUs. Empty: it can."""
        nodes = sorted({node_of(gpu) for gpu in submission.gpus})
        if drained := [node for node in nodes if self.drained.get(node) is Drain.LEAVE]:
            return f"its node {drained[0]} was drained"
        if lost := [node for node in nodes if node in self.lost]:
            return f"the machine of its node {lost[0]} is away"
        return ""


@dataclass(frozen=True, slots=True)
class Step:
    """What to do. `changed`: records to write first. `clears`: jobs that ended and of which no process lives, whose
    data in NATS and Redis can go. `dropped`: records of the oldest ended jobs beyond `KEPT`. A job that the agent knows
    keeps its record: with a new one its starts would have the numbers of those before.

    The others are asked of the agents, again until they have told of the result: jobs to start, jobs to end for good,
    and starts that should not run any more."""

    changed: tuple[Submission, ...] = ()
    clears: tuple[Submission, ...] = ()
    dropped: tuple[JobId, ...] = ()
    starts: tuple[Submission, ...] = ()
    cancels: tuple[Submission, ...] = ()
    stops: tuple[JobId, ...] = ()


def next_step(submissions: Iterable[Submission], cluster: Cluster) -> Step:
    before = list(submissions)
    followed = [_followed(each, cluster) for each in before]
    after = _placed(followed, cluster)
    by_job = {each.job: each for each in after}
    starts = [each for each in after if each.state is SubmissionState.PLACED]
    alive = [job for job, ran in cluster.ran.items() if ran.end is None]
    cancelled = [by_job[job] for job in alive if job in by_job and by_job[job].is_cancelled]
    ended = [each for each in after if each.state is SubmissionState.ENDED]
    forgotten = [each for each in ended if each.is_cleared and each.job not in cluster.ran]
    oldest = sorted(forgotten, key=lambda each: each.submitted_unix_ms)
    return Step(
        clears=tuple(each for each in ended if not each.is_cleared and each.job not in alive),
        dropped=tuple(each.job for each in oldest[: max(0, len(oldest) - KEPT)]),
        changed=tuple(new for old, new in zip(before, after, strict=True) if new != old),
        starts=tuple(starts),
        cancels=tuple(cancelled),
        stops=tuple(job for job in alive if not _may_run(by_job.get(job), cluster, job)),
    )


def _may_run(submission: Submission | None, cluster: Cluster, job: JobId) -> bool:
    if submission is None or not submission.is_placed or submission.leaves:
        return False
    return submission.starts == cluster.ran[job].start


def _followed(each: Submission, cluster: Cluster) -> Submission:
    """The record, after what became of the job's last start."""
    ran = cluster.ran.get(each.job)
    if ran is not None and ran.start != each.starts:
        ran = None
    match each.state:
        case SubmissionState.ENDED:
            return each
        case SubmissionState.QUEUED:
            return _cancelled(each, "cancelled while it waited") if each.is_cancelled else each
        case SubmissionState.PLACED if ran is None:
            return _cancelled(each, "cancelled before it started") if each.is_cancelled else each
        case SubmissionState.RUNNING if ran is None:
            # Whether it has begun, the next agent finds out.
            first = each.treatment if each.treatment is Treatment.FORCE else Treatment.RESUME
            return _again(each, "the cluster had ended", cluster, interruptions=each.interruptions, treatment=first)
    assert ran is not None, "the cases above have those without one"
    leaves = each.leaves or cluster.leaves_for(each)
    if ran.end is None:
        told = f"is interrupted: {leaves}" if leaves else ""
        return replace(each, state=SubmissionState.RUNNING, message=told, leaves=leaves)
    if ran.end is End.INTERRUPTED:
        treatment = Treatment.RESUME if ran.has_begun else each.treatment
        # Before it has begun, --force has left the checkpoints of the run that it is to remove.
        iteration = ran.iteration if ran.has_begun else 0
        num_before = 0 if iteration > each.iteration else each.interruptions
        interruptions = num_before if leaves else num_before + 1
        found = replace(each, iteration=max(each.iteration, iteration))
        return _again(found, leaves or ran.message, cluster, interruptions=interruptions, treatment=treatment)
    return _ended(each, ran.end, ran.message)


def _again(each: Submission, why: str, cluster: Cluster, *, interruptions: int, treatment: Treatment) -> Submission:
    if each.is_cancelled:
        return _cancelled(each, "cancelled while it ran")
    goes_on = treatment is Treatment.RESUME
    if interruptions >= MAX_INTERRUPTIONS:
        option = "" if treatment is Treatment.FRESH else f" --{treatment}"
        remedy = f"{'go on with it' if goes_on else 'start it'} by {each.command}{option}"
        over = f"{why}; not started again after {interruptions} interruptions: {remedy}"
        return _ended(each, End.INTERRUPTED, over)
    # One that does not count, as by a drain, makes their number no larger.
    wait_s = 2 ** (interruptions - 1) if interruptions > max(1, each.interruptions) else 0
    return replace(
        each,
        state=SubmissionState.QUEUED,
        gpus=(),
        treatment=treatment,
        interruptions=interruptions,
        message=f"it was interrupted ({why}), and {'goes on from its checkpoint' if goes_on else 'is started again'}",
        leaves="",
        resumes_unix_ms=cluster.now_unix_ms + wait_s * 1000,
    )


def _cancelled(each: Submission, how: str) -> Submission:
    return _ended(each, End.CANCELLED, each.with_reason(how))


def _ended(each: Submission, end: End, message: str) -> Submission:
    return replace(each, state=SubmissionState.ENDED, gpus=(), end=end, message=message, leaves="")


def _placed(submissions: Iterable[Submission], cluster: Cluster) -> list[Submission]:
    """The records, after those at the head of the queue for whom there is room were placed."""
    every = {each.job: each for each in submissions}
    free = {gpu for gpu in cluster.free if node_of(gpu) not in cluster.drained and node_of(gpu) not in cluster.lost}
    whole = Room.whole(cluster.nodes, cluster.memory)
    room = Room(cluster.nodes, frozenset(free), cluster.memory)
    room = room.without(*((each.gpus, each.node_bytes) for each in every.values() if each.gpus))
    has_room: dict[tuple[tuple[int, ...], int], bool] = {}
    for each in in_turn(every.values()):
        needs = each.needs, each.node_bytes
        if needs not in has_room:
            has_room[needs] = placed_gpus(each.needs, whole, node_bytes=each.node_bytes) is not None
        if not has_room[needs]:
            continue
        gpus = placed_gpus(each.needs, room, node_bytes=each.node_bytes)
        # Another machine's clock, or one that was set, may say anything.
        if gpus is None or cluster.is_paused or 0 < each.resumes_unix_ms - cluster.now_unix_ms <= LONGEST_WAIT_MS:
            break
        room = room.without((gpus, each.node_bytes))
        every[each.job] = replace(
            each,
            state=SubmissionState.PLACED,
            gpus=gpus,
            starts=each.starts + 1,
            message="",
        )
    return list(every.values())


def why_never(
    needs: Sequence[int],
    nodes: Mapping[NodeId, int],
    memory: tuple[HostMemory, ...] = (),
    *,
    node_bytes: int = 0,
    drained: Collection[NodeId] = (),
    away: Collection[NodeId] = (),
) -> str:
    """For people: why a job with these needs cannot be placed, whatever else the cluster has to do. Empty: it can."""

    def has_room(*without: NodeId) -> bool:
        left = {node: count for node, count in nodes.items() if node not in without}
        return placed_gpus(needs, Room.whole(left, memory), node_bytes=node_bytes) is not None

    out = sorted({*drained, *away} & nodes.keys())
    if has_room(*out):
        return ""
    if has_room():
        # Those that each give it room by their return. It may take several of them.
        missing = [node for node in out if has_room(*(other for other in out if other != node))] or out
        told = []
        for what, names in (("drained (tidegate drain NODE --undo)", drained), ("away", away)):
            if own := [node for node in missing if node in names]:
                told.append(f"{', '.join(own)} {'is' if len(own) == 1 else 'are'} {what}")
        return "; ".join(told)
    slots = ", ".join(f"{node} has {count}" for node, count in nodes.items())
    there = "; ".join(filter(None, (slots, memory_told(memory) if node_bytes else "")))
    gpus = " and ".join(counted(count, "GPU") for count in needs)
    asked = f"{gpus} on a node{host_memory_text(node_bytes, before=', each with ')}"
    return f"this cluster has no room for it: it needs {asked}; {there}"


def in_turn(submissions: Iterable[Submission]) -> list[Submission]:
    """The queue, the head first."""
    return by_turn(each for each in submissions if each.state is SubmissionState.QUEUED)


def by_turn(submissions: Iterable[Submission]) -> list[Submission]:
    """In the order in which they would be placed."""
    return sorted(submissions, key=lambda each: (-each.priority, each.submitted_unix_ms, each.job))
