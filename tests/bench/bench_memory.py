"""Peak memory of preparing: `python -m tests.bench.bench_memory [SMALL_MB LARGE_MB]`.

JSON lines of two sizes (default 100 and 1000 MB) are prepared by two processes each, with samples
set aside for validation; printed are the peak resident sets of the stage's own process and of the
largest of its workers. Goal: the large one needs at most 1.2 times as much as the small one.
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from penstock.core.sources.pin import pin_data, pin_tokenizer
from penstock.prepare.settings import DatasetSettings, PrepareSettings
from penstock.prepare.stage import Prepare
from tests.bench.data.corpus import documents, save_tokenizer

CHARACTERS = 2100
GOAL = 1.2


def measure(data: Path, tokenizer: Path, out: Path) -> dict[str, float]:
    """Peak megabytes of this process and of its largest child after preparing `data`."""
    stage = Prepare(
        settings=PrepareSettings(datasets=(DatasetSettings(type="text"),), val_set_size=1000),
        sources=(pin_data(str(data)),),
        test_sources=(),
        tokenizer=pin_tokenizer(str(tokenizer)),
        tokenizer_path=str(tokenizer),
        num_proc=2,
    )
    out.mkdir(parents=True)
    facts = stage.run(out)
    # A process inherits the peak that getrusage tells from its parent, but not this one.
    status = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()
    workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {
        "stage": int(status[0]) / 1e3,
        "worker": workers / 1e3,
        "samples": facts["rows"]["train"],
    }


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*map(Path, sys.argv[2:5]))))
        return
    sizes = [int(size) for size in sys.argv[1:3]] or [100, 1000]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        save_tokenizer(place / "tokenizer")
        texts = documents(20_000, CHARACTERS)
        peaks: list[dict[str, float]] = []
        for size in sizes:
            data = place / f"{size}.jsonl"
            with data.open("w", encoding="utf-8") as sink:
                number = 0
                while sink.tell() < size * 1e6:
                    text = f"{number} {texts[number % len(texts)]}"
                    sink.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                    number += 1
            command = [sys.executable, "-m", "tests.bench.bench_memory", "--measure"]
            paths = [str(data), str(place / "tokenizer"), str(place / f"out-{size}" / "p" / "x")]
            done = subprocess.run([*command, *paths], check=True, capture_output=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            peaks.append(found)
            print(
                f"{size:6} MB, {found['samples']:8.0f} samples: stage {found['stage']:7.1f} MB, "
                f"largest worker {found['worker']:7.1f} MB"
            )
    small, large = (max(found["stage"], found["worker"]) for found in peaks)
    print(f"peak {large / small:.2f}x, goal at most {GOAL}x")


if __name__ == "__main__":
    main()
