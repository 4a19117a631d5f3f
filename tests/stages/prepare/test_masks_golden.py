"""Real data sets go through whole, and fifty of their rows are trained on what was read by eye.

The rows are of GSM8K (MIT, OpenAI) and of LLaMA-Factory's demonstration sets of tool calls and of
preferences (Apache-2.0); the golden file holds how what is trained begins and ends, and a digest.
`python -m tests.stages.prepare.test_masks_golden` prints all of it, and writes the file anew.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.prepare.encode.encoder import EncodedBatch, Encoder
from penstock.prepare.settings import DatasetSettings
from penstock.rows.tokenizer import byte_tokenizer
from tests.conftest import ROOT, SHARED
from tests.stages.prepare.encoding import TOOLS, trained, unmarked

GOLDEN = ROOT / "tests" / "golden" / "masks.json"
QUESTION = {"type": "instruction", "field_instruction": "question", "field_output": "answer"}
SETS: dict[str, tuple[str, dict[str, Any], int, list[int]]] = {
    "gsm8k train": ("gsm8k/train.jsonl", QUESTION, 7473, [*range(0, 7473, 830), 7472]),
    "gsm8k test": ("gsm8k/test.jsonl", QUESTION, 1319, [*range(0, 1319, 330), 1318]),
    "tool calls": ("chat/toolcall_en_demo.json", {"type": "sharegpt"}, 300, [*range(0, 300, 15)]),
    "preferences": (
        "preference/dpo_en_demo.json",
        {"type": "preference"},
        300,
        [*range(0, 300, 23)],
    ),
}
SHOWN = 40


def rows_of(data: Path, name: str) -> list[Any]:
    """The records of a set."""
    text = (data / SETS[name][0]).read_text()
    return json.loads(text) if text.startswith("[") else [json.loads(x) for x in text.splitlines()]


def encoded(data: Path, name: str, template: str) -> tuple[Any, EncodedBatch]:
    """The tokenizer and the samples of a set."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = template
    encode = Encoder(DatasetSettings(**SETS[name][1]), tokenizer)
    return tokenizer, encode(rows_of(data, name))


def summary(text: str) -> dict[str, Any]:
    """How a text begins and ends, and all of it as a digest."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {
        "begins": text[:SHOWN],
        "ends": text[-SHOWN:],
        "characters": len(text),
        "sha256": digest,
    }


def summaries(data: Path, name: str, template: str) -> dict[str, list[dict[str, Any]]]:
    """What is trained in the chosen rows of a set, by row: one text for each side."""
    tokenizer, samples = encoded(data, name, template)
    sides = [(row, [side[row][1].tolist() for side in samples.sides]) for row in SETS[name][3]]
    return {str(row): [summary(trained(tokenizer, x)) for x in labels] for row, labels in sides}


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        pytest.param(TOOLS, id="marked"),
        pytest.param(unmarked(TOOLS), id="unmarked", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", SETS)
def test_real_sets_lose_no_row_and_are_trained_on_what_was_inspected(shared, name, template):
    data = shared / "data"
    _, samples = encoded(data, name, template)
    assert samples.faults == {}
    assert len(samples.records) == SETS[name][2]
    golden = json.loads(GOLDEN.read_text())
    assert summaries(data, name, template) == golden[name]


if __name__ == "__main__":
    found = {name: summaries(SHARED / "data", name, TOOLS) for name in SETS}
    for name in SETS:
        tokenizer, samples = encoded(SHARED / "data", name, TOOLS)
        for row in SETS[name][3]:
            print(f"=== {name} {row}")
            for side in samples.sides:
                ids, labels, _ = side[row]
                print(tokenizer.decode(ids.tolist()), "--- trained:", sep="\n")
                print(trained(tokenizer, labels.tolist()))
    GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
