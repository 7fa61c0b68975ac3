"""Turns arguments into an exit code: 0 done, 1 failed, 2 bad usage or config, 128 + n stopped by signal n.

Invariant: a person's mistake becomes one message on stderr (what, the numbers, the remedy), never a traceback.
[test_command: wrong_usage_is_one]
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import math
import os
import reprlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from cli import (
    backup,
    certs,
    cluster,
    cluster_queue,
    contexts,
    job_commands,
    manual_arguments,
    manual_moves,
    nodes,
    reloading,
    scaling,
)
from cli.completion import bash_script
from cli.jobs import UnknownJob, job_folder
from cli.manual_arguments import manner_of
from cli.manual_waits import NotMoved
from cli.rows import Form
from cli.selection import Selection, add_flags
from cli.simulation import arguments as simulation
from cli.timeline import TimelineForm, timeline_text
from cli.top import top
from cli.usage import BAD_USAGE, BadUsage, Parser, seed
from cli.watch import watch
from cli.why import Question, why
from tidegate.config.base import OUTPUT_DIR
from tidegate.config.job_config import ConfigError
from tidegate.config.sections.scheduler import POLICIES
from tidegate.launcher.control import NotRunning
from tidegate.launcher.run import NotRecorded
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.runtime import handover

_COMPLETION = "Print the shell completion. bash: source <(tidegate completion). zsh: run bashcompinit before."
_SCHEMA = "Print the JSON schema of configs. Editors use it to check and complete a config."
FAILED = 1
_FULL = (errno.ENOSPC, errno.EDQUOT)


def execute(arguments: Sequence[str] | None = None) -> int:
    """None takes the arguments of this process."""
    try:
        args = _parse(_parser(), arguments)
        args.program, args.words = _program(), tuple(sys.argv[1:] if arguments is None else arguments)
        if getattr(args, "far", None) is not None:
            # Import here: most commands call nobody.
            from cli import afar

            code = afar.run(args, sys.argv[1:] if arguments is None else arguments, args.far)
        else:
            code = _run(args)
        # Flush here, to report a closed pipe or a full disk: at exit that would be a traceback.
        sys.stdout.flush()
        return code
    except (BadUsage, ConfigError, UnknownJob) as error:
        return _say(error, code=BAD_USAGE)
    except PeerUnavailable as error:
        return _say(error.reason, code=FAILED)
    except PeerRefused as refused:
        # A name that nobody knows there is a wrong word here.
        return _say(refused.reason, code=BAD_USAGE if refused.status == "NOT_FOUND" else FAILED)
    except (NotRunning, NotMoved, NotRecorded, cluster.NotUp, ValueError) as error:
        return _say(error, code=FAILED)
    except BrokenPipeError:
        # The reader has left (`| head`): nothing more can be written, at exit neither.
        _drop_output()
        return FAILED
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename is not None:
            return _say(f"{error}: call the command as the user whose it is, or name another path", code=FAILED)
        if error.errno not in _FULL:
            raise
        _drop_output()
        return _say(f"{error}: the output is incomplete; make room, and run the command again", code=FAILED)


def _program() -> tuple[str, ...]:
    """The words that start `tidegate` again, in what may be another release then."""
    program = Path(sys.argv[0])
    is_installed = program.name == "tidegate" and os.access(program, os.X_OK)
    return (os.path.abspath(program),) if is_installed else (sys.executable, "-m", "cli")


def _parse(parser: Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """BadUsage for arguments that the command does not take."""
    args, rest = parser.parse_known_args(arguments)
    if args.command == "logs" and not args.source and len(rest) == 1 and not rest[0].startswith("-"):
        # argparse takes the optional source only before the first flag: add it, as in `logs a -f scheduler`.
        args.source = rest.pop()
    if args.command in ("get", "wait", "prune") and not any(word.startswith("-") for word in rest):
        args.jobs = [*args.jobs, *rest]  # argparse takes them only before the first flag
        rest = []
    config = args.config if "config" in args else None
    if rest and (config is None or any(word.startswith("-") for word in rest)):
        help_ = f"`{parser.prog} {args.command} --help` lists the arguments"
        raise BadUsage(f"{args.command} takes no {' '.join(rest)}; {help_}")
    if config is not None:
        # argparse takes only the words before the first flag: add those after it, as in `run a.yaml --resume seed=1`.
        config += rest
    if "usual_output_dir" in args:
        contexts.settle(args)
    return args


def _run(args: argparse.Namespace) -> int:
    if args.command in simulation.COMMANDS:
        return simulation.answer(args)
    output_dir = Path(args.output_dir or "").resolve()
    if args.command == "timeline":
        folder = job_folder(output_dir, args.job)
        print(timeline_text(folder, TimelineForm(args.form), attempt=args.attempt))
        return 0
    form = Form(args.form)
    match args.command:
        case "demo":
            # Import here, as for `run`.
            from cli import demo

            return demo.demo(args, form)
        case "run":
            # Import here: running a job needs a second of imports, which the other commands must not pay.
            from cli import run_commands

            return run_commands.run(args, form)
        case "submit":
            # Import here, as for `run`.
            from cli import submitting

            return submitting.submit(args, form)
        case "wait":
            if args.running and args.jobs:
                raise BadUsage("wait takes jobs or --running, not both: --running is for all that run now")
            return asyncio.run(
                cluster_queue.wait(args.jobs, output_dir, form, is_for_running=args.running, timeout_s=args.timeout)
            )
        case "pause":
            return asyncio.run(cluster_queue.pause(args.reason, output_dir, form, undo=args.undo))
        case "up":
            return cluster.up(args, output_dir, form)
        case "down":
            return cluster.down(output_dir, form)
        case "reload":
            if args.form_of_state:
                print(handover.FORM)
                return 0
            return (
                reloading.reload(output_dir, form) if args.agent is None else reloading.reload_agent(args.agent, form)
            )
        case "backup":
            return asyncio.run(backup.back_up(args.file, output_dir, form))
        case "restore":
            return backup.restore(args.file, output_dir, form)
        case "agent":
            # Import here: it imports the services.
            from services.node import machine

            return machine.main(args)
        case "schema":
            print((files("tidegate") / "config.schema.json").read_text(), end="")
            return 0
        case "completion":
            print(args.script(), end="")
            return 0
        case "doctor":
            return job_commands.doctor(args.config, args.output_dir, form)
        case "get":
            look = partial(job_commands.get, args.what, args.jobs, output_dir, form)
            between = "---\n" if form == "yaml" else ""
            return asyncio.run(watch(look, between=between) if args.watch else look())
        case "describe":
            if args.node is not None:
                return asyncio.run(nodes.describe_node(args.job, args.node, output_dir, form))
            return asyncio.run(job_commands.describe(args.job, output_dir, form))
        case "events":
            events = job_commands.events(args.job, Selection.of(args), output_dir, form, follow=args.follow)
            return asyncio.run(events)
        case "logs":
            return asyncio.run(job_commands.logs(args, output_dir, form))
        case "context":
            return contexts.context(args, output_dir, form)
        case "certs":
            return certs.certs(args, form)
        case "prune":
            return job_commands.prune(args, output_dir, form)
        case "cancel":
            return asyncio.run(job_commands.cancel(args.job, args.reason, output_dir, form))
        case "scale":
            return asyncio.run(scaling.scale(args.job, manual_arguments.wish_of(args), output_dir, manner_of(args)))
        case "migrate":
            return asyncio.run(manual_moves.migrate(args.job, args.leaving, args.coming, output_dir, manner_of(args)))
        case "drain" if not args.targets:
            if args.dry_run or args.wait:
                flag = "--dry-run" if args.dry_run else "--wait"
                raise BadUsage(f"drain {args.job} takes no {flag}: that is for GPUs of a job (tidegate drain JOB n0/3)")
            return asyncio.run(nodes.drain_node(args.job, output_dir, form, undo=args.undo, keeps_jobs=args.keep_jobs))
        case "drain":
            if args.keep_jobs:
                raise BadUsage(f"drain {args.job} with targets takes no --keep-jobs: that is for a node of the cluster")
            try:
                return asyncio.run(
                    manual_moves.drain(args.job, args.targets, output_dir, manner_of(args), undo=args.undo)
                )
            except UnknownJob as error:
                raise UnknownJob(f"{error}; a node of a cluster is named alone: tidegate drain {args.job}") from error
        case "why":
            question = Question(gpu=args.gpu, transition=args.transition, iteration=args.iteration)
            return why(job_folder(output_dir, args.job), question, form)
        case "top":
            return asyncio.run(top(job_folder(output_dir, args.job), form, once=args.once))
        case "deadletter":
            return asyncio.run(job_commands.settle_dead_letter(args.verb, args.job, args.id, output_dir, form))
    raise AssertionError(f"argparse accepted {args.command!r}")


def _drop_output() -> None:
    """Avoid a second failure at exit, from the text that stdout still buffers."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(error: Exception | str, *, code: int) -> int:
    print(f"tidegate: {error}", file=sys.stderr)
    return code


def _parser() -> Parser:
    parser = Parser(prog="tidegate", description="Runs RL post-training jobs.")
    parser.add_argument("--version", action="version", version=f"tidegate {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, description: str, *, output_dir: str | None = OUTPUT_DIR) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=description, description=description)
        added.add_argument(
            "-o", dest="form", choices=[form.value for form in Form], default="table", help="form of the output"
        )
        _add_output_dir(added, output_dir)
        return added

    def on_jobs(name: str, description: str, *, output_dir: str | None = OUTPUT_DIR) -> argparse.ArgumentParser:
        added = command(name, description, output_dir=output_dir)
        contexts.add_flag(added)
        return added

    demo = command("demo", "Run the demo: one job under static and under tide, from nothing to a comparison.")
    _add_run_arguments(demo, command("run", "Run a job.", output_dir=None))
    _add_cluster_commands(on_jobs)
    agent = command("agent", "Lend this machine's nodes to jobs that are started on another one.", output_dir=None)
    cluster.add_agent_arguments(agent)
    simulation.add_commands(commands)
    commands.add_parser("schema", help=_SCHEMA, description=_SCHEMA).set_defaults(form="json", output_dir="")
    completion = commands.add_parser("completion", help=_COMPLETION, description=_COMPLETION)
    script = partial(bash_script, parser, commands.choices)
    completion.set_defaults(form="table", output_dir="", script=script)
    doctor = command("doctor", "Check whether this machine has everything that a job needs.", output_dir=None)
    doctor.add_argument("config", nargs="*", metavar="CONFIG | key=value", help="the job, as for `run` (default: any)")
    get = on_jobs("get", "List jobs, their evaluations, GPUs or dead letters, or the nodes of the cluster.")
    get.add_argument("what", choices=["jobs", "evaluations", "gpus", "nodes", "deadletters"])
    help_ = "only these jobs; get nodes: only these nodes, or those of these jobs"
    # With a default argparse does not ask for them.
    get.add_argument("jobs", nargs="*", default=[], metavar="JOB|NODE", help=help_)
    get.add_argument("-w", "--watch", action="store_true", help="show it again as it changes, until Ctrl-C")
    for name, description in (
        ("describe", "Show a job: its state, components, iterations and evaluations. Or a node of a cluster."),
        ("events", "List the events of a job."),
        ("logs", "Print a job's logs."),
        ("cancel", "End a live job. Its checkpoints stay."),
    ):
        on_jobs(name, description).add_argument("job", metavar="JOB")
    help_ = "of a cluster, after the word node: describe node n1"
    commands.choices["describe"].add_argument("node", nargs="?", metavar="NODE", help=help_)
    which = commands.choices["logs"].add_mutually_exclusive_group()
    for parser_or_group in (commands.choices["events"], which):
        help_ = "continue with new lines as they come"
        parser_or_group.add_argument("-f", "--follow", action="store_true", help=help_)
    which.add_argument("--attempt", type=int, metavar="N", help="the logs of the job's start N (default: the last)")
    for name in ("events", "logs"):
        add_flags(commands.choices[name], of_events=name == "events")
    commands.choices["logs"].add_argument("source", nargs="?", default="", help="scheduler, actor@n0, ...; default all")
    commands.choices["cancel"].add_argument("--reason", default="", help="a text that stands with the job's end")
    _add_explaining(on_jobs, commands)
    manual_arguments.add_commands(on_jobs)
    prune = on_jobs("prune", "List what the stores of ended jobs take (servers/), and remove them with --yes.")
    prune.add_argument("jobs", nargs="*", metavar="JOB", help="only these jobs")
    prune.add_argument("--yes", action="store_true", help="remove them; without it, only list them")
    help_ = "also those of failed, cancelled, interrupted and killed jobs, which then resume from a checkpoint"
    prune.add_argument("--resumable", action="store_true", help=help_)
    certs.add_command(command)
    contexts.add_command(command)
    dead_letter = on_jobs("deadletter", "Deliver a dead letter again, or drop it. The job then goes on.")
    dead_letter.add_argument("verb", choices=["replay", "drop"])
    dead_letter.add_argument("job", metavar="JOB")
    dead_letter.add_argument("id", type=int, metavar="ID")
    return parser


def _add_cluster_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """A cluster that stays on this machine, and its queue."""
    up = command("up", "Start a cluster on this machine. It takes jobs from then on, also after this shell has ended.")
    help_ = "its nodes with their GPU slots, such as n0=8, or n1=8@b on machine b"
    up.add_argument("node", nargs="+", metavar="NODE=SLOTS[@MACHINE]", help=help_)
    up.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what a slot is (default: cpu, a process)")
    up.add_argument(
        "--slots-per-gpu", type=_positive, default=1, metavar="N", help="how many slots share a GPU (default: 1)"
    )
    cluster.add_machine_arguments(up)
    up.add_argument("--foreground", action="store_true", help="stay: a container or a unit ends the cluster by SIGTERM")
    reload = command("reload", "Let the cluster take its program anew, such as that of a newer release. Jobs run on.")
    help_ = "not the cluster: the `tidegate agent` of this process"
    reload.add_argument("--agent", type=_count, metavar="PID", help=help_)
    reload.add_argument("--form", dest="form_of_state", action="store_true", help=argparse.SUPPRESS)
    command("down", "End the cluster. Its queue stays, and jobs that ran go on after the next `up`.")
    back_up = command(
        "backup", "Write the cluster's jobs to a new file, from which `restore` puts them into a queue again."
    )
    restore = command(
        "restore", "Put the jobs of a backup into the cluster's queue. They go on from their checkpoints."
    )
    for each in (back_up, restore):
        each.add_argument("file", type=Path, metavar="FILE", help="the backup")
    submit = command("submit", "Put a job into the cluster's queue.", output_dir=None)
    _add_config(submit)
    submit.add_argument("--priority", type=int, default=0, help="jobs with a higher one go first (default: 0)")
    submit.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    submit.add_argument("--force", action="store_true", help="remove the files of the job's earlier run and start over")
    submit.add_argument(
        "--no-copies", action="store_true", help="the job reads its small files where they are, when it starts"
    )
    # What was typed, with the job and its files, is on stdin: a person on another machine has sent it.
    submit.add_argument("--from-afar", action="store_true", help=argparse.SUPPRESS)
    submit.add_argument("-f", "--follow", action="store_true", help="wait for the job's end; exit code 1: not finished")
    wait = command("wait", "Wait until jobs of the cluster have ended. Exit code 1: one has not finished.")
    wait.add_argument("jobs", nargs="*", metavar="JOB", help="these jobs (default: all that have not ended)")
    wait.add_argument(
        "--running", action="store_true", help="until no job runs, whatever becomes of the queue; exit code 0"
    )
    wait.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="wait no longer; exit code 1: some have not ended"
    )
    pause = command("pause", "Start no further job of the cluster, until --undo. Those that run go on.")
    pause.add_argument("--reason", default="by hand", metavar="TEXT", help="for people who see that jobs wait")
    pause.add_argument("--undo", action="store_true", help="start jobs again")


def _add_output_dir(command: argparse.ArgumentParser, usual: str | None) -> None:
    """`usual`: the folder where none is named. None: the config says it."""
    default = usual or "as the config says"
    where = f"the folder of the jobs' folders, relative to the one you type this in (default: {default})"
    command.add_argument("--output-dir", metavar="FOLDER", help=where)
    command.set_defaults(usual_output_dir=usual)


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "config",
        nargs="+",
        metavar="CONFIG | key=value",
        help="YAML files, where a later one overrides an earlier one, and changes such as algorithm.group_size=8",
    )


def _add_explaining(
    command: Callable[[str, str], argparse.ArgumentParser], commands: argparse._SubParsersAction[Parser]
) -> None:
    """The commands that show how a job's GPUs move."""
    asked = command("why", "Show why GPUs moved: inputs, alternatives with forecasts, the choice, what came of it.")
    asked.add_argument("job", metavar="JOB")
    which = asked.add_mutually_exclusive_group()
    which.add_argument("--gpu", metavar="N", help="decisions that moved this GPU, such as n0/3 or 3")
    which.add_argument("--transition", metavar="ID", help="the decision of this transition, such as t7")
    which.add_argument("--iteration", type=_count, metavar="I", help="decisions of this iteration (default: the last)")
    live = command("top", "Show who has which GPU, backlog, rates and the last moves, live.")
    live.add_argument("job", metavar="JOB")
    live.add_argument("--once", action="store_true", help="print it once; so it is where the output is no terminal")
    about = "Write what each GPU did and when, one lane a GPU."
    lanes = commands.add_parser("timeline", help=about, description=about)
    lanes.add_argument("job", metavar="JOB")
    lanes.add_argument(
        "-o",
        dest="form",
        choices=[form.value for form in TimelineForm],
        default=TimelineForm.PERFETTO.value,
        help="a trace for ui.perfetto.dev (default), a page that needs nothing besides itself, or JSON",
    )
    lanes.add_argument("--attempt", type=_count, metavar="N", help="the job's start N (default: the last)")
    _add_output_dir(lanes, OUTPUT_DIR)
    contexts.add_flag(lanes)


def _count(text: str) -> int:
    if not manual_arguments.NUMBER.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a whole number of at most nine digits")
    return int(text)


def _positive(text: str) -> int:
    if not (found := _count(text)):
        raise argparse.ArgumentTypeError("0 is too few")
    return found


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return found


def _version() -> str:
    try:
        return version("tidegate")
    except PackageNotFoundError:
        return "of a source tree that is not installed"


def _add_run_arguments(demo: argparse.ArgumentParser, run: argparse.ArgumentParser) -> None:
    demo.add_argument(
        "--policy", choices=POLICIES, default=None, help="run one job under this policy, and compare none"
    )
    demo.add_argument("--seed", type=seed, default=None, help="the same seed gives the same run (default: 0)")
    _add_config(run)
    run.add_argument(
        "--dry-run", action="store_true", help="check everything and print the resolved config; start nothing"
    )
    run.add_argument("--force", action="store_true", help="remove the files of the job's earlier run and start over")
    for parser in (demo, run):
        parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
