"""Tokens packed and written per second:
`python -m tests.bench.data.bench_shards [SAMPLES]`.

The whole pack stage (planning, gathering, shifting labels, writing Arrow, fsync) in this process,
beside TRL's `pack_dataset` on the same samples, pyarrow's `take` of the samples in packed order,
and the raw writing of as many bytes with fsync. They take turns; medians of five.
"""

import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from penstock.core.cache.stage import Artifact
from penstock.core.files import fsync, remove, write_json
from penstock.pack.settings import PackSettings
from penstock.pack.stage import Pack
from penstock.rows.schema import PREPARED
from tests.rows.lengths import lengths_of

REPEATS = 5
CAPACITY = 4096
GOAL_TRL, GOAL_RAW = 4.0, 0.4


def prepared(folder: Path, count: int) -> Artifact:
    """Samples of lognormal lengths in slices of 10,000, as the prepare stage leaves them."""
    rng = np.random.default_rng(0)
    lengths = lengths_of("lognormal", count, CAPACITY)
    entries = []
    for first in range(0, count, 10_000):
        sizes = lengths[first : first + 10_000]
        offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
        ids = pa.array(rng.integers(0, 150_000, int(sizes.sum()), dtype=np.int32))
        lists = pa.ListArray.from_arrays(offsets, ids)
        source = pa.array(["a"] * len(sizes)).dictionary_encode()
        rows = pa.array(np.arange(len(sizes), dtype=np.int64))
        batch = pa.RecordBatch.from_arrays([lists, lists, source, rows], schema=PREPARED)
        file = f"data/train/slice-{first:016d}.arrow"
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        with pa.ipc.new_file(folder / file, PREPARED) as writer:
            writer.write_batch(batch)
        part = {"dataset": 0, "rows": len(sizes), "slice": f"{first:016d}"}
        entries.append({"file": file, "parts": [part]})
    mix = {"seed": 1, "weights": [1.0]}
    splits = {"train": entries, "validation": []}
    write_json(folder / "plan.json", {"kind": "sft", "mix": mix, "splits": splits})
    return Artifact("prepare", "0" * 64, folder)


def ours(artifact: Artifact, method: Any) -> Callable[[Path], None]:
    settings = PackSettings(sample_packing_method=method, sample_packing_sequence_len=CAPACITY)

    def write(out: Path) -> None:
        out.mkdir()
        Pack(settings, artifact).run(out)

    return write


def trl(table: pa.Table, batch_size: int | None) -> Callable[[Path], None] | None:
    try:
        pack_dataset = importlib.import_module("trl").pack_dataset
    except ImportError:
        return None

    def write(out: Path) -> None:
        out.mkdir()
        map_kwargs = {"cache_file_name": str(out / "cache.arrow"), "batch_size": batch_size or 1000}
        pack_dataset(datasets.Dataset(table), CAPACITY, map_kwargs=map_kwargs)

    return write


def take(table: pa.Table) -> Callable[[Path], None]:
    order = np.random.default_rng(0).permutation(len(table))

    def write(out: Path) -> None:
        with pa.OSFile(str(out), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            for part in np.array_split(order, max(1, len(order) // 7000)):
                writer.write_table(table.take(part))
        fsync(out)

    return write


def raw(num_bytes: int) -> Callable[[Path], None]:
    block = np.ones(16 << 20, dtype=np.uint8)

    def write(out: Path) -> None:
        with out.open("wb", buffering=0) as sink:
            for start in range(0, num_bytes, len(block)):
                sink.write(block[: num_bytes - start].data)
            os.fsync(sink.fileno())

    return write


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 40_000
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        artifact = prepared(folder / "prepared", count)
        files = sorted((folder / "prepared" / "data" / "train").iterdir())
        tables = (pa.ipc.open_file(pa.memory_map(str(file))).read_all() for file in files)
        table = pa.concat_tables(tables).select(["input_ids", "labels"])
        tokens = int(lengths_of("lognormal", count, CAPACITY).sum())
        writers = {
            "ours, multipack": ours(artifact, "multipack"),
            "ours, sequential": ours(artifact, "sequential"),
            "TRL pack_dataset": trl(table, None),
            "pyarrow take": take(table),
            "raw write and fsync": raw(8 * tokens),
        }
        seconds: dict[str, list[float]] = {name: [] for name, one in writers.items() if one}
        print(f"missing: {', '.join(set(writers) - set(seconds)) or 'none'}")
        for _ in range(REPEATS):
            for name in seconds:
                out = folder / "out"
                started = time.perf_counter()
                writers[name](out)
                seconds[name].append(time.perf_counter() - started)
                remove(out)
    rates = {name: tokens / statistics.median(some) / 1e6 for name, some in seconds.items()}
    print(f"{tokens / 1e6:.1f} M tokens, two columns of 4 bytes")
    for name, rate in rates.items():
        compared = (f"{rates['ours, multipack'] / rate:5.2f} x by ours", f"{rate:7.1f} M tokens/s")
        print(f"  {name:20} {compared[1]}   {compared[0]}")
    if "TRL pack_dataset" in rates:
        ratio = rates["ours, multipack"] / rates["TRL pack_dataset"]
        print(f"goal: {GOAL_TRL} x TRL; {ratio:.1f}")
    share = rates["ours, multipack"] / rates["raw write and fsync"]
    print(f"goal: {GOAL_RAW:.0%} of raw; {share:.0%}")


if __name__ == "__main__":
    main()
