"""The rights of parties on NATS and in Redis, as texts. `tests/integration/test_server_guard.py` asks the servers."""

from __future__ import annotations

import pytest

from tidegate.adapters.permissions import store_rules, subject_rights
from tidegate.certs.identity import Identity, Party

NOBODY = (Party.NODE, Party.OPERATOR, Party.VIEWER)


def of(party: Party, name: str = "math") -> Identity:
    return Identity("lab", party, name)


@pytest.mark.parametrize("party", NOBODY)
def test_people_and_machines_have_no_rights(party: Party) -> None:
    assert subject_rights(of(party)) is None
    assert store_rules(of(party)) is None


def test_no_other_party_than_a_scheduler_writes_the_stores_session_or_a_jobs_state() -> None:
    rules = (store_rules(of(Party.JOB)) or "").split()
    keys = [rule for rule in rules if "~" in rule]
    assert "%R~{tidegate}:store" in keys
    writable = [rule for rule in keys if not rule.startswith("%R")]
    assert "~{tidegate}:leases:math" in writable
    assert not [rule for rule in writable if rule.endswith((":store", ":states", "*"))]
    rights = subject_rights(of(Party.JOB))
    assert rights is not None
    assert not [subject for subject in rights.publish if subject.startswith(("tg.state", "$KV", ">"))]


def test_a_job_has_rights_to_nothing_of_another_job() -> None:
    rights = subject_rights(of(Party.JOB))
    assert rights is not None
    for subject in (*rights.publish, *rights.subscribe):
        assert any(own in subject.split(".") for own in ("math", "TG_EVENTS_MATH", "TG_SAMPLES_MATH", "TG_DEAD_MATH"))
    other = subject_rights(of(Party.JOB, "other"))
    assert other is not None
    assert not set(rights.publish + rights.subscribe) & set(other.publish + other.subscribe)
