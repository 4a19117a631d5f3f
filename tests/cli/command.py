"""Running the console command in this process, and a run small enough to be run for real."""

import contextlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.main import main


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def last(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])


def penstock(*argv: object) -> Said:
    out, err = _text(), _text()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main([str(argument) for argument in argv])
    code = ended.value.code
    return Said(code if isinstance(code, int) else int(code is not None), _all(out), _all(err))


def _text() -> io.TextIOWrapper:
    """A stream with bytes behind it, to which ranks that are started write."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _all(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def penstock_alone(*argv: object) -> Said:
    """The same in a process of `on_ranks`, which is to know of no others."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    return penstock(*argv)


def small_run(folder: Path, **changes: dict[str, Any]) -> Path:
    """A config of twelve texts in `folder`, with whole sections changed."""
    rows = "".join(json.dumps({"text": f"row {i} " * (i + 1)}) + "\n" for i in range(12))
    (folder / "rows.jsonl").write_text(rows)
    sections: dict[str, dict[str, Any]] = {
        "model": {"config_path": "builtin:tiny-qwen3"},
        "data": {
            "datasets": [{"path": str(folder / "rows.jsonl"), "type": "text"}],
            "dataset_prepared_path": str(folder / "data"),
            "sample_packing_sequence_len": 256,
            "dataset_num_proc": 1,
        },
        "train": {"output_dir": str(folder / "out"), "data_parallel_mode": "none"},
        "pipeline": {"artifacts_path": str(folder / "artifacts")},
    }
    for name, values in changes.items():
        sections[name] = {**sections.get(name, {}), **values}
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(sections))
    return config


def told(code: int, text: str, expected: str) -> None:
    """One message that a person can act on, and no traceback."""
    assert code in (1, 2, 3), text
    assert expected in text
    assert "Traceback" not in text
    assert "bug in Penstock" not in text
