"""`penstock init DATA`: a config for files of one's own, which nobody has to edit."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.config.loading.load import load
from tests.cli.command import penstock
from tests.pipeline.media.test_image_chain import write_model
from tests.stages.prepare.media.test_images import asking, expected, write_data

ROWS = 60
TINY = ("--model", "builtin:tiny-qwen3")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def write_lines(name: str, row_of: Any) -> str:
    Path(name).write_text("".join(json.dumps(row_of(i)) + "\n" for i in range(ROWS)))
    return name


def odd_csv() -> str:
    lines = [f"{i};What does item {i} cost?;Item {i} costs {i} euros;faq" for i in range(ROWS)]
    Path("odd.csv").write_text("\n".join(["No;Frage;Antwort;Source", *lines]))
    return "odd.csv"


def parquet() -> str:
    columns = {n: [f"{n} {i}" for i in range(ROWS)] for n in ("prompt", "completion")}
    pq.write_table(pa.table(columns), "rows.parquet")
    return "rows.parquet"


def plain() -> str:
    Path("plain.txt").write_text("".join(f"Line {i} of a text.\n" for i in range(ROWS)))
    return "plain.txt"


SHAPES = {
    "chats": (
        lambda: write_lines("a.jsonl", lambda i: {"messages": [user(f"{i}?"), answer(f"{i}!")]}),
        {"type": "chat"},
    ),
    "alpaca": (
        lambda: write_lines("a.jsonl", lambda i: {"instruction": f"{i}?", "output": f"{i}"}),
        {"type": "alpaca"},
    ),
    "csv with columns of other names": (
        odd_csv,
        {"type": "instruction", "field_instruction": "Frage", "field_output": "Antwort"},
    ),
    "parquet": (parquet, {"type": "instruction", "field_output": "completion"}),
    "preferences": (
        lambda: write_lines(
            "a.jsonl", lambda i: {"prompt": "?", "chosen": f"{i}", "rejected": "no"}
        ),
        {"type": "preference"},
    ),
    "plain text": (plain, {"type": "text"}),
    "token ids": (
        lambda: write_lines("a.jsonl", lambda i: {"input_ids": [i, 2, 3], "labels": [i, 2, 3]}),
        {"type": "tokenized"},
    ),
    "turns with tools": (
        lambda: write_lines(
            "a.jsonl",
            lambda i: {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                "messages": [
                    user(f"{i}?"),
                    answer("", tool_calls=[{"function": {"name": "f", "arguments": {"n": i}}}]),
                    {"role": "tool", "name": "f", "content": "1"},
                    answer("One."),
                ],
            },
        ),
        {"type": "chat"},
    ),
    "thinking": (
        lambda: write_lines(
            "a.jsonl",
            lambda i: {"messages": [user(f"{i}?"), answer("Yes", reasoning_content=f"hm {i}")]},
        ),
        {"type": "chat"},
    ),
    "two formats in one": (
        lambda: write_lines(
            "a.jsonl",
            lambda i: {"messages": [user(f"{i}?"), answer("Yes")], "text": f"{i}? Yes"},
        ),
        {"type": "chat"},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_gets_a_config_that_packs_as_it_is(shape, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write, settings = SHAPES[shape]
    data = write()
    said = penstock("init", data, "-o", "mine.yaml", *TINY)
    assert (said.code, said.out.strip()) == (0, "mine.yaml"), said.err
    assert f"{ROWS} samples" in said.err
    run = load(tmp_path / "mine.yaml")
    [dataset] = run.data.datasets
    assert dataset.path == data
    assert settings.items() <= dataset.model_dump(exclude_unset=True).items()
    assert ("a guess" in (tmp_path / "mine.yaml").read_text()) == (
        shape in ("csv with columns of other names", "two formats in one")
    )
    has_other_template = shape in ("turns with tools", "thinking")
    assert ("chat_template" in run.data.model_fields_set) == has_other_template
    assert ("no place for" in said.err) == has_other_template
    packed = penstock("pack", "mine.yaml", "--json")
    assert packed.code == 0, packed.err
    rows = packed.last["stages"][-1]["facts"]["rows"]
    assert min(rows.values()) > 0


def test_records_without_a_sample_are_counted_and_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("paragraphs.txt").write_text("\n\n".join(f"Paragraph {i}." for i in range(ROWS)))
    said = penstock("init", "paragraphs.txt", *TINY)
    assert f"{ROWS} samples of type text" in said.err
    assert f"{ROWS - 1} of {2 * ROWS - 1} records give no sample" in said.err


def test_samples_with_images_have_the_tokens_of_transformers_processor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "model", "qwen2_5_vl")
    data = write_data(tmp_path, [asking()] * ROWS + [asking("0.jpg", "1.jpg")])
    said = penstock("init", str(data), "-o", "mine.yaml", "--model", "model")
    assert "warning" not in said.err
    longest = len(expected(model, asking("0.jpg", "1.jpg")).data["input_ids"][0])
    assert f"the longest of {ROWS + 1} has {longest}." in said.err
    assert penstock("check", "mine.yaml").code == 0


def test_values_follow_the_data_the_model_and_the_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write_lines("a.jsonl", lambda i: {"prompt": "?", "chosen": f"{i}", "rejected": "no"})
    penstock("init", data)
    hub = load(tmp_path / "run.yaml")
    assert hub.model.model_path == "Qwen/Qwen3-0.6B"
    assert (hub.lora.enable_lora, hub.train.lr, hub.train.objective) == (True, 2e-5, "preference")
    assert hub.data.sample_packing_sequence_len is None
    few = write_lines("few.jsonl", lambda i: {"text": f"{i}"})
    Path(few).write_text("".join(Path(few).read_text().splitlines(keepends=True)[:20]))
    penstock("init", few, "-o", "few.yaml", *TINY)
    tiny = load(tmp_path / "few.yaml")
    assert (tiny.lora.enable_lora, tiny.data.val_set_size) == (False, None)
    assert tiny.train.data_parallel_mode == "none"
    assert tiny.train.enable_gradient_checkpointing is False


def test_a_file_that_exists_is_replaced_only_if_asked_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = plain()
    assert penstock("init", data, *TINY).code == 0
    again = penstock("init", data, *TINY)
    assert again.code == 2
    assert "exists already" in again.err
    assert penstock("init", data, *TINY, "--overwrite").code == 0
    assert "a config already" in penstock("init", "run.yaml").err
    assert "--model is for data" in penstock("init", "quickstart", "--model", "x").err
