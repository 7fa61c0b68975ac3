"""Prompts of a data set: equal to those of transformers, in a reproducible order, refused with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.unit.data.tokenizers_made import make_tokenizer
from tidegate.config.sections.data import DataSection
from tidegate.data.prompts import DataPrompt, PromptList, PromptReader, training_files
from tidegate.tasks.tokenizer import TaskTokenizer, load_tokenizer

CHATS = [
    "How many?",
    [{"role": "user", "content": " für <|user|> \n"}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ],
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> TaskTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path / "model"), model_vocab_size=1000)


def data_of(tmp_path: Path, rows: list[Any], **fields: Any) -> DataSection:
    path = tmp_path / "train.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return DataSection(train=str(path), **fields)


def prompts_of(data: DataSection, tokenizer: TaskTokenizer, max_tokens: int = 1000) -> tuple[DataPrompt, ...]:
    return PromptReader(data, tokenizer).read(training_files(data), max_tokens=max_tokens)


def test_chats_become_the_tokens_that_transformers_makes_of_them(tmp_path: Path, tokenizer: TaskTokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    extra = {"thinking": "für <b>"}
    data = data_of(
        tmp_path, [{"prompt": chat} for chat in CHATS], chat_template="tokenizer", chat_template_kwargs=extra
    )
    reader = PromptReader(data, tokenizer)
    for chat, prompt in zip(CHATS, reader.read(training_files(data), max_tokens=1000), strict=True):
        messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
        want = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **extra)
        assert prompt.text == want
        assert reader.encode(prompt) == theirs(want, add_special_tokens=False)["input_ids"]
        assert prompt.given == chat


def test_texts_without_a_template_become_the_tokens_that_transformers_makes_of_them(
    tmp_path: Path, tokenizer: TaskTokenizer
) -> None:
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    data = data_of(tmp_path, [{"prompt": "How many?"}])
    (prompt,) = prompts_of(data, tokenizer)
    want = theirs("How many?")["input_ids"]
    assert PromptReader(data, tokenizer).encode(prompt) == want
    assert want[0] == tokenizer.bos_id


def test_a_template_file_replaces_the_tokenizers_template(tmp_path: Path, tokenizer: TaskTokenizer) -> None:
    (tmp_path / "short.jinja").write_text("{{ bos_token }}{{ messages[-1].content }}:")
    data = data_of(tmp_path, [{"prompt": "a"}], chat_template=str(tmp_path / "short.jinja"))
    assert prompts_of(data, tokenizer)[0].text == "<s>a:"


def test_a_template_sees_no_clock(tmp_path: Path, tokenizer: TaskTokenizer) -> None:
    (tmp_path / "dated.jinja").write_text(
        "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}then{% endif %}"
    )
    data = data_of(tmp_path, [{"prompt": "a"}], chat_template=str(tmp_path / "dated.jinja"))
    assert prompts_of(data, tokenizer)[0].text == "then"


def test_an_answer_may_be_within_a_column_and_the_other_columns_are_kept(
    tmp_path: Path, tokenizer: TaskTokenizer
) -> None:
    row = {"q": "a", "reward_model": {"ground_truth": "7", "style": "rule"}, "level": 3}
    data = data_of(tmp_path, [row], prompt_key="q", answer_key="reward_model.ground_truth")
    (prompt,) = prompts_of(data, tokenizer)
    assert (prompt.answer, prompt.where) == ("7", f"{tmp_path}/train.jsonl:1")
    assert prompt.columns == {"reward_model": row["reward_model"], "level": 3}


RIGHT = {"prompt": "a", "answer": "b"}
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a line that is no JSON": ('{"prompt": ', {}, r"train.jsonl:2: not JSON at column 11"),
    "no prompt": ({"answer": "b"}, {}, r"train.jsonl:2: no 'prompt' \(data.prompt_key\); the columns are answer$"),
    "no answer": (
        {"prompt": "a"},
        {"answer_key": "answer"},
        r"train.jsonl:2: no 'answer' \(data.answer_key\); the columns are prompt$",
    ),
    "an answer that is null": (
        {"prompt": "a", "answer": None},
        {"answer_key": "answer"},
        r"train.jsonl:2: 'answer' \(data.answer_key\) is null: give the record its answer or remove it",
    ),
    "a prompt that is a number": ({"prompt": 7}, {}, r"train.jsonl:2: the prompt is 7: it must be a text, or a list"),
    "a prompt that is empty": ({"prompt": ""}, {}, r"train.jsonl:2: the prompt is '': it must be a text"),
    "messages without a role": (
        {"prompt": [{"content": "a"}]},
        {},
        r"train.jsonl:2: the prompt is \[{'content': 'a'}\]",
    ),
    "messages without a template": (
        {"prompt": [{"role": "user", "content": "a"}]},
        {},
        r"train.jsonl:2: the prompt is a list of messages, but data.chat_template is empty: set it to tokenizer",
    ),
    "a role that the template refuses": (
        {"prompt": [{"role": "judge", "content": "a"}]},
        {"chat_template": "tokenizer"},
        r"train.jsonl:2: the tokenizer's chat template does not render: TemplateError: no role judge",
    ),
    "a prompt that is too long": (
        {"prompt": "a" * 40},
        {},
        r"train.jsonl:2: the prompt has 41 tokens, more than the limit of 30 \(data.max_prompt_tokens",
    ),
    "a column with the name of an argument": (
        {"prompt": "a", "response": "b"},
        {},
        r"train.jsonl:2: column 'response' has the name of an argument of rewards: rename the column",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_record_is_reported_with_its_file_and_line(case: str, tmp_path: Path, tokenizer: TaskTokenizer) -> None:
    row, fields, want = WRONG[case]
    right = RIGHT if "answer_key" in fields else {"prompt": "a"}
    data = data_of(tmp_path, [right, row, right], **fields)
    with pytest.raises(ValueError, match=want) as raised:
        prompts_of(data, tokenizer, max_tokens=30)
    assert len(str(raised.value).splitlines()) == 1


def test_the_first_faults_are_reported_together_and_the_others_are_counted(
    tmp_path: Path, tokenizer: TaskTokenizer
) -> None:
    data = data_of(tmp_path, ["{", {"answer": 1}, *[{"prompt": 1}] * 10])
    with pytest.raises(ValueError, match=r"train\.jsonl:1: not JSON") as raised:
        prompts_of(data, tokenizer)
    faults = str(raised.value).splitlines()
    assert [line.partition(" ")[0] for line in faults] == [f"{tmp_path}/train.jsonl:{n}:" for n in range(1, 9)] + [
        "and"
    ]
    assert faults[-1] == "and 4 more"


def test_data_without_a_record_is_refused(tmp_path: Path, tokenizer: TaskTokenizer) -> None:
    with pytest.raises(ValueError, match=r"train.jsonl holds no record"):
        prompts_of(data_of(tmp_path, []), tokenizer)


def test_an_invalid_or_missing_template_is_refused_by_name(tmp_path: Path, tokenizer: TaskTokenizer) -> None:
    path = tmp_path / "bad.jinja"
    path.write_text("line\n{% for message in messages %}")
    with pytest.raises(ValueError, match=r"chat_template=.*bad.jinja is no chat template: .* \(line 2\)"):
        PromptReader(data_of(tmp_path, [], chat_template=str(path)), tokenizer)
    with pytest.raises(ValueError, match=r"chat_template=.*absent.jinja cannot be read: .*; give the path of a Jinja"):
        PromptReader(data_of(tmp_path, [], chat_template=str(tmp_path / "absent.jinja")), tokenizer)


def test_a_tokenizer_without_a_template_is_refused_where_the_config_asks_for_it(tmp_path: Path) -> None:
    bare = load_tokenizer(make_tokenizer(tmp_path / "bare", chat_template=None), model_vocab_size=1000)
    with pytest.raises(ValueError, match=r"data.chat_template=tokenizer, but the tokenizer has no template"):
        PromptReader(data_of(tmp_path, [], chat_template="tokenizer"), bare)


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, tokenizer: TaskTokenizer) -> None:
    (tmp_path / "evil.jinja").write_text("{{ messages.__class__.__base__.__subclasses__() }}")
    data = data_of(tmp_path, [{"prompt": "a"}], chat_template=str(tmp_path / "evil.jinja"))
    with pytest.raises(ValueError, match=r"train.jsonl:1: .*evil.jinja does not render: SecurityError"):
        prompts_of(data, tokenizer)


def listed(count: int) -> list[DataPrompt]:
    return [DataPrompt(f"train.jsonl:{n}", str(n), str(n), None, {}) for n in range(count)]


def test_a_pass_has_each_record_once_and_another_order_than_the_one_before() -> None:
    prompts = PromptList(listed(20), seed=3, shuffle=True)
    passes = [[prompts.at(index).text for index in range(start, start + 20)] for start in (0, 20, 40)]
    assert all(sorted(one, key=int) == [str(n) for n in range(20)] for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_the_prompt_at_an_index_follows_from_seed_and_index_in_any_order_of_requests() -> None:
    forwards, backwards = (PromptList(listed(7), seed=3, shuffle=True) for _ in range(2))
    want = [forwards.at(index).text for index in range(40)]
    assert [backwards.at(index).text for index in reversed(range(40))] == want[::-1]
    other = PromptList(listed(7), seed=4, shuffle=True)
    assert [other.at(index).text for index in range(40)] != want


def test_a_prompt_has_the_same_row_in_every_pass() -> None:
    prompts = PromptList(listed(7), seed=3, shuffle=True)
    rows: dict[str, set[int]] = {}
    for index in range(28):
        rows.setdefault(prompts.at(index).text, set()).add(prompts.row(index))
    assert sorted(rows.values(), key=min) == [{row} for row in range(7)]


def test_without_shuffling_each_pass_is_in_the_order_of_the_files() -> None:
    prompts = PromptList(listed(3), seed=3, shuffle=False)
    assert [prompts.at(index).text for index in range(7)] == ["0", "1", "2", "0", "1", "2", "0"]


def test_the_checksum_is_of_the_bytes_and_of_the_template(tmp_path: Path, tokenizer: TaskTokenizer) -> None:
    def checksum(**fields: Any) -> str:
        data = data_of(tmp_path, [{"prompt": "a"}], **fields)
        return PromptReader(data, tokenizer).checksum(training_files(data))

    plain = checksum()
    assert checksum() == plain
    assert checksum(chat_template="tokenizer") != plain
    data = data_of(tmp_path, [{"prompt": "b"}])
    assert PromptReader(data, tokenizer).checksum(training_files(data)) != plain
