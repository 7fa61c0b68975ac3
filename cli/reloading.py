"""`tidegate reload`: an agent takes its program anew, such as that of another release, and jobs run on.

What cannot be is told before anything changes: the new program is started once, and asked whether it can take the
agent's place (`tidegate.runtime.handover`).
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

from cli.cluster import NotUp, answers
from cli.cluster_access import NoCluster, agent_pid, refuse_down
from cli.rows import Form, answer_text
from tidegate.cluster.folder import ClusterDescription, ClusterFolder
from tidegate.cluster.keepers import KEEPS
from tidegate.job import command_in
from tidegate.launcher.lock import record_of_holder
from tidegate.ports.rpc import PeerUnavailable
from tidegate.runtime import handover

_LOOK_AGAIN_S = 0.05
RELOAD_TIMEOUT_S = 80.0
"""Below the 90 s after which systemd gives a unit's reload up."""
_LOG = "see its log"
_NOTHING_CHANGED = "Nothing has changed, and jobs run on under the release that they have: mend it, and reload again"
_AFTERWARDS = "once it is started again, jobs go on from their checkpoints"


def reload(output_dir: Path, form: Form) -> int:
    """Lets the agent of the cluster take its program anew, and returns once the cluster answers again. NoCluster,
    NotUp."""
    folder = ClusterFolder.of(output_dir)
    pid = agent_pid(folder)
    if pid is None:
        refuse_down(folder)
        raise NoCluster(f"no agent has the cluster of {output_dir} here")
    if not pid:
        raise NotUp(f"the cluster of {output_dir} is up on another machine: reload it there")
    if (record_of_holder(folder.lock) or {}).get(KEEPS) and (found := _description(folder)):
        _check_program(found, pid, output_dir)
    deadline_s = time.monotonic() + RELOAD_TIMEOUT_S
    _reload_process(pid, deadline_s=deadline_s)
    keeps = bool((record_of_holder(folder.lock) or {}).get(KEEPS))
    if keeps:
        _until_it_answers(folder, pid, deadline_s=deadline_s)
    found = _description(folder) if keeps else None
    under = f"release {found.release} of {found.python}" if found else "the program that its command names now"
    text = f"the cluster of {output_dir} goes on under {under}, and its jobs run on"
    if not keeps:
        text = f"this machine stands by for the cluster of {output_dir} under {under}"
    answer = {"folder": str(output_dir), "agent": pid, "keeps": keeps}
    print(answer_text(answer | ({"release": found.release, "python": found.python} if found else {}), text, form))
    return 0


def reload_agent(pid: int, form: Form) -> int:
    """Lets a `tidegate agent` take its program anew. NotUp, NoHandover."""
    try:
        program = handover.program_of(pid)
        fault = asyncio.run(handover.program_fault(program))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotUp(f"there is no process {pid}") from error
    except (handover.NoHandover, PermissionError) as error:
        raise NotUp(str(error)) from error
    if fault:
        raise NotUp(f"{fault}. {_NOTHING_CHANGED}")
    _reload_process(pid, deadline_s=time.monotonic() + RELOAD_TIMEOUT_S)
    text = f"the agent {pid} goes on with what {' '.join(program)} is now, and processes of jobs run on"
    print(answer_text({"agent": pid}, text, form))
    return 0


def _check_program(found: ClusterDescription, pid: int, output_dir: Path) -> None:
    """NotUp where the program that the agent would take cannot take its place."""
    if found.handover_form != handover.FORM:
        left = f"leaves a state of form {found.handover_form}, and this release reads {handover.FORM}"
        how = left if found.handover_form else "is of an earlier release"
        raise NotUp(
            f"the agent {pid} {how}: jobs cannot run on. End the cluster with {command_in(output_dir, 'down')} and "
            "start it, and they go on from their checkpoints"
        )
    if fault := asyncio.run(handover.program_fault(found.program)):
        raise NotUp(f"{fault}. {_NOTHING_CHANGED}")


def _reload_process(pid: int, *, deadline_s: float) -> None:
    """Lets an agent take its program anew. NotUp where it has ended, or does not."""
    try:
        pidfd = os.pidfd_open(pid)
        try:
            before = handover.number_of(pid)
            if not handover.takes_programs(pid):
                raise NotUp(f"the agent {pid} takes no other program: it is of an earlier release, or has just begun")
            signal.pidfd_send_signal(pidfd, handover.SIGNAL)
            while not (handover.number_of(pid) > before and handover.takes_programs(pid)):
                if select.select([pidfd], [], [], _LOOK_AGAIN_S)[0]:
                    raise ProcessLookupError
                if time.monotonic() > deadline_s:
                    raise NotUp(f"the agent {pid} has not taken its program anew within {RELOAD_TIMEOUT_S:g} s: {_LOG}")
        finally:
            os.close(pidfd)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotUp(f"the agent {pid} has ended meanwhile: where nobody asked it to, {_LOG}; {_AFTERWARDS}") from error
    except PermissionError as error:
        raise NotUp(f"process {pid} is another user's ({error})") from error


def _until_it_answers(folder: ClusterFolder, pid: int, *, deadline_s: float) -> None:
    """NotUp."""
    while time.monotonic() < deadline_s:
        with suppress(NoCluster, PeerUnavailable):
            return asyncio.run(answers(folder))
        if agent_pid(folder) != pid:
            raise NotUp(f"the agent {pid} ended under its new program: see {folder.logs}; {_AFTERWARDS}")
        time.sleep(_LOOK_AGAIN_S)
    raise NotUp(f"the cluster gives no answer within {RELOAD_TIMEOUT_S:g} s: see {folder.logs}")


def _description(folder: ClusterFolder) -> ClusterDescription | None:
    with suppress(FileNotFoundError, ValueError):
        return ClusterDescription.parse(folder.description.read_bytes())
    return None
