"""`tidegate submit`: checks a job as `run` does, and puts it into a cluster's queue."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from google.protobuf.message import DecodeError

from cli.cluster_access import NoCluster, cluster_of, refuse_down
from cli.cluster_queue import row_of, until_ended
from cli.job_streams import events
from cli.rows import Form, answer_text
from cli.usage import BadUsage
from cli.views import iteration_text
from tidegate.cluster.far_commands import decode_folders
from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.placement import own_servers_fault
from tidegate.cluster.shipping import shipped, unpacked
from tidegate.config.files import load_sources, sources_of
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.config.reading.origins import with_origins
from tidegate.job import Job, JobFolder, command_in
from tidegate.launcher.claim import Start
from tidegate.launcher.control import NotRunning
from tidegate.launcher.host_memory import node_bytes
from tidegate.launcher.preflight import masked
from tidegate.launcher.run import RunRequest, check_job
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.v1 import cluster_pb2, command_line_pb2, types_pb2

LOOK_AGAIN_S = 0.5


def submit(args: argparse.Namespace, form: Form) -> int:
    """BadUsage, ConfigError, NoCluster."""
    if args.resume and args.force:
        raise BadUsage("--resume needs the files that --force removes: give only one of them")
    if args.from_afar and args.output_dir is None:
        raise BadUsage("--from-afar is for a job that another machine has sent: leave it out")
    source = _from_afar(Path(args.output_dir)) if args.from_afar else _typed(args)
    if (fault := own_servers_fault(source.config)) is not None:
        raise ConfigError(source.told(fault))
    config = source.config.model_copy(update={"output_dir": str(Path(source.config.output_dir).resolve())})
    folder = ClusterFolder.of(Path(config.output_dir))
    refuse_down(folder)
    # People read it in messages, and all users of the machine in the list of processes.
    command = shlex.join(map(masked, source.words))
    start = Start.RESUME if args.resume else Start.FORCE if args.force else Start.FRESH
    for warning in (*source.notes, *config.warnings()):
        print(f"tidegate: {warning}", file=sys.stderr)
    request = RunRequest(config, start, f"{command} --resume", f"{command} --force", is_submitted=True)
    try:
        job = asyncio.run(check_job(request) if args.no_copies else _with_copies(request))
    except ConfigError as error:
        raise ConfigError(source.told(str(error))) from error
    submission = cluster_pb2.SubmitJobRequest(
        config=job.config.to_json(),
        treatment=start,
        priority=args.priority,
        command=command,
        node_bytes=node_bytes(job) if _is_counted(Path(config.runtime.host_memory_root)) else 0,
    )
    return asyncio.run(_submit(folder, submission, form, follow=args.follow))


@dataclass(frozen=True, slots=True)
class _Source:
    """A config, the words that submit it again, and what a fault becomes, with the lines that it is of."""

    config: JobConfig
    words: Sequence[str]
    notes: Sequence[str] = ()
    told: Callable[[str], str] = str


def _typed(args: argparse.Namespace) -> _Source:
    """ConfigError."""
    options = {} if args.output_dir is None else {"output_dir": args.output_dir}
    sourced = load_sources(sources_of(args.config, options))
    words = ["tidegate", "submit", *args.config]
    if args.output_dir is not None:
        words += ["--output-dir", args.output_dir]
    words += ["--no-copies"] if args.no_copies else []
    told = partial(with_origins, layer=sourced.layer)
    return _Source(sourced.config, words, sourced.notes, told)


def _from_afar(output_dir: Path) -> _Source:
    """What another machine has sent: it is on stdin. ConfigError."""
    try:
        sent = command_line_pb2.FarSubmission.FromString(sys.stdin.buffer.read())
        config = JobConfig.from_json(unpacked(sent.config, decode_folders(sent.folders), output_dir))
        words = shlex.split(sent.typed)
    except (DecodeError, OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the job cannot be taken as it was sent: {error}") from error
    return _Source(config.model_copy(update={"output_dir": str(output_dir)}), words)


async def _with_copies(request: RunRequest) -> Job:
    """The checked job, with copies of its files where they do what the files do. ConfigError."""
    notes: list[str] = []
    copied = shipped(request.config, notes=notes)
    try:
        job = await check_job(replace(request, config=copied))
    except ConfigError as error:
        if copied == request.config:
            raise
        # Where the fault is not the copy's, this tells it of the person's own files.
        job = await check_job(request)
        notes = [f"the job's files are not copied, but read when it starts: their copy is refused ({error})"]
    for note in notes:
        print(f"tidegate: {note}", file=sys.stderr)
    return job


def _is_counted(host_memory: Path) -> bool:
    """Whether it is the file system whose room the agents tell."""
    root = host_memory.resolve()
    return Path("/dev/shm") in (root, *root.parents)


async def _submit(folder: ClusterFolder, request: cluster_pb2.SubmitJobRequest, form: Form, *, follow: bool) -> int:
    async with cluster_of(folder) as cluster:
        found = (await cluster.SubmitJob(request)).submission
    print(answer_text(row_of(found), f"job {found.job} is queued", form), flush=True)
    if not follow:
        return 0
    job = JobFolder(folder.root.parent / found.job)
    async with _iterations_told(job, since_unix_ns=found.submitted_unix_ms * 10**6) as changed:
        try:
            (ended,) = await until_ended(folder, {found.job}, changed=changed)
        except asyncio.CancelledError:
            again = command_in(folder.root.parent, "wait", found.job)
            print(f"tidegate: job {found.job} goes on; {again} waits for it again", file=sys.stderr)
            raise
    return int(ended.end != "finished")


@asynccontextmanager
async def _iterations_told(
    folder: JobFolder, *, since_unix_ns: int
) -> AsyncIterator[Callable[[cluster_pb2.Submission], None]]:
    """What is to be called at each change of the job's record: from its start on its iterations are told on stderr.
    Older ones are of an earlier run."""
    telling: list[asyncio.Task[None]] = []
    told_unix_ns = since_unix_ns

    async def tell(*, follow: bool) -> None:
        nonlocal told_unix_ns
        with suppress(NotRunning, NoCluster, PeerUnavailable, PeerRefused):
            async for row in events(folder, follow=follow):
                event = row.event
                is_report = event.WhichOneof("body") == "iteration_reported" and event.role == types_pb2.ROLE_ACTOR
                if is_report and event.occurred_unix_ns > told_unix_ns:
                    told_unix_ns = event.occurred_unix_ns
                    print(f"tidegate: job {folder.root.name} {iteration_text(event)}", file=sys.stderr)

    async def tell_on() -> None:
        # A job that starts takes no calls yet, and one that is resumed has the end of its earlier run.
        while True:
            await tell(follow=True)
            await asyncio.sleep(LOOK_AGAIN_S)

    def changed(each: cluster_pb2.Submission) -> None:
        if each.state == "running" and not telling:
            telling.append(asyncio.create_task(tell_on(), name="tell iterations"))

    try:
        yield changed
    finally:
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)
    # The folder of a job that has ended has all of them.
    await tell(follow=False)
