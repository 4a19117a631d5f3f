"""Chat rows with masks per CPU second: `python -m tests.bench.data.bench_chat [ROWS]`.

The whole prepare stage beside `datasets.map` with `apply_chat_template` and its
`return_assistant_tokens_mask` row by row, which is how trainers make masks, on the same
conversations of two to eight turns, one after the other, five times, each time with a new copy of
the tokenizer. CPU seconds are those of the process and its children. Ids and masks are compared.
The second row of ours is with a template that has no `{% generation %}` marks, where turns are
found by rendering their prompts.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from transformers import AutoTokenizer

from penstock.core.files import read_json
from penstock.core.sources.pin import pin_data, pin_tokenizer
from penstock.prepare.settings import DatasetSettings, PrepareSettings
from penstock.prepare.stage import Prepare
from penstock.rows.prepared import PLAN
from tests.bench.data.bench_prepare import measured, told
from tests.bench.data.corpus import documents, save_tokenizer, write_lines
from tests.stages.prepare.encoding import CHATML

REPEATS = 5
CHARACTERS = 400
GOALS = {"prepare, marked template": 10.0, "prepare, unmarked": 8.0}
IGNORED = -100


def conversations(rows: int) -> list[Any]:
    """Two to eight turns each, of about 400 characters a message."""
    texts = iter(documents(rows * 5 + 8, CHARACTERS))
    found: list[Any] = []
    for number in range(rows):
        roles = ["user", "assistant"] * (1 + number % 4)
        found.append({"messages": [{"role": role, "content": next(texts)} for role in roles]})
    return found


def ours(data: Path, tokenizer: Path, out: Path) -> pa.Table:
    """What the prepare stage writes, in the order of the records."""
    stage = Prepare(
        settings=PrepareSettings(datasets=(DatasetSettings(type="chat"),)),
        sources=(pin_data(str(data)),),
        test_sources=(),
        tokenizer=pin_tokenizer(str(tokenizer)),
        tokenizer_path=str(tokenizer),
    )
    out.mkdir(parents=True)
    stage.run(out)
    entries = read_json(out / PLAN)["splits"]["train"]
    files = [pa.memory_map(str(out / entry["file"])) for entry in entries]
    return pa.concat_tables([pa.ipc.open_file(file).read_all() for file in files])


def theirs(data: Path, tokenizer: Path, out: Path) -> pa.Table:
    """What `datasets` writes of what transformers masks."""
    loaded: Any = AutoTokenizer.from_pretrained(tokenizer)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        found = loaded.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
        labels = [token if mask else IGNORED for token, mask in pairs]
        return {"input_ids": found["input_ids"], "labels": labels}

    rows = datasets.load_dataset("json", data_files=str(data), cache_dir=str(out), split="train")
    mapped = rows.map(encode, num_proc=2, remove_columns=["messages"])
    return mapped.with_format("arrow")[:]


def flat(table: pa.Table, name: str) -> np.ndarray:
    """All values of a column of lists."""
    return np.concatenate([chunk.flatten().to_numpy() for chunk in table[name].chunks])


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 8_000
    datasets.disable_progress_bars()
    seconds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        data = place / "rows.jsonl"
        write_lines(data, conversations(rows))
        save_tokenizer(place / "marked")
        bare = CHATML.replace("{%- generation %}", "").replace("{% endgeneration %}", "")
        save_tokenizer(place / "bare", bare)
        print(f"{rows} rows, {data.stat().st_size / 1e6:.1f} MB")
        ways: dict[str, tuple[Callable[[Path, Path, Path], pa.Table], str]] = {
            "prepare, marked template": (ours, "marked"),
            "prepare, unmarked": (ours, "bare"),
            "datasets.map, 2 processes": (theirs, "marked"),
        }
        tokens = 0
        for turn in range(REPEATS):
            judge: list[np.ndarray] = []
            for name, (way, template) in ways.items():
                its = shutil.copytree(place / template, place / f"{template} {turn} {name}")
                out = place / f"{name} {turn}" / "prepare" / "0"
                cpu, wall, found = measured(partial(way, data, its, out))
                seconds.setdefault(name, []).append((cpu, wall))
                both = [flat(found, column) for column in ("input_ids", "labels")]
                tokens = len(both[0])
                judge = judge or both
                assert all(map(np.array_equal, both, judge)), "the ids or masks differ"
    told(seconds, tokens)
    wanted = ", ".join(f"{goal:g}x ({name})" for name, goal in GOALS.items())
    print(f"goals: {wanted} of datasets.map per CPU second")


if __name__ == "__main__":
    main()
