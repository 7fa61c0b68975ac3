"""The tokenizer file: built from a task's words, loaded from a path, or refused with the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tidegate.tasks import find_task
from tidegate.tasks.tokenizer import TaskTokenizer, build_tokenizer, load_tokenizer
from tidegate.tasks.tokenizer_config import TokenizerConfig


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A saved tokenizer of the demo task."""
    build_tokenizer(find_task("countdown", 0).words()).save(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def test_a_built_vocabulary_is_the_special_tokens_and_the_words_in_order() -> None:
    tokenizer = build_tokenizer(["one", "two"])
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.encode_prompt("two one") == [1, 4, 3]
    assert tokenizer.encode_response("two one") == [4, 3, 2]
    assert tokenizer.vocab_size == 5


def test_texts_come_back_unchanged_from_a_saved_and_loaded_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(path, model_vocab_size=64)
    task = find_task("countdown", 0)
    for index in range(200):
        shown = task.demonstration(index)
        assert tokenizer.decode_response(tokenizer.encode_prompt(shown.prompt.text)[1:]) == shown.prompt.text
        assert tokenizer.decode_response(tokenizer.encode_response(shown.response)) == shown.response


def test_the_demo_vocabulary_has_64_ids(path: Path) -> None:
    assert load_tokenizer(path, model_vocab_size=64).vocab_size == 64


def test_a_folder_stands_for_its_tokenizer_file(path: Path) -> None:
    assert load_tokenizer(path.parent, model_vocab_size=64).encode_response("") == [2]


def test_two_builds_save_the_same_bytes(path: Path, tmp_path: Path) -> None:
    build_tokenizer(find_task("countdown", 9).words()).save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_transformers_reads_the_file_to_the_same_ids(path: Path) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path))
    ours = load_tokenizer(path, model_vocab_size=64)
    assert [ours.bos_id, *theirs.encode("count from 12 :")] == ours.encode_prompt("count from 12 :")


def test_special_tokens_are_found_by_name_whatever_their_ids(path: Path) -> None:
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["<pad>"], vocabulary["count"] = vocabulary["count"], vocabulary["<pad>"]
    for token in content["added_tokens"]:
        token["id"] = vocabulary[token["content"]]
    path.write_text(json.dumps(content))
    assert load_tokenizer(path, model_vocab_size=64).pad_id == 3


@pytest.mark.parametrize(
    ("ids", "want"),
    [
        pytest.param([3, 4, 2], "one two", id="the end token goes"),
        pytest.param([3, 4], "one two", id="a response cut short keeps all"),
        pytest.param([3, 0, 4, 2, 2], "one <pad> two <eos>", id="other special tokens show"),
        pytest.param([2], "", id="an end at once"),
        pytest.param([], "", id="nothing"),
    ],
)
def test_only_the_end_token_is_left_out_of_a_response(ids: list[int], want: str) -> None:
    assert build_tokenizer(["one", "two"]).decode_response(ids) == want


def test_a_word_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="'one three' has a word outside the vocabulary"):
        build_tokenizer(["one", "two"]).encode_prompt("one three")


LETTERS = {"a": 0, "b": 1, "<unk>": 2, "<pad>": 3, "<bos>": 4, "<eos>": 5}
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
MODELS = {
    "letters, and nothing for others": BPE({name: id_ for name, id_ in LETTERS.items() if name != "<unk>"}, []),
    "letters, and one token for others": BPE(LETTERS, [], unk_token="<unk>"),
    "words, and one token for others": WordLevel(LETTERS, unk_token="<unk>"),
    "likely pieces, and one token for others": Unigram([(name, -1.0) for name in LETTERS], unk_id=2),
}


@pytest.mark.parametrize("kind", MODELS)
def test_characters_outside_the_vocabulary_are_refused_by_every_kind_of_tokenizer(kind: str) -> None:
    raw = Tokenizer(MODELS[kind])
    raw.pre_tokenizer = WhitespaceSplit()
    raw.add_special_tokens([name for name in LETTERS if name.startswith("<") and name != "<unk>"])
    tokenizer = TaskTokenizer(raw, TokenizerConfig(SPECIAL, None))
    assert tokenizer.encode_prompt("a b\na") == [0, 1, 0]
    with pytest.raises(
        ValueError, match=r"^text 'a 五 ½' has ('½', '五'|'五', '½') outside the vocabulary: the model could not"
    ):
        tokenizer.encode_prompt("a 五 ½")
    assert tokenizer.encode_rendered("a<eos>") == [0, 5]


def test_an_id_that_no_token_has_is_visible_in_a_response() -> None:
    assert build_tokenizer(["one", "two"]).decode_response([3, 4, 5, 9, 3, 2]) == "one two\ufffd\ufffdone"


@pytest.mark.parametrize("words", [["one", "one"], ["one", "<eos>"]])
def test_a_vocabulary_with_a_word_twice_is_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match="5 words make 4 ids"):
        build_tokenizer(words)


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer at .*/absent\.json; give the path of a tokenizer\.json"):
        load_tokenizer(tmp_path / "absent.json", model_vocab_size=64)


@pytest.mark.parametrize("content", ["", "not json", "{}", '{"model": 3}'])
def test_a_file_that_is_no_tokenizer_is_refused(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a Hugging Face tokenizer"):
        load_tokenizer(path, model_vocab_size=64)


def test_a_tokenizer_without_an_end_token_is_refused(path: Path) -> None:
    path.write_text(path.read_text().replace("<eos>", "<end>"))
    with pytest.raises(
        ValueError, match=r"has no token <eos>; it needs .* or, without that file, <pad>, <bos> and <eos>"
    ):
        load_tokenizer(path, model_vocab_size=64)


def test_a_vocabulary_larger_than_the_models_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="has 64 ids and the model's vocabulary 63; set the model's vocabulary to at"):
        load_tokenizer(path, model_vocab_size=63)


def with_config(path: Path, **content: object) -> Path:
    (path.parent / "tokenizer_config.json").write_text(json.dumps(content))
    return path


def test_a_config_beside_the_file_names_the_special_tokens(path: Path) -> None:
    names = {"eos_token": {"content": "liftoff"}, "bos_token": None, "pad_token": "<pad>"}
    tokenizer = load_tokenizer(with_config(path, **names), model_vocab_size=64)
    assert tokenizer.bos_id is None
    assert tokenizer.pad_id == 0
    (first,) = tokenizer.encode_prompt("from")
    assert tokenizer.encode_rendered("from") == [first], "this tokenizer has no rule to put anything before a text"
    assert tokenizer.decode_response([first, tokenizer.eos_id]) == "from"


def test_a_saved_tokenizer_has_its_config_beside_it(path: Path, tmp_path: Path) -> None:
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ messages }}"}]
    loaded = load_tokenizer(with_config(path, eos_token="liftoff", chat_template=templates), model_vocab_size=64)
    (tmp_path / "again").mkdir()
    loaded.save(tmp_path / "again" / "tokenizer.json")
    again = load_tokenizer(tmp_path / "again", model_vocab_size=64)
    assert again.config == loaded.config
    assert again.config is not None
    assert again.config.chat_template == "{{ messages }}"
    assert again.eos_id == loaded.eos_id != 2


def test_a_template_file_overrides_the_template_in_the_config(path: Path) -> None:
    (path.parent / "chat_template.jinja").write_text("from the file")
    tokenizer = load_tokenizer(with_config(path, chat_template="from the config"), model_vocab_size=64)
    assert tokenizer.config is not None
    assert tokenizer.config.chat_template == "from the file"


@pytest.mark.parametrize(
    ("content", "want"),
    [
        pytest.param('{"eos_token": "<|im_end|>"}', r"has no token <\|im_end\|>; it needs", id="a token not there"),
        pytest.param('{"eos_token": 7}', "has eos_token=7, which is no token", id="a token that is none"),
        pytest.param('{"chat_template": 7}', "has a chat_template that is no text: 7", id="a template that is none"),
        pytest.param("{", "cannot be read: Expecting property name", id="no JSON"),
        pytest.param("[]", "holds no object", id="no object"),
    ],
)
def test_a_config_that_does_not_match_its_tokenizer_is_refused(path: Path, content: str, want: str) -> None:
    (path.parent / "tokenizer_config.json").write_text(content)
    with pytest.raises(ValueError, match=want) as refused:
        load_tokenizer(path, model_vocab_size=64)
    assert str(path) in str(refused.value)
