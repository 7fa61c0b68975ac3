"""One instance of the inference: `python -m services.inference --config PATH --node NODE [--forkserver PATH]`."""

from __future__ import annotations

from services.inference.lead import InferenceLead
from tidegate.runtime.service import run_instance
from tidegate.types import Role


def main() -> None:
    run_instance(Role.INFERENCE, worker_entry="services.inference.worker:main", make_lead=InferenceLead)


if __name__ == "__main__":
    main()
