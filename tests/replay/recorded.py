"""A small job's history as a file: what its scheduler saw, and the commands that it decided on.

A line is a JSON object: an `event` with the name of its `body`, `owned` with what changed of the ownership read before,
or `commands`. Two jobs are a fake cluster's: one with deaths, a resize and pictures of its iterations, and one whose
policy moves GPUs. The others are simulated iterations, one under each policy that moves GPUs and with one fault each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from services.scheduler.decide.decision import Decision
from services.scheduler.policy import Policy
from services.scheduler.policy.dynarl import DynaRLPolicy, DynaRLRules
from services.scheduler.policy.rlinf import RLinfPolicy, RLinfRules
from services.scheduler.policy.static import StaticPolicy
from services.scheduler.policy.tide.foresight import TideRules
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.shell.codecs.plain import from_plain, to_plain
from services.scheduler.state import events as ev
from services.scheduler.state.values import Placed
from simulator.iteration import SimulatedIteration
from simulator.scenario import parse_scenario
from simulator.scheduled import Scheduled
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import gpu, spec
from tidegate.ownership.records import GpuRecord, Transition
from tidegate.types import InstanceId, Layout, Role

LIVED = ("deaths", "moves")
"""By a fake cluster, to the job's end."""

FAULTS: dict[str, dict[str, object]] = {
    "rlinf": {"at_s": 6, "kind": "gpu", "gpu": 6, "back_after_s": 1},
    "dynarl": {"at_s": 6, "kind": "engine", "engine": 1},
    "tide": {"at_s": 62.5, "kind": "gpu", "gpu": 0, "back_after_s": 2},
    "tide_at_home": {"at_s": 4, "kind": "gpu", "gpu": 0, "back_after_s": 2},
}
"""The faults of simulated iterations, by history: an inference's GPU, an engine, a GPU on its way to the trainer, and a
trainer's GPU before the first minibatch."""

PROMPTS = {"tide": 16}
"""With fewer it would not lend the trainer's GPUs."""

POLICIES: dict[str, Policy] = {
    "deaths": StaticPolicy(),
    "moves": DynaRLPolicy(DynaRLRules()),
    "rlinf": RLinfPolicy(RLinfRules(16, auto_scheduler=True, use_pre_process_policy=True)),
    "dynarl": DynaRLPolicy(DynaRLRules(request_priority=True)),
    # It moves for any gain: so short an iteration pays no other move.
    "tide": TidePolicy(TideRules(least_gain_s=0.0)),
    "tide_at_home": TidePolicy(),
}
HISTORIES = {name: Path(__file__).parent / f"{name}.jsonl" for name in POLICIES}
BODIES: dict[str, type] = {body.__name__: body for body in get_args(ev.Body)}
NOTHING = ev.Event(job="", source="scheduler", boot=1, sequence=0, body=ev.OwnershipObserved((), ()))


Seen = list[tuple[ev.Event | None, int, Decision | None]]


@dataclass(frozen=True, slots=True)
class Step:
    """One of the two: an event that was seen, or a decision's commands as text."""

    at_ms: int
    event: ev.Event | None = None
    commands: tuple[str, ...] = ()


def recorded(name: str) -> list[Step]:
    """Lived through now."""
    seen = _lived(name) if name in LIVED else _simulated(name)
    return [_step(event, at_ms, decision) for event, at_ms, decision in seen]


def _simulated(name: str) -> Seen:
    """Eight GPUs, small enough to be read. Without what changed nothing and asked nothing."""
    scenario = parse_scenario(
        {
            "physics": {"law": "published_fit"},
            "cluster": {"nodes": {"n0": 8}, "placement": {"actor": "0-1", "rollout": "2-5", "inference": "6-7"}},
            "algorithm": {"prompts_per_iteration": PROMPTS.get(name, 8), "group_size": 2, "n_minibatches": 2},
            "lengths": {"median_tokens": 800, "max_tokens": 4000},
            "costs": {"engine": {"max_running": 4, "kv_capacity_tokens": 20_000}, "trainer": {"rate_gpus": 8}},
            "faults": [FAULTS[name]],
        }
    )
    history: Seen = []
    run = Scheduled(SimulatedIteration(scenario, seed=3), POLICIES[name], record=history.append).run(name)
    assert run.num_lost == 0, f"{name} lost {run.num_lost} samples"
    return history


def _lived(name: str) -> Seen:
    num_iterations = {"deaths": 3, "moves": 1}[name]
    drive = booted(FakeCluster(spec(num_iterations=num_iterations, standby=(gpu("n0", 3),))))
    drive.policy = POLICIES[name]
    lives: dict[str, Callable[[Drive], None]] = {"deaths": _with_deaths, "moves": _with_moves}
    lives[name](drive)
    return drive.seen


def _with_deaths(drive: Drive) -> None:
    _iterating(drive, 0)
    drive.cluster.show(Role.ROLLOUT, eighths=4)
    drive.cluster.show(Role.INFERENCE, eighths=2)
    drive.cluster.kill_worker(gpu("n1", 2))
    _iterating(drive, 1)
    drive.cluster.voice.say("control", ev.ResizeRequested(Placed((gpu("n0", 0), gpu("n0", 3)), Layout(tp=2))))
    drive.cluster.kill_instance(InstanceId("rollout@n0"), tells=True)
    _iterating(drive, 2)
    drive.cluster.kill_instance(InstanceId("actor@n0"), tells=True)
    drive.run()


def _with_moves(drive: Drive) -> None:
    """Time passes while an iteration's responses end."""
    _iterating(drive, 0)
    for eighths in (2, 4, 6):
        drive.run_until(lambda _: not drive.cluster.outbox)
        drive.cluster.show(Role.ROLLOUT, eighths=eighths)
        drive.cluster.show(Role.INFERENCE, eighths=eighths - 2)
        drive.now_ms += 5000
    drive.run()


def _iterating(drive: Drive, iteration: int) -> None:
    drive.run_until(lambda state: state.iteration is not None and state.iteration.plan.iteration == iteration)


def _step(event: ev.Event | None, at_ms: int, decision: Decision | None) -> Step:
    if decision is None:
        return Step(at_ms, event=event)
    return Step(at_ms, commands=tuple(map(repr, decision.commands)))


def lines_of(steps: list[Step]) -> list[str]:
    """Lines of a file."""
    lines, owned = [], NOTHING
    for step in steps:
        if step.event is None:
            line: dict[str, Any] = {"commands": list(step.commands)}
        elif isinstance(step.event.body, ev.OwnershipObserved):
            line = {"owned": _changed(owned.body, step.event.body), "job": step.event.job}
            owned = step.event
        else:
            line = {"body": type(step.event.body).__name__, "event": to_plain(step.event)}
        lines.append(json.dumps(line | {"at_ms": step.at_ms}, sort_keys=True, separators=(",", ":")))
    return lines


def _changed(before: ev.Body, now: ev.OwnershipObserved) -> dict[str, Any]:
    assert isinstance(before, ev.OwnershipObserved)
    return {
        "gpus": [to_plain(each) for each in now.gpus if each not in before.gpus],
        "transitions": [to_plain(each) for each in now.transitions if each not in before.transitions],
    }


def read(path: Path) -> Iterator[Step]:
    """What `lines_of` wrote."""
    owned = NOTHING
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        line, where = json.loads(text), f"{path.name}:{number}"
        if "owned" in line:
            owned = replace(_owned(owned.body, line["owned"], where), job=line["job"])
            yield Step(line["at_ms"], event=owned)
        elif "event" in line:
            yield Step(line["at_ms"], event=_event(line, where))
        else:
            yield Step(line["at_ms"], commands=tuple(line["commands"]))


def _owned(before: ev.Body, changed: dict[str, Any], where: str) -> ev.Event:
    assert isinstance(before, ev.OwnershipObserved)
    gpus = {each.gpu: each for each in before.gpus}
    gpus |= {each.gpu: each for each in (from_plain(GpuRecord, plain, where) for plain in changed["gpus"])}
    transitions: dict[str, Transition] = {each.id: each for each in before.transitions}
    for plain in changed["transitions"]:
        each = from_plain(Transition, plain, where)
        transitions[each.id] = each
    in_order = tuple(transitions[key] for key in sorted(transitions))
    return replace(NOTHING, body=ev.OwnershipObserved(tuple(gpus[key] for key in sorted(gpus)), in_order))


def _event(line: dict[str, Any], where: str) -> ev.Event:
    plain, kinds = line["event"], get_type_hints(ev.Event)
    body = from_plain(BODIES[line["body"]], plain["body"], f"{where}: body")
    rest = {name: from_plain(kind, plain[name], f"{where}: {name}") for name, kind in kinds.items() if name != "body"}
    return ev.Event(**rest, body=body)
