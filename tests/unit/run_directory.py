"""A run directory of two iterations, written by hand."""

from __future__ import annotations

import json
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from tests.component_bench import job_config
from tidegate.v1 import events_pb2

MS = 1_000_000
LENGTHS = ([3, 4, 5, 6, 7, 8, 9, 10], [1, 1, 2, 2, 3, 3, 4, 4])
"""The lengths of each iteration; the job has 4 prompts of 2 samples, in minibatches of 2 prompts."""


def spans(gpu: str, *parts: tuple[str, int, int]) -> str:
    """One line for each part, whose times are in ms."""
    rows = [{"gpu": gpu, "state": state, "start_ns": start * MS, "end_ns": end * MS} for state, start, end in parts]
    return "".join(json.dumps(row) + "\n" for row in rows)


def picture(iteration: int, lengths: list[int], *, place: int = -3) -> str:
    body = events_pb2.Generation(group_size=2, lengths=lengths, places=[place] * len(lengths))
    body.engines.add(gpus=["n0/2"], kv_capacity_tokens=900, max_running=32)
    generation = MessageToDict(body, preserving_proto_field_name=True)
    return json.dumps({"event": {"iteration": iteration, "generation": generation}}) + "\n"


def update(incarnation: int, iteration: int, number: int) -> str:
    prompts = [4 * iteration + 2 * number, 4 * iteration + 2 * number + 1]
    samples = [f"{incarnation}.{iteration}.{prompt}.{draw}" for prompt in prompts for draw in range(2)]
    return json.dumps({"update": f"{incarnation}.{iteration}.{number}", "samples": samples}) + "\n"


def run_directory(tmp_path: Path) -> Path:
    """Two iterations; a version's load and publish are two spans that follow one another."""
    folder = tmp_path / "job"
    (timeline := folder / "latest" / "timeline").mkdir(parents=True)
    (folder / "config.json").write_text(job_config(tmp_path, algorithm={"iterations": 2}).to_json())
    (folder / "result.json").write_text(json.dumps({"end": "finished", "seconds": {"0": 1.5, "1": 2.5}}))
    # The first picture is of an iteration that continues.
    pictures = [picture(0, [1] * 8, place=0), *(picture(number, lengths) for number, lengths in enumerate(LENGTHS))]
    (folder / "events.jsonl").write_text("".join(pictures))
    (folder / "journal.jsonl").write_text("".join(update(1, it, number) for it in range(2) for number in range(2)))
    (folder / "samples").mkdir()
    (folder / "samples" / "inc001-it000000.jsonl").write_text('{"num_prompt_tokens": 4}\n{"num_prompt_tokens": 6}\n')
    load, gen = "loading_weights", "generating"
    (timeline / "rollout@n0.jsonl").write_text(
        spans("n0/2", ("starting", 0, 9), (load, 9, 10), (gen, 10, 30), (gen, 40, 50), (load, 90, 91), (gen, 100, 130))
    )
    (timeline / "rollout@n1.jsonl").write_text(
        spans("n1/2", (load, 9, 10), (load, 10, 11), (gen, 12, 60), (load, 90, 91), (gen, 101, 120))
    )
    (timeline / "inference@n0.jsonl").write_text(
        spans("n0/3", (load, 9, 10), ("computing_log_probs", 60, 65), (load, 90, 91), ("computing_log_probs", 130, 137))
    )
    (timeline / "inference@n1.jsonl").write_text(
        spans("n1/3", (load, 9, 10), ("computing_log_probs", 62, 65), (load, 90, 91), ("computing_log_probs", 131, 132))
    )
    train = "training"
    (timeline / "actor@n0.jsonl").write_text(
        spans("n0/0", (train, 0, 5), ("publishing", 5, 6), ("publishing", 6, 7), (train, 65, 70), (train, 70, 71))
        + spans("n0/0", (train, 75, 80), ("publishing", 85, 86), (train, 140, 149), (train, 160, 161))
        + spans("n0/1", ("publishing", 5, 6), (train, 66, 70), ("publishing", 85, 86), (train, 140, 150))
    )
    return folder
