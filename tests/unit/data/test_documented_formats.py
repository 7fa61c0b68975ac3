"""What docs/data.md shows of data made for verl or slime: its records load with its keys to the right prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.data.tokenizers_made import make_tokenizer
from tidegate.config.sections.data import DataSection, RewardSection
from tidegate.data.prompts import PromptReader, training_files
from tidegate.tasks.tokenizer import load_tokenizer

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "data.md").read_text()
SECTION = PAGE.partition("## Data made for verl or slime\n")[2].partition("\n## ")[0]
RECORDS = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", SECTION, re.DOTALL)]
CONFIGS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)]
COLUMNS = {"verl": {"data_source", "ability", "reward_model", "extra_info"}, "slime": {"metadata"}}


@pytest.mark.parametrize("number", range(2), ids=list(COLUMNS))
def test_the_documented_record_loads_with_the_documented_keys(number: int, tmp_path: Path) -> None:
    record, config = RECORDS[number], CONFIGS[number]
    file = tmp_path / config["data"]["train"]
    write(file, record)
    data = DataSection(**config["data"] | {"train": str(file)})
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "model"), model_vocab_size=1000)
    (prompt,) = PromptReader(data, tokenizer).read(training_files(data), max_tokens=1000)
    assert prompt.text == "<|user|>What is 2 + 2?<|end|><|assistant|>"
    assert prompt.answer == "4"
    assert set(prompt.columns) == list(COLUMNS.values())[number]
    assert [RewardSection(**reward) for reward in config["rewards"]]


def write(file: Path, record: dict[str, Any]) -> None:
    if file.suffix == ".jsonl":
        file.write_text(json.dumps(record) + "\n")
        return
    pytest.importorskip("pyarrow", reason="what requirements/data.txt lists is not installed")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([record]), file)
