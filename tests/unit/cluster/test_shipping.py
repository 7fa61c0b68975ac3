"""The files that a submitted job takes along."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.configs import small
from tidegate.cluster import shipping
from tidegate.cluster.shipping import NAME, SHIPPED, UNUSED_S, File, packed, shipped, unpacked
from tidegate.config.job_config import JobConfig
from tidegate.launcher.lineage import changes_of_samples
from tidegate.tasks.tokenizer import build_tokenizer


class Person:
    """Somebody's folder, beside that of the jobs."""

    def __init__(self, tmp_path: Path) -> None:
        self.jobs = tmp_path / "mine" / "jobs"
        self.mine = tmp_path / "mine"
        self.jobs.mkdir(parents=True)
        (self.jobs / "large.bin").write_bytes(bytes(100))
        (self.mine / "helper").mkdir()
        (self.mine / "helper" / "units.json").write_text("{}")
        (self.mine / ".git").mkdir()
        (self.mine / ".git" / "config").write_text("secret")
        (self.mine / "grading.py").write_text("def score(response):\n    return 1.0\n")
        (self.mine / "chat.jinja").write_text("{{ messages }}")
        build_tokenizer(["two"]).save(self.mine / "words.json")
        (self.mine / "tokenizer_config.json").write_text("{}")
        self.notes: list[str] = []

    def config(self, path: str = "grading:score", *, import_from: str | None = None) -> JobConfig:
        raw: dict[str, Any] = small(self.jobs)
        raw |= {"output_dir": str(self.jobs), "task": None}
        raw["data"] = {"train": str(self.mine / "train.jsonl"), "chat_template": str(self.mine / "chat.jinja")}
        folder = str(self.mine) if import_from is None else import_from
        raw["rewards"] = [{"name": "function", "path": path, "import_from": folder}]
        raw["model"] = {**raw["model"], "tokenizer": str(self.mine / "words.json")}
        return JobConfig.model_validate(raw)

    def shipped(self, *path: str, **changes: Any) -> JobConfig:
        return shipped(self.config(*path, **changes), notes=self.notes)

    def copies(self) -> list[str]:
        return sorted(path.name for path in (self.jobs / NAME).iterdir() if path.name != "lock")


@pytest.fixture
def person(tmp_path: Path) -> Person:
    return Person(tmp_path)


def test_a_job_goes_on_with_what_was_there_when_it_was_submitted(person: Person) -> None:
    config = person.shipped()
    (person.mine / "grading.py").write_text("")
    (person.mine / "chat.jinja").unlink()
    assert config.data is not None
    assert Path(config.data.chat_template).read_text() == "{{ messages }}"
    assert config.data.train == str(person.mine / "train.jsonl"), "data stay where they are"
    code = Path(config.rewards[0].import_from)
    found = {str(path.relative_to(code)) for path in code.rglob("*") if path.is_file()}
    assert found == {"chat.jinja", "grading.py", "helper/units.json", "tokenizer_config.json", "words.json"}
    assert "return 1.0" in (code / "grading.py").read_text()
    tokenizer = Path(config.model.tokenizer)
    assert sorted(path.name for path in tokenizer.parent.iterdir()) == ["tokenizer_config.json", "words.json"]
    assert {person.jobs / NAME} == {code.parent, tokenizer.parent.parent, Path(config.data.chat_template).parents[1]}
    assert len(person.notes) == 3
    assert f"rewards.0: 5 files of {person.mine} (" in person.notes[0]


def test_a_reward_of_a_file_is_called_from_its_copy_and_may_be_resumed(person: Person) -> None:
    before = person.config(f"{person.mine}/grading.py:score", import_from="")
    config = person.shipped(f"{person.mine}/grading.py:score", import_from="")
    file, _, function = config.rewards[0].path.rpartition(":")
    assert function == "score"
    assert (Path(file).name, Path(file).parents[1]) == ("grading.py", person.jobs / NAME)
    assert not changes_of_samples(before, config)
    other = person.config(f"{person.mine}/other.py:score", import_from="")
    assert changes_of_samples(before, other) == ["rewards.0.path=other.py:score (was grading.py:score)"]


@pytest.mark.parametrize(
    "place", ["../beside/grading.py", ".hidden/grading.py", "{mine}/grading.py", "helper/grading.py"]
)
def test_the_file_of_a_reward_is_in_its_copy(place: str, person: Person) -> None:
    path = (person.mine / place.format(mine=person.mine)).resolve()
    path.parent.mkdir(exist_ok=True)
    path.write_text("def score(response):\n    return 2.0\n")
    (program := path.with_name("check.sh")).write_text("")
    program.chmod(0o755)
    reward = person.shipped(f"{place.format(mine=person.mine)}:score").rewards[0]
    found = Path(reward.import_from) / reward.path.rpartition(":")[0]
    assert person.jobs / NAME in found.parents
    assert "return 2.0" in found.read_text()
    assert os.access(found.with_name("check.sh"), os.X_OK)
    assert not os.access(found, os.X_OK)


def test_the_folder_of_a_config_whose_reward_is_installed_is_not_copied(person: Person) -> None:
    assert person.shipped("math:sqrt").rewards[0].import_from == str(person.mine)


def test_equal_files_have_one_copy_and_a_shipped_config_stays_as_it_is(person: Person) -> None:
    first = person.shipped()
    copies = person.copies()
    assert person.shipped() == first
    assert shipped(first, notes=person.notes) == first
    assert person.copies() == copies
    (person.mine / "grading.py").write_text("")
    assert person.shipped().rewards[0].import_from != first.rewards[0].import_from


def test_a_config_that_names_an_old_copy_keeps_it(person: Person) -> None:
    first = person.shipped()
    before_s = time.time() - UNUSED_S - 1
    for name in person.copies():
        os.utime(person.jobs / NAME / name, (before_s, before_s))
    assert shipped(first, notes=person.notes) == first
    assert (Path(first.rewards[0].import_from) / "grading.py").is_file()
    assert Path(first.model.tokenizer).is_file()


def test_a_copy_that_was_changed_is_made_anew(person: Person) -> None:
    copy = Path(person.shipped().rewards[0].import_from)
    for file in ("grading.py", "words.json"):
        (copy / file).unlink()
    (copy / "grading.py").write_text("")
    assert Path(person.shipped().rewards[0].import_from) == copy
    assert "return 1.0" in (copy / "grading.py").read_text()
    assert (copy / "words.json").is_file()


def test_a_copy_that_nobody_names_goes_after_a_week(person: Person) -> None:
    first = person.shipped()
    copies = set(person.copies())
    before_s = time.time() - UNUSED_S - 1

    def age() -> None:
        for name in copies:
            os.utime(person.jobs / NAME / name, (before_s, before_s))

    (person.mine / "grading.py").write_text("")
    age()
    (person.jobs / "small").mkdir()
    (config := person.jobs / "small" / "config.json").write_text(first.to_json())
    person.shipped()
    assert copies < {*person.copies()}
    config.unlink()
    config.mkdir()
    age()
    person.shipped()
    assert copies < {*person.copies()}, "a config that cannot be read may name any"
    config.rmdir()
    age()
    second = person.shipped()
    assert Path(first.rewards[0].import_from).name not in person.copies()
    assert Path(second.rewards[0].import_from).name in person.copies()
    assert Path(second.model.tokenizer).is_file(), "it is in use again"


@pytest.mark.parametrize(
    ("limit", "told"), [("MOST_BYTES", "it has more than 0 MiB"), ("MOST_FILES", "it has more than 1 files")]
)
def test_what_is_too_large_stays_where_it_is(
    limit: str, told: str, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, limit, 1)
    config = person.shipped()
    assert config.rewards[0].import_from == str(person.mine)
    assert f"rewards.0 is not copied, but read when the job starts: {person.mine}: {told}" in person.notes[0]


def test_a_folder_that_cannot_be_read_stays_where_it_is(person: Person) -> None:
    (person.mine / "chat.jinja").unlink()
    (person.mine / "broken").symlink_to(person.mine / "nothing")
    os.mkfifo(person.mine / "pipe")
    (person.mine / "loop").symlink_to(person.mine)
    (person.mine / os.fsdecode(b"caf\xe9.py")).write_text("")
    config = person.shipped()
    assert person.notes[-1].startswith("data.chat_template is not copied, but read when the job starts: ")
    assert len([*Path(config.rewards[0].import_from).rglob("*.py")]) == 2


def test_what_travels_becomes_the_same_as_its_copy(person: Person, tmp_path: Path) -> None:
    config, folders = packed(person.config("helper.score:score"), notes=person.notes)
    assert config.rewards[0].import_from is not None
    assert Path(config.rewards[0].import_from).parent == SHIPPED
    assert not (person.jobs / NAME).exists()
    assert [note.partition(":")[0] for note in person.notes] == ["rewards.0", "model.tokenizer", "data.chat_template"]

    there = tmp_path / 'the "other" one'
    found = JobConfig.from_json(unpacked(config.to_json(), folders, there))
    here = person.shipped("helper.score:score")
    for own, other in (
        (here.rewards[0].import_from, found.rewards[0].import_from),
        (here.model.tokenizer, found.model.tokenizer),
        (here.data.chat_template if here.data else "", found.data.chat_template if found.data else ""),
    ):
        assert own
        assert other
        assert Path(own).relative_to(person.jobs) == Path(other).relative_to(there)
        assert Path(other).exists()


def test_what_is_not_here_is_the_other_machines(person: Person) -> None:
    absent = person.config(import_from=str(person.mine / "absent"))
    config, folders = packed(absent, notes=person.notes)
    assert config.rewards == absent.rewards
    assert [sorted(map(str, files)) for files in folders] == [["tokenizer_config.json", "words.json"], ["chat.jinja"]]
    assert not any("rewards" in note for note in person.notes)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "."])
def test_files_that_would_lie_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a file in a folder"):
        unpacked("{}", [{Path(name): File(b"", is_program=False)}], tmp_path / "jobs")
    assert not (tmp_path / "x").exists()


def test_a_folder_that_is_too_large_to_travel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "MOST_BYTES", 1)
    with pytest.raises(ValueError, match="a folder of the job has more than"):
        unpacked("{}", [{Path("x"): File(b"ab", is_program=False)}], tmp_path / "jobs")
