"""One instance of the rollout: `python -m services.rollout --config PATH --node NODE [--forkserver PATH]`."""

from __future__ import annotations

from services.rollout.lead import RolloutLead
from tidegate.runtime.service import run_instance
from tidegate.types import Role


def main() -> None:
    run_instance(Role.ROLLOUT, worker_entry="services.rollout.worker:main", make_lead=RolloutLead)


if __name__ == "__main__":
    main()
