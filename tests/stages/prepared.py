"""Building prepare and pack stages on small data, for the tests beside this file."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.core.cache.stage import Artifact, Facts, stage_key
from penstock.core.files import PART, regular_files
from penstock.core.sources.pin import pin_data, pin_tokenizer
from penstock.prepare.settings import DatasetSettings, PrepareSettings
from penstock.prepare.stage import Prepare

GSM8K = {"type": "instruction", "field_instruction": "question", "field_output": "answer"}


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    """Records as lines of JSON; strings are written as they are."""
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def texts(count: int, word: str = "t") -> list[dict[str, str]]:
    """Records of type text that all differ, in content and mostly in length."""
    return [{"text": f"{word}{n} " * (1 + n % 7)} for n in range(count)]


def prepare(
    *datasets: tuple[Any, dict[str, Any]],
    test: Sequence[tuple[Any, dict[str, Any]]] = (),
    avoid: Sequence[tuple[Any, dict[str, Any]]] = (),
    tokenizer: str = "builtin:bytes",
    num_proc: int = 1,
    slices: Path | None = None,
    **settings: Any,
) -> Prepare:
    """The stage for (path, settings) pairs."""
    return Prepare(
        settings=PrepareSettings(
            datasets=tuple(DatasetSettings(**its) for _, its in datasets),
            test_datasets=tuple(DatasetSettings(**its) for _, its in test),
            decontaminate_datasets=tuple(DatasetSettings(**its) for _, its in avoid),
            **settings,
        ),
        sources=tuple(pin_data(str(path), ds_type=its.get("ds_type")) for path, its in datasets),
        test_sources=tuple(pin_data(str(path)) for path, _ in test),
        decontaminate_sources=tuple(pin_data(str(path)) for path, _ in avoid),
        tokenizer=pin_tokenizer(tokenizer),
        tokenizer_path=tokenizer,
        num_proc=num_proc,
        slices_path=slices,
    )


def run(stage: Prepare, out: Path) -> tuple[Artifact, Facts]:
    """Run the stage into a folder; with slices of its own, unless the stage says where they lie."""
    out.mkdir(parents=True, exist_ok=True)
    slices = stage.slices_path or out.with_name(f"{out.name}.slices")
    facts = replace(stage, slices_path=slices).run(out)
    return Artifact("prepare", stage_key(stage), out), facts


def table_of(folder: Path, split: str = "train") -> pa.Table:
    """A split's samples in the order of plan.json, read with nothing but pyarrow."""
    plan = json.loads((folder / "plan.json").read_text())
    files = [folder / entry["file"] for entry in plan["splits"][split]]
    return pa.concat_tables([pa.ipc.open_file(file).read_all() for file in files])


def said(table: pa.Table) -> list[str]:
    """The samples as text, for the byte-level tokenizer: a token is a byte, specials left out."""
    rows = table["input_ids"].to_pylist()
    return [bytes(token for token in row if token < 256).decode() for row in rows]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its name there, but the temporary ones of an attempt."""
    files = (path for path in regular_files(folder) if path.suffix != PART)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
