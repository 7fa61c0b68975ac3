"""One instance of the actor: `python -m services.actor --config PATH --node NODE [--forkserver PATH]`."""

from __future__ import annotations

from services.actor.lead import ActorLead
from tidegate.runtime.service import run_instance
from tidegate.types import Role


def main() -> None:
    run_instance(Role.ACTOR, worker_entry="services.actor.worker:main", make_lead=ActorLead)


if __name__ == "__main__":
    main()
