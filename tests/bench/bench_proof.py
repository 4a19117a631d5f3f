"""What it costs to prove that files are what they were: read, and remembered.

    python -m tests.bench.bench_proof [FOLDER]

Files of random bytes in the page cache, written to FOLDER. Speeds are of the best of three rounds;
a pipeline is planned and looked at with and without proof, in a warm process.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from penstock.config.loading.load import load
from penstock.core.cache.digest_cache import digest_files
from penstock.core.cache.folder_digests import FolderDigests, digest_of_file
from penstock.core.cache.store import fetch_cached
from penstock.core.cache.verify import Verify
from penstock.pipeline.plan import plan
from tests.changes import worlds

FILES, FILE_BYTES, ROUNDS = 8, 128 << 20, 3
SMALL_FILES = 10_000
BLOCK = 1 << 20


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        folder = Path(name)
        os.environ["PENSTOCK_CACHE_HOME"] = str(folder / "cache")
        files = [folder / f"{number}.bin" for number in range(FILES)]
        for file in files:
            file.write_bytes(os.urandom(FILE_BYTES))
        compare_speeds(folder, files)
        small = folder / "small"
        small.mkdir()
        many = [small / str(number) for number in range(SMALL_FILES)]
        for file in many:
            file.write_bytes(file.name.encode())
        time.sleep(0.2)
        digest_files(many)
        print(f"{SMALL_FILES:,} files, remembered: {best(lambda: digest_files(many)):.3f} s")
        ask_again(folder / "run")


def compare_speeds(folder: Path, files: list[Path]) -> None:
    """Of reading, and of the digests that are in use."""
    written = FolderDigests({file.name: digest_of_file(file) for file in files})
    total = FILES * FILE_BYTES / 1e9
    works: dict[str, Callable[[], object]] = {
        "plain read": lambda: [read(file) for file in files],
        "sha256sum": lambda: subprocess.run(
            ["sha256sum", *files], check=True, stdout=subprocess.DEVNULL
        ),
        "SHA-256 of pins and manifests": lambda: digest_files(files, reread=True),
        "XXH3-128 of checkpoints": lambda: written.find_damage(folder),
    }
    for name, work in works.items():
        print(f"{name:32}{total / best(work):6.2f} GB/s", flush=True)
    digest_files(files)
    print(f"{'remembered':32}{best(lambda: digest_files(files)):6.4f} s for {FILES} files")


def ask_again(folder: Path) -> None:
    """A whole pipeline whose stages are all cached."""
    config, _ = worlds.text_run(folder)
    worlds.build(config)
    time.sleep(0.2)
    worlds.ask(config)
    seconds = {verify: best(lambda verify=verify: ask(config, verify)) for verify in MODES}
    for verify, taken in seconds.items():
        print(f"cached pipeline, verify {verify:10}{taken:6.3f} s")
    print(f"added by proof: {seconds['changed'] - seconds['off']:.3f} s")


MODES: tuple[Verify, ...] = ("off", "changed", "always")


def ask(config: Path, verify: Verify) -> None:
    for step in plan(load(config)).steps:
        assert fetch_cached(step, verify)


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest round."""
    taken: list[float] = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


def read(file: Path) -> None:
    with file.open("rb", buffering=0) as stream:
        while stream.read(BLOCK):
            pass


if __name__ == "__main__":
    main()
