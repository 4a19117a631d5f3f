"""Peak memory of preparing data: `python -m tests.bench.data.bench_prepare_memory [ROWS]`.

The prepare stage of ROWS (20,000) rows of some 2 KB and of four times as many, beside
`datasets.map(batched, num_proc=2)`, in turns, each in processes of its own. Printed is the sum of
the processes' proportional sets at its peak, over what they have after importing: of memory that
does not grow with the data both sizes take the same.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.bench.child_processes import run_measured
from tests.bench.data.bench_prepare import CHARACTERS, ours, theirs
from tests.bench.data.corpus import documents, save_tokenizer, write_lines
from tests.bench.figures import record

WAYS = {"prepare": ours, "datasets.map, 2 processes": theirs}
TIMES = 4
GROWTH = 1.25
"""Of our peak, from one size to the other, at most."""
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="?", type=int, default=20_000)
    parser.add_argument("--way", choices=[*WAYS], help=argparse.SUPPRESS)
    parser.add_argument("--folders", nargs=3, type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.folders:
        if asked.way:
            WAYS[asked.way](*asked.folders)
        return
    command = [sys.executable, "-m", "tests.bench.data.bench_prepare_memory"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tokenizer(folder / "tokenizer")
        peaks: dict[str, list[int]] = {way: [] for way in WAYS}
        for rows in (asked.rows, TIMES * asked.rows):
            data = folder / f"{rows}.jsonl"
            write_lines(data, [{"text": text} for text in documents(rows, CHARACTERS)])
            print(f"{rows} rows, {data.stat().st_size / 1e6:.1f} MB", flush=True)
            for way in WAYS:
                out = folder / f"{way} {rows}" / "prepare" / "0"
                folders = ["--folders", str(data), str(folder / "tokenizer"), str(out)]
                imported = run_measured([*command, *folders]).peak_bytes
                taken = run_measured([*command, "--way", way, *folders])
                peak = taken.peak_bytes - imported
                peaks[way].append(peak)
                record(f"{way}, {rows} rows: peak", peak / MIB, "MiB")
                print(f"  {way:26} + {peak / MIB:7.1f} MiB   {taken.seconds:6.2f} s", flush=True)
    small, large = peaks["prepare"]
    growth = large / small
    record("prepare: peak of four times as many rows", growth, goal=GROWTH, at_most=True)
    print(f"peak of {TIMES} times as many rows: {growth:.2f} x (goal: at most {GROWTH})")
    least = peaks["datasets.map, 2 processes"][1] / large
    print(f"datasets.map / ours at {TIMES * asked.rows} rows: {least:.2f}")


if __name__ == "__main__":
    main()
