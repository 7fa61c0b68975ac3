"""The translation of RLinf's scheduler switch: the policy with RLinf's rules, or the policy that moves no GPUs. Pure.

RLinf's rules use the rollout's limit of requests. Here the policy has a key of its own for it, so both get the value.
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
