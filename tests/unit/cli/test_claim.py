"""Claiming a job's folder: one run at a time, removals only on request, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.configs import small_config, small_file, small_over_two_machines
from tests.unit.cli.configs_on_data import RIGHT, on_data
from tidegate.attempts import attempts_in, newest_attempt
from tidegate.config.files import load_config
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.config.schedule import rules_of, schedule_of
from tidegate.job import JobFolder, load_job
from tidegate.launcher.claim import (
    CannotStart,
    Start,
    claim_folder,
    host_memory_folder,
    refuse_claim,
    refuse_running,
    saved_config,
)
from tidegate.launcher.lock import LOCK
from tidegate.launcher.outcome import End, Outcome
from tidegate.lr.checkpoint import encoded
from tidegate.lr.progress import LrLedger
from tidegate.runtime.hosted import Hosted
from tidegate.types import NodeId
from tidegate.v1 import control_pb2


def run_once(tmp_path: Path, start: Start = Start.FRESH, *, now_unix_s: float = 0.0) -> int:
    """The boot of a run that has ended."""
    with claim_folder(load_job(small_config(tmp_path)), start, now_unix_s=now_unix_s) as claim:
        return claim.boot


def finish(tmp_path: Path) -> None:
    status = control_pb2.GetJobResponse(job="small")
    Outcome(End.FINISHED, "", seed=0, wall_s=1.0, job=status).write(JobFolder.of(small_config(tmp_path)).result)


def test_a_claimed_folder_holds_a_private_config_with_absolute_paths(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    with claim_folder(load_job(config), Start.FRESH, now_unix_s=0.0) as claim:
        saved = saved_config(claim.folder)
        assert saved == claim.config
        assert saved is not None
        assert stat.S_IMODE(claim.folder.config.stat().st_mode) == 0o600
        assert saved.model.tokenizer == str(claim.folder.tokenizer)
        assert load_job(saved).tokenizer.vocab_size == load_job(config).tokenizer.vocab_size
        assert Path(saved.runtime.host_memory_root) == host_memory_folder(config)
        assert stat.S_IMODE(host_memory_folder(config).stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", [b"", b'{"seed": 1', b"\xff", b"[]", b'{"job": "small"}'])
def test_a_job_whose_config_is_damaged_goes_on_with_the_copy_of_its_last_start(tmp_path: Path, damage: bytes) -> None:
    run_once(tmp_path)
    folder = JobFolder.of(small_config(tmp_path))
    before = saved_config(folder)
    folder.config.write_bytes(damage)
    assert saved_config(folder) == before
    run_once(tmp_path, Start.RESUME)
    assert JobConfig.read(folder.config) == before
    folder.config.write_bytes(damage)
    newest_attempt(folder.root).config.write_text("seed: [")
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(folder.config))} is damaged"):
        run_once(tmp_path, Start.RESUME)


@pytest.mark.parametrize("damage", [b"", b'{"version": "1', None], ids=["empty", "cut", "removed"])
def test_a_resume_has_the_tokenizer_of_its_first_start(tmp_path: Path, damage: bytes | None) -> None:
    run_once(tmp_path)
    kept = JobFolder.of(small_config(tmp_path)).tokenizer
    before = kept.read_bytes()
    kept.unlink()
    if damage is not None:
        kept.write_bytes(damage)

    run_once(tmp_path, Start.RESUME)

    assert kept.read_bytes() == before


def test_a_resume_with_another_tokenizer_than_its_first_start_is_refused(tmp_path: Path) -> None:
    run_once(tmp_path)
    folder = JobFolder.of(small_config(tmp_path))
    record = newest_attempt(folder.root).record
    record.write_text(json.dumps({**json.loads(record.read_text()), "tokenizer_sha256": "0" * 64}))
    before = folder.tokenizer.read_bytes()

    with pytest.raises(CannotStart, match=r"is not the tokenizer with which job small began.*put it back from a copy"):
        run_once(tmp_path, Start.RESUME)

    assert folder.tokenizer.read_bytes() == before
    assert not list(folder.root.glob("*.partial"))


def test_a_resume_sets_checkpoints_aside_whose_manifests_cannot_be_read(tmp_path: Path) -> None:
    job = load_job(small_config(tmp_path))
    with claim_folder(job, Start.FRESH, now_unix_s=0.0) as first:
        for iteration in (1, 2):
            folder = first.folder.checkpoints / f"inc001-it00000{iteration}"
            folder.mkdir(parents=True)
            ledger = json.dumps({"num_trained": 4})
            manifest = {"next_iteration": iteration, "version": iteration, "ledger": ledger}
            (folder / "manifest.json").write_text(json.dumps(manifest) if iteration == 1 else "{")
    with claim_folder(job, Start.RESUME, now_unix_s=0.0) as resumed:
        assert resumed.checkpoint is not None
        assert resumed.checkpoint.name == "inc001-it000001"
    left = sorted(path.name for path in first.folder.checkpoints.iterdir())
    assert left == ["inc001-it000001", "inc001-it000002.damaged"]


def test_a_damaged_record_of_the_end_stops_no_resume(tmp_path: Path) -> None:
    first = run_once(tmp_path)
    finish(tmp_path)
    result = JobFolder.of(small_config(tmp_path)).result
    result.write_bytes(result.read_bytes()[:20])

    assert run_once(tmp_path, Start.RESUME) > first
    assert not result.exists()


def test_each_start_is_an_attempt_of_its_own_and_a_forced_one_counts_from_one_again(tmp_path: Path) -> None:
    run_once(tmp_path)
    run_once(tmp_path, Start.RESUME)
    attempts = attempts_in(JobFolder.of(small_config(tmp_path)).root)
    starts = [json.loads(attempt.record.read_text())["start"] for attempt in attempts]
    assert (starts, [attempt.number for attempt in attempts]) == (["fresh", "resume"], [1, 2])
    run_once(tmp_path, Start.FORCE)
    (attempt,) = attempts_in(JobFolder.of(small_config(tmp_path)).root)
    assert json.loads(attempt.record.read_text())["start"] == "force"


@pytest.mark.usefixtures("umask_022")
def test_a_new_folder_is_this_users_alone_and_one_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    root = JobFolder.of(small_config(tmp_path)).root
    run_once(tmp_path)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE(root.parent.stat().st_mode) == 0o755, "it is not of one job"
    root.chmod(0o750)
    run_once(tmp_path, Start.RESUME)
    run_once(tmp_path, Start.FORCE)
    assert stat.S_IMODE(root.stat().st_mode) == 0o750


@pytest.mark.usefixtures("umask_022")
def test_only_what_may_hold_a_password_is_private_within_the_folder(tmp_path: Path) -> None:
    servers = {"nats_url": "nats://me:secret@host:4222"}
    with claim_folder(load_job(small_config(tmp_path, servers=servers)), Start.FRESH, now_unix_s=0.0) as claim:
        files = {path: stat.S_IMODE(path.stat().st_mode) for path in claim.folder.root.rglob("*") if path.is_file()}
    assert [path for path in files if "secret" in path.read_text()] == [claim.folder.config]
    private = {path.name for path, mode in files.items() if mode == 0o600}
    assert private == {"config.json", "launcher.lock"}
    assert set(files.values()) == {0o600, 0o644}


def test_nothing_is_left_in_host_memory_and_the_rest_of_a_killed_run_goes_at_the_next_start(tmp_path: Path) -> None:
    memory = host_memory_folder(small_config(tmp_path))
    (memory / "snapshots").mkdir(parents=True)
    with claim_folder(load_job(small_config(tmp_path)), Start.FRESH, now_unix_s=0.0):
        assert sorted(path.name for path in memory.iterdir()) == ["credentials", LOCK]
    assert not memory.exists()


def test_a_second_launcher_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    job = load_job(small_config(tmp_path))
    with (
        claim_folder(job, Start.FRESH, now_unix_s=0.0),
        pytest.raises(CannotStart, match=r"already runs, in the launcher with pid \d+"),
        claim_folder(job, Start.FORCE, now_unix_s=0.0),
    ):
        pass


def test_a_running_job_is_refused_with_its_launchers_pid_until_that_leaves(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    refuse_running(JobFolder.of(config))
    with (
        claim_folder(load_job(config), Start.FRESH, now_unix_s=0.0),
        pytest.raises(CannotStart, match=rf"job small already runs, in the launcher with pid {os.getpid()}"),
    ):
        refuse_running(JobFolder.of(config))
    refuse_running(JobFolder.of(config))


def test_a_fresh_start_over_an_older_run_names_both_remedies(tmp_path: Path) -> None:
    run_once(tmp_path)
    with pytest.raises(CannotStart, match=r"was started before .*--resume.*--force"):
        run_once(tmp_path)


def test_a_forced_start_removes_the_older_run(tmp_path: Path) -> None:
    run_once(tmp_path)
    left = JobFolder.of(small_config(tmp_path)).checkpoints / "old"
    left.mkdir()
    run_once(tmp_path, Start.FORCE)
    assert not left.exists()


def test_a_removal_that_is_cut_off_leaves_a_job_that_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_once(tmp_path)
    folder, unlink = JobFolder.of(small_config(tmp_path)), Path.unlink

    def cut_off(path: Path, *, missing_ok: bool = False) -> None:
        if path == folder.config:
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", cut_off)
        with pytest.raises(KeyboardInterrupt):
            run_once(tmp_path, Start.FORCE)
    assert {*folder.root.iterdir()} == {folder.config, folder.root / LOCK}
    with pytest.raises(CannotStart, match="was started before"):
        run_once(tmp_path)


def test_a_claim_is_told_once_the_older_run_is_gone_and_before_there_is_a_config(tmp_path: Path) -> None:
    run_once(tmp_path)
    folder, told = JobFolder.of(small_config(tmp_path)), list[set[str]]()

    def claimed() -> None:
        told.append({path.name for path in folder.root.iterdir()})

    folder.result.touch()
    with claim_folder(load_job(small_config(tmp_path)), Start.RESUME, now_unix_s=0.0, claimed=claimed):
        assert folder.result.name not in told[0], "the end of the earlier run is not taken for this one's"
    with claim_folder(load_job(small_config(tmp_path)), Start.FORCE, now_unix_s=0.0, claimed=claimed):
        assert told[1] == {LOCK, folder.tokenizer.name}


def test_a_folder_without_a_job_is_never_removed(tmp_path: Path) -> None:
    precious = tmp_path / "jobs" / "small" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    with pytest.raises(CannotStart, match="is not a job's folder"):
        run_once(tmp_path, Start.FORCE)
    assert precious.exists()


def test_a_resumed_run_keeps_what_the_older_one_wrote(tmp_path: Path) -> None:
    run_once(tmp_path)
    kept = JobFolder.of(small_config(tmp_path)).checkpoints / "kept"
    kept.mkdir()
    run_once(tmp_path, Start.RESUME)
    assert kept.exists()


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"nothing to resume: .* holds no job"):
        run_once(tmp_path, Start.RESUME)
    run_once(tmp_path)
    finish(tmp_path)
    with pytest.raises(
        CannotStart,
        match=r"has finished its 2 iterations, there is nothing to resume: .* algorithm.iterations above 2 \(is 2\)$",
    ):
        run_once(tmp_path, Start.RESUME)


def test_a_resumed_run_may_not_change_what_decides_its_samples(tmp_path: Path) -> None:
    run_once(tmp_path)
    other = load_job(small_config(tmp_path, seed=7))
    with (
        pytest.raises(
            CannotStart, match=r"cannot go on with seed=7 \(was 0\): .* set it back, or give .* another job name$"
        ),
        claim_folder(other, Start.RESUME, now_unix_s=0.0),
    ):
        pass


def more_iterations(tmp_path: Path, num_iterations: int, **changes: Any) -> JobConfig:
    algorithm = small_config(tmp_path).algorithm.model_dump() | {"iterations": num_iterations}
    return small_config(tmp_path, algorithm=algorithm, **changes)


def save_checkpoint(tmp_path: Path, *, num_iterations: int, config: JobConfig) -> None:
    """A checkpoint of which a launcher reads the manifest alone."""
    folder = JobFolder.of(config).checkpoints / f"inc001-it{num_iterations:06}"
    folder.mkdir()
    ledger = LrLedger(schedule_of(config), rules_of(config))
    manifest = {
        "next_iteration": num_iterations,
        "version": num_iterations,
        "ledger": json.dumps({"num_trained": 8}),
        "lr": encoded(ledger),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_resumed_run_may_have_more_iterations_and_other_gpus_and_layouts(tmp_path: Path) -> None:
    run_once(tmp_path)
    save_checkpoint(tmp_path, num_iterations=2, config=small_config(tmp_path))
    finish(tmp_path)
    config = more_iterations(
        tmp_path,
        5,
        cluster={"nodes": {"m0": 8}, "component_placement": {"actor": "0-3", "rollout": "4-5", "inference": "6-7"}},
        actor={"learning_rate": 1e-3, "layout": {"tp": 2, "pp": 2}, "micro_batch_size": 2, "recompute": "full"},
        inference={"layout": {"dp": 2}},
    )
    with claim_folder(load_job(config), Start.RESUME, now_unix_s=0.0) as claim:
        assert (claim.config.algorithm.iterations, list(claim.config.cluster.nodes)) == (5, ["m0"])
        assert claim.checkpoint is not None


def test_a_resumed_run_has_no_fewer_iterations_than_its_checkpoint(tmp_path: Path) -> None:
    run_once(tmp_path)
    save_checkpoint(tmp_path, num_iterations=2, config=small_config(tmp_path))
    refuse_claim(more_iterations(tmp_path, 2), Start.RESUME)
    with pytest.raises(
        CannotStart,
        match=r"with algorithm.iterations=1: checkpoint inc001-it000002 has 2 iterations; set it to 2 or more$",
    ):
        refuse_claim(more_iterations(tmp_path, 1), Start.RESUME)


def test_more_iterations_of_a_rate_that_falls_need_a_choice_of_the_schedule(tmp_path: Path) -> None:
    def falling(num_iterations: int, **section: str) -> JobConfig:
        schedule = {"decay": "cosine", **section}
        return more_iterations(tmp_path, num_iterations, actor={"learning_rate": 1e-3, "lr_schedule": schedule})

    with claim_folder(load_job(falling(2)), Start.FRESH, now_unix_s=0.0):
        save_checkpoint(tmp_path, num_iterations=1, config=falling(2))
    refuse_claim(falling(2), Start.RESUME)
    with pytest.raises(CannotStart, match=r"budget 2 and 5\): choose whose schedule holds, config or checkpoint"):
        refuse_claim(falling(5), Start.RESUME)
    for chosen in ("config", "checkpoint"):
        refuse_claim(falling(5, budget_mismatch=chosen), Start.RESUME)


def test_no_refused_resume_advises_to_remove_the_job(tmp_path: Path) -> None:
    run_once(tmp_path)
    finish(tmp_path)
    for config in (small_config(tmp_path), small_config(tmp_path, seed=7)):
        with pytest.raises(CannotStart) as refused:
            refuse_claim(config, Start.RESUME)
        assert "force" not in str(refused.value)


def test_a_refused_resume_names_the_one_changed_value_of_a_list(tmp_path: Path) -> None:
    def config(weight: float) -> JobConfig:
        rewards = [{"name": "exact_match"}, {"name": "function", "path": "grading.py:score", "weight": weight}]
        return load_config(small_file(tmp_path, **on_data(tmp_path, [RIGHT], rewards=rewards)))

    with claim_folder(load_job(config(0.5)), Start.FRESH, now_unix_s=0.0):
        pass
    with pytest.raises(CannotStart, match=r"cannot go on with rewards\.1\.weight=0\.25 \(was 0\.5\): a resume keeps"):
        refuse_claim(config(0.25), Start.RESUME)


SGLANG = {"engine": "sglang", "sglang": {"python": "python"}}
FLOAT32 = {"engine": "sglang", "sglang": {"python": "python", "dtype": "float32"}}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, SGLANG, r"rollout.engine=sglang \(was embedded\), rollout.sglang.dtype=bfloat16 \(was null\)"),
        (SGLANG, FLOAT32, r"cannot go on with rollout.sglang.dtype=float32 \(was bfloat16\):"),
    ],
    ids=["another engine", "another precision"],
)
def test_a_resumed_run_may_not_change_the_engine_that_draws_its_samples(
    before: dict[str, Any], after: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with claim_folder(load_job(small_config(tmp_path, rollout=before)), Start.FRESH, now_unix_s=0.0):
        pass
    other = load_job(small_config(tmp_path, rollout=after))
    with pytest.raises(CannotStart, match=message), claim_folder(other, Start.RESUME, now_unix_s=0.0):
        pass


def test_a_resumed_run_may_have_other_servers_and_fuller_engines(tmp_path: Path) -> None:
    moved = {"max_running_requests": 8, "num_reward_workers": 1, "sglang": {"start_timeout_s": 60, "dtype": "float32"}}
    run_once(tmp_path)
    with claim_folder(load_job(small_config(tmp_path, rollout=moved)), Start.RESUME, now_unix_s=0.0) as claim:
        assert claim.config.rollout.max_running_requests == 8


def test_a_resumed_run_may_change_the_machinery(tmp_path: Path) -> None:
    run_once(tmp_path)
    other = load_job(small_config(tmp_path, checkpoint={"every": 2}))
    with claim_folder(other, Start.RESUME, now_unix_s=0.0) as claim:
        assert claim.config.checkpoint.every == 2


def test_a_resumed_run_may_change_the_rate_schedule_only_where_budget_mismatch_says_which_holds(tmp_path: Path) -> None:
    run_once(tmp_path)
    section = {"budget_updates": 99}
    with (
        pytest.raises(
            CannotStart,
            match=r"with actor.lr_schedule.budget_updates=99 \(was null\): .*actor.lr_schedule.budget_mismatch",
        ),
        claim_folder(load_job(with_schedule(tmp_path, **section)), Start.RESUME, now_unix_s=0.0),
    ):
        pass
    for chosen in ({"legacy_policy": "rebase"}, section | {"budget_mismatch": "config"}):
        with claim_folder(load_job(with_schedule(tmp_path, **chosen)), Start.RESUME, now_unix_s=0.0) as claim:
            assert claim.config.actor.lr_schedule.model_dump(exclude_defaults=True) == chosen


def test_a_resume_whose_schedule_may_change_keeps_what_progress_is_counted_by(tmp_path: Path) -> None:
    run_once(tmp_path)
    section = {"budget_mismatch": "config"}
    changed: dict[str, Any] = {"learning_rate": 1e-4, "lr_warm_up_samples": 8}
    config = small_config(tmp_path, actor=changed | {"lr_schedule": section})
    with claim_folder(load_job(config), Start.RESUME, now_unix_s=0.0):
        pass
    section["mode"] = "optimizer_updates"
    config = small_config(tmp_path, actor=changed | {"lr_schedule": section})
    with (
        pytest.raises(CannotStart, match=r"with actor.lr_schedule.mode=optimizer_updates \(was nominal\)"),
        claim_folder(load_job(config), Start.RESUME, now_unix_s=0.0),
    ):
        pass


def with_schedule(tmp_path: Path, **section: Any) -> JobConfig:
    return small_config(tmp_path, actor={"learning_rate": 1e-3, "lr_schedule": section})


def test_every_start_has_a_larger_boot_though_the_clock_stands_or_falls(tmp_path: Path) -> None:
    boots = [run_once(tmp_path, now_unix_s=1000.0)]
    boots += [run_once(tmp_path, start, now_unix_s=5.0) for start in (Start.RESUME, Start.FORCE)]
    assert boots == [1000, 1001, 1002]


def test_a_host_memory_root_that_is_not_there_is_named(tmp_path: Path) -> None:
    job = load_job(small_config(tmp_path, runtime={"host_memory_root": str(tmp_path / "nowhere")}))
    with (
        pytest.raises(CannotStart, match=r"host_memory_root=.*nowhere is not"),
        claim_folder(job, Start.FRESH, now_unix_s=0),
    ):
        pass
    assert not (tmp_path / "jobs").exists()


def test_credentials_for_nats_and_redis_travel_where_the_config_says_so(tmp_path: Path) -> None:
    nats, redis = tmp_path / "nats", tmp_path / "redis"
    raw = small_over_two_machines(tmp_path)
    for root in (nats, redis):
        for party in ("job", "scheduler"):
            (root / party).mkdir(parents=True)
            (root / party / "credential.pem").write_text(f"{party} for {root.name}")
    for job, travels in (("goes", True), ("stays", False)):
        raw["job"] = job
        raw["servers"] = {"nats_credentials": str(nats), "redis_credentials": str(redis), "credentials_travel": travels}
        config = parse_config(raw)
        with claim_folder(load_job(config), Start.FRESH, now_unix_s=0.0) as claim:
            servers = claim.config.servers
            for found, own in ((servers.nats_credentials, nats), (servers.redis_credentials, redis)):
                assert (found == str(own)) is not travels
                assert (Path(found) / "job" / "credential.pem").read_text() == f"job for {own.name}"
            hosted = Hosted(claim.folder.config, NodeId("n1"), None, claim.folder.root / "log")
            files = hosted.start(host_memory_folder(config)).files
            own_files = {path: text for path, text in files.items() if not path.startswith("credentials/job/")}
            expected = {
                f"credentials/{kind}/job/credential.pem": f"job for {kind}".encode() for kind in ("nats", "redis")
            }
            assert own_files == (expected if travels else {}), "and nothing of the scheduler's"
