"""What RLinf's switch of its scheduler comes to: the policy that has its rules, or none that moves GPUs. Pure.

Its rules count with the rollout's number of requests, which is the rollout's own here: it is given to both.
"""

from __future__ import annotations

from tidegate.rlinf.translation import MISSING, Translation


def scheduler(config: Translation) -> None:
    switch, requests = "cluster.auto_scheduler", "rollout.max_running_requests"
    is_on = config.take(switch)
    if is_on is MISSING:
        return
    if not isinstance(is_on, bool):
        config.refuse(switch, f"{switch}={is_on!r} must be true or false")
        return
    config.put("scheduler.policy", "rlinf" if is_on else "static", switch)
    if is_on and config.now(requests) is not MISSING:
        config.put("scheduler.rlinf.max_running_requests", config.now(requests), requests)
