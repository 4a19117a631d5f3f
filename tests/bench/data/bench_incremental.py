"""What new data costs: `python -m tests.bench.data.bench_incremental [MB_PER_SLICE]`.

A source of 100 slices is prepared, then one slice more is added and it is prepared again: once as a
folder of files that gets another file, once as a single file that grows. Printed are the slices
that were tokenized and the wall and CPU seconds of pinning, preparing and sealing, the process
being warm (an unmeasured run comes first). Goal: the second run does at most 2 % of the first.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

from penstock.core.cache.stage import short, stage_key
from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.core.sources.pin import pin_data, pin_tokenizer
from penstock.prepare.readers import file_splits
from penstock.prepare.settings import DatasetSettings, PrepareSettings
from penstock.prepare.stage import Prepare
from tests.bench.data.corpus import documents, save_tokenizer, write_lines

SLICES = 100
CHARACTERS = 2100
GOAL = 0.02


def prepared(data: Path, tokenizer: Path, root: Path) -> tuple[int, float, float]:
    """Prepare the data; the slices tokenized, wall seconds, CPU seconds."""
    cache = root / "slices"
    before = len(list(cache.glob("*.arrow")))
    started, cpu = time.perf_counter(), time.process_time()
    stage = Prepare(
        settings=PrepareSettings(datasets=(DatasetSettings(type="text"),), val_set_size=100),
        sources=(pin_data(str(data)),),
        test_sources=(),
        tokenizer=pin_tokenizer(str(tokenizer)),
        tokenizer_path=str(tokenizer),
    )
    get_or_build(PlannedStage(stage, root / "prepare" / short(stage_key(stage))))
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    return len(list(cache.glob("*.arrow"))) - before, wall, cpu


def compared(
    name: str, data: Path, tokenizer: Path, root: Path, grow: Callable[[Path], None]
) -> None:
    first = prepared(data, tokenizer, root)
    grow(data)
    second = prepared(data, tokenizer, root)
    for what, (slices, wall, cpu) in {"first": first, "one more": second}.items():
        print(f"{name:22} {what:9} {slices:4} slices {wall:8.2f} s {cpu:8.2f} CPU s")
    shares = [b / a for a, b in zip(first, second, strict=True)]
    print(f"{name:22} {'share':9} {shares[0]:11.2%} {shares[1]:9.2%} {shares[2]:9.2%}")
    print(f"goal: at most {GOAL:.0%} of the slices and of the wall time")


def main() -> None:
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 12.0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        save_tokenizer(place / "tokenizer")
        pool = documents(20_000, CHARACTERS)
        each = int(megabytes * 1e6 / CHARACTERS)

        def slice_number(number: int) -> list[dict[str, str]]:
            start = number * each % len(pool)
            texts = islice(cycle(pool), start, start + each)
            return [{"text": f"{number} {text}"} for text in texts]

        def write(path: Path, number: int) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_lines(path, slice_number(number))

        write(place / "warm.jsonl", 0)
        prepared(place / "warm.jsonl", place / "tokenizer", place / "warm")

        files = place / "files"
        for number in range(SLICES):
            write(files / f"{number:03}.jsonl", number)
        compared(
            "a folder, a file more",
            files,
            place / "tokenizer",
            place / "root",
            lambda data: write(data / f"{SLICES}.jsonl", SLICES),
        )

        file_splits.SLICE_BYTES = int((files / "000.jsonl").stat().st_size)
        grown = place / "grown.jsonl"
        with grown.open("wb") as sink:
            for file in sorted(files.iterdir())[:SLICES]:
                sink.write(file.read_bytes())

        def append(data: Path) -> None:
            with data.open("ab") as sink:
                sink.write((files / f"{SLICES}.jsonl").read_bytes())

        compared("a file, lines more", grown, place / "tokenizer", place / "grown", append)


if __name__ == "__main__":
    main()
