"""Tokens prepared per second of CPU: `python -m tests.bench.data.bench_prepare [ROWS]`.

The whole prepare stage (reading JSON lines, encoding, writing and linking Arrow) beside
`datasets.map(batched, num_proc=2)`, which writes Arrow too, on the same rows of about 2 KB, one
after the other, five times. Each time the tokenizer is a new copy, so that nothing is remembered of
it. CPU seconds are those of the process and its children. The token ids are compared.
"""

import resource
import shutil
import statistics
import sys
import tempfile
import time
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
from tests.bench.data.corpus import documents, save_tokenizer, write_lines

REPEATS = 5
CHARACTERS = 2100
GOAL = 8.0


def measured(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """CPU seconds, wall seconds, and what the work gave."""

    def cpu() -> float:
        whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        usages = [resource.getrusage(who) for who in whose]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    before, started = cpu(), time.perf_counter()
    found = work()
    return cpu() - before, time.perf_counter() - started, found


def ours(data: Path, tokenizer: Path, out: Path) -> pa.ChunkedArray:
    """The ids that the prepare stage writes, in the order of the records."""
    stage = Prepare(
        settings=PrepareSettings(datasets=(DatasetSettings(type="text"),)),
        sources=(pin_data(str(data)),),
        test_sources=(),
        tokenizer=pin_tokenizer(str(tokenizer)),
        tokenizer_path=str(tokenizer),
        num_proc=2,
    )
    out.mkdir(parents=True)
    stage.run(out)
    entries = read_json(out / PLAN)["splits"]["train"]
    files = [pa.memory_map(str(out / entry["file"])) for entry in entries]
    tables = [pa.ipc.open_file(file).read_all() for file in files]
    return pa.concat_tables(tables)["input_ids"]


def theirs(data: Path, tokenizer: Path, out: Path) -> pa.ChunkedArray:
    """The ids that `datasets` writes."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    end = loaded.eos_token_id

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        ids = [[*each, end] for each in loaded(batch["text"])["input_ids"]]
        return {"input_ids": ids, "labels": ids}

    found = datasets.load_dataset("json", data_files=str(data), cache_dir=str(out), split="train")
    mapped = found.map(encode, batched=True, num_proc=2, remove_columns=["text"])
    return mapped.with_format("arrow")["input_ids"][:]


def told(seconds: dict[str, list[tuple[float, float]]], tokens: int) -> None:
    """Print each way's median CPU and wall seconds, beside those of the last one, the peer."""
    medians = {
        name: tuple(map(statistics.median, zip(*each, strict=True)))
        for name, each in seconds.items()
    }
    base = list(medians.values())[-1][0]
    for name, (cpu, wall) in medians.items():
        print(
            f"{name:26} {tokens / cpu / 1e6:6.2f} Mtokens per CPU second ({base / cpu:5.1f}x)"
            f"   {cpu:6.2f} CPU s   {wall:6.2f} s"
        )


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    datasets.disable_progress_bars()
    seconds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        data, tokenizer = place / "rows.jsonl", place / "tokenizer"
        write_lines(data, [{"text": text} for text in documents(rows, CHARACTERS)])
        save_tokenizer(tokenizer)
        print(f"{rows} rows, {data.stat().st_size / 1e6:.1f} MB")
        ways = {"prepare": ours, "datasets.map, 2 processes": theirs}
        tokens = 0
        for turn in range(REPEATS):
            judge: np.ndarray | None = None
            for name, way in ways.items():
                its = shutil.copytree(tokenizer, place / f"tokenizer {turn} {name}")
                out = place / f"{name} {turn}" / "prepare" / "0"
                cpu, wall, found = measured(partial(way, data, its, out))
                seconds.setdefault(name, []).append((cpu, wall))
                ids = np.concatenate([chunk.flatten().to_numpy() for chunk in found.chunks])
                tokens = len(ids)
                assert judge is None or np.array_equal(ids, judge), "the ids differ"
                judge = ids
    told(seconds, tokens)
    print(f"goal: {GOAL}x of datasets.map per CPU second")


if __name__ == "__main__":
    main()
