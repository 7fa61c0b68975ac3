"""The translation of RLinf's scheduler switch: the policy with RLinf's rules, or the policy that moves no GPUs. Pure.

RLinf's rules use the rollout's limit of requests. Here the policy has a key of its own for it, so both get the value.
"""

from __future__ import annotations

from tidegate.rlinf.translation import MISSING, Translation


def scheduler(config: Translation) -> None:
    _threshold(config)
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


def _threshold(config: Translation) -> None:
    key = "cluster.preprocess_threshold"
    most = config.take(key)
    if most is MISSING or most in (None, -1):
        return
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        config.refuse(key, f"{key}={most!r} must be a number of sequences from 1 on, or -1 for the half of all")
        return
    config.put("scheduler.rlinf.preprocess_threshold", most, key)
    if config.now("scheduler.rlinf.use_pre_process_policy") is not True:
        config.add_note("without effect here: cluster.use_pre_process_policy is not true", key)
