"""How fast packed rows become a trainer's batches: `python -m tests.bench.data.bench_read [ROWS]`.

Rows of 4096 tokens in a random order, one and four to a micro-batch, with position ids. Beside it
a PyTorch DataLoader over the same rows mapped by `datasets` in torch format, whose collator lays
rows end to end and counts positions too. Tokens per CPU second of one thread; medians of five,
interleaved in one process.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from torch.utils.data import DataLoader

from penstock.rows.arrow import map_batches
from penstock.rows.reader import PackedRows
from penstock.rows.schema import PACKED
from penstock.train.dataloader import Loader, LoaderConfig

LENGTH, REPEATS, PEER_ROWS = 4096, 5, 1000
HERE = LoaderConfig(
    num_workers=0, steps_ahead=2, pin_memory=False, pad_to_multiple_of=128, pad_to="own"
)


def write(folder: Path, num_rows: int) -> None:
    """Full rows of about eight documents, in two shards of batches of 1000 rows."""
    rng = np.random.default_rng(0)
    for shard in range(2):
        path = folder / f"rows-{shard:05d}-of-00002.arrow"
        with pa.ipc.new_file(str(path), PACKED) as writer:
            for low in range(0, num_rows // 2, 1000):
                count = min(1000, num_rows // 2 - low)
                flat = pa.array(rng.integers(0, 150_000, count * LENGTH), pa.int32())
                ends = pa.array(np.arange(count + 1) * LENGTH, pa.int32())
                tokens = pa.ListArray.from_arrays(ends, flat)
                cuts = np.sort(rng.integers(1, LENGTH, (count, 7)), axis=1)
                lengths = np.diff(cuts, axis=1, prepend=0, append=LENGTH)
                columns = [tokens, tokens, pa.array(list(lengths), pa.list_(pa.int32()))]
                writer.write_batch(pa.record_batch(columns, schema=PACKED))


def ours(folder: Path, size: int, order: list[int]) -> float:
    """CPU seconds for all rows, from an open reader."""
    groups = ([order[at : at + size]] for at in range(0, len(order), size))
    loader = Loader(PackedRows(folder), groups, HERE)
    started = time.process_time()
    for [batch] in loader:
        assert len(batch.position_ids_T) == size * LENGTH
    return time.process_time() - started


def peer(folder: Path, size: int, order: list[int]) -> float:
    """CPU seconds for these rows."""
    batches = [b for file in sorted(folder.iterdir()) for b in map_batches(file)]
    rows = Dataset(InMemoryTable(pa.Table.from_batches(batches))).with_format("torch")
    some = torch.utils.data.Subset(rows, order)  # pyright: ignore[reportArgumentType]
    started = time.process_time()
    for batch in DataLoader(some, batch_size=size, collate_fn=end_to_end):
        assert len(batch["position_ids"]) == size * LENGTH
    return time.process_time() - started


def end_to_end(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What a step takes, of rows as `datasets` gives them."""
    return {
        "input_ids": torch.cat([row["input_ids"] for row in rows]),
        "labels": torch.cat([row["labels"] for row in rows]),
        "position_ids": torch.cat(
            [torch.arange(length) for row in rows for length in row["lengths"].tolist()]
        ),
    }


def first_batch(folder: Path) -> float:
    """Seconds from opening the folder to the first batch."""
    started = time.perf_counter()
    rows = PackedRows(folder)
    steps: Iterator[list[list[int]]] = iter([[[len(rows) - 1]]])
    next(Loader(rows, steps, HERE))
    return time.perf_counter() - started


def costs(folder: Path) -> float:
    """Seconds for the numbers that rows are balanced by."""
    rows = PackedRows(folder)
    started = time.perf_counter()
    assert len(rows.lengths()) == len(rows.squares())
    return time.perf_counter() - started


def main() -> None:
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, num_rows)
        order = np.random.default_rng(1).permutation(num_rows).tolist()
        few = order[: min(PEER_ROWS, num_rows)]
        ways: dict[str, Callable[[], float]] = {
            "ours, 1 row": lambda: len(order) * LENGTH / ours(folder, 1, order),
            "ours, 4 rows": lambda: len(order) * LENGTH / ours(folder, 4, order),
            "datasets, 1 row": lambda: len(few) * LENGTH / peer(folder, 1, few),
            "datasets, 4 rows": lambda: len(few) * LENGTH / peer(folder, 4, few),
        }
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        firsts, measured = [], []
        for _ in range(REPEATS):
            firsts.append(first_batch(folder))
            measured.append(costs(folder))
            for way, run in ways.items():
                speeds[way].append(run())
    median = {way: statistics.median(found) for way, found in speeds.items()}
    for way, speed in median.items():
        against = median[f"datasets, {way.rpartition(', ')[2]}"]
        print(f"{way:18} {speed / 1e6:8.1f} M tokens/CPU s   {speed / against:6.1f} x datasets")
    print(f"goals: 100 M tokens/s, 5 x datasets; {num_rows} rows")
    print(f"first batch after opening: {1e3 * statistics.median(firsts):.2f} ms (goal 50)")
    print(f"costs of all rows:         {1e3 * statistics.median(measured):.2f} ms")


if __name__ == "__main__":
    main()
