"""What verifying a result costs: the first time, remembered, and always.

    python -m tests.bench.artifacts.bench_verify [GIGABYTES] [FILES]

A sealed result of random bytes (5 GB in 8 files unless said) is made in a temporary folder and
deleted afterwards. `first` reads every file, from the page cache where they fit; `changed` is what
a run pays after that; `start` is how long a memory of 10,000 files takes.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.core.cache.digest_cache import digest_files, sha256_file
from penstock.core.cache.verify import Verify, damaged_files
from penstock.core.env import default

BLOCK = 64 << 20
MANY = 10_000


def main() -> None:
    """Print a line for each way."""
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        default({"PENSTOCK_CACHE_HOME": str(root / "cache")})
        files = [_write(root, number, int(gigabytes * 1e9 / count)) for number in range(count)]

        def verify(how: Verify) -> None:
            assert damaged_files(root, files, "always" if how == "always" else "changed") == []

        total = gigabytes
        _tell("first", total, lambda: verify("changed"))
        _tell("changed", total, lambda: verify("changed"))
        _tell("always", total, lambda: verify("always"))
        _tell("one thread", total, lambda: [sha256_file(root / f["path"]) for f in files])
        small = root / "small"
        small.mkdir()
        paths = [small / str(number) for number in range(MANY)]
        for path in paths:
            path.write_bytes(b"x")
            os.utime(path, (1, 1))
        digest_files(paths)
        _tell(f"changed, {MANY:,} files", 0.0, lambda: digest_files(paths))


def _write(root: Path, number: int, size: int) -> dict[str, Any]:
    path = root / f"rows-{number:05d}.arrow"
    with path.open("wb") as stream:
        for start in range(0, size, BLOCK):
            stream.write(os.urandom(min(BLOCK, size - start)))
    os.utime(path, (1, 1))
    return {"path": path.name, "bytes": size, "sha256": sha256_file(path)}


def _tell(name: str, gigabytes: float, work: Callable[[], object]) -> None:
    began = time.perf_counter()
    work()
    passed = time.perf_counter() - began
    speed = f"{gigabytes / passed:8.2f} GB/s" if gigabytes else ""
    print(f"{name:24} {passed:9.4f} s {speed}")


if __name__ == "__main__":
    main()
