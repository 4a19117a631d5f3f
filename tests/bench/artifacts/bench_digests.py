"""What digests of checkpoints cost: `python -m tests.bench.artifacts.bench_digests [GIGABYTES]`.

A checkpoint of so many gigabytes (2) of fp32 tensors, on one process of one thread. Saves with and
without digests take turns, each with the disk idle before it; then all bytes are verified, from the
page cache and from the disk. Medians of three.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.core.cache.folder_digests import Digester, FolderDigests
from penstock.engine.checkpoint.dcp_io import Boxes, whole_box
from penstock.engine.checkpoint.dcp_writer import write_boxes

REPEATS = 3
NUMBERS = 16 << 20
"""Of a tensor: 64 MiB."""


def seconds(act: Callable[[], object]) -> float:
    os.sync()
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def no_update(self: Digester, data: bytes | bytearray | memoryview) -> None:
    """In place of `Digester.update`."""


def save(boxes: Boxes, folder: Path, *, digested: bool) -> float:
    """Seconds of writing the tensors to a new folder, and forcing them to the disk."""
    shutil.rmtree(folder, ignore_errors=True)
    update = Digester.update
    if not digested:
        Digester.update = no_update
    try:
        return seconds(lambda: write_boxes(boxes, folder, None))
    finally:
        Digester.update = update


def evict(folder: Path) -> None:
    """Have the system forget the content of the files."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read(folder: Path) -> None:
    """All bytes, and nothing else, one after another."""
    block = bytearray(1 << 20)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    count = max(1, round(float(sys.argv[1] if len(sys.argv) > 1 else 2) * 1e9 / (4 * NUMBERS)))
    boxes = {f"model.{number}": [whole_box(torch.randn(NUMBERS))] for number in range(count)}
    size = count * NUMBERS * 4 / 1e9
    print(f"{size:.2f} GB, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "checkpoint"
        without, with_digests = [], []
        for _ in range(REPEATS):
            without.append(save(boxes, folder, digested=False))
            with_digests.append(save(boxes, folder, digested=True))
        pair = statistics.median(without), statistics.median(with_digests)
        print(f"save: {pair[0]:.2f} s without digests, {pair[1]:.2f} s with")
        tensors = [box.data.numpy().view("u1").data for each in boxes.values() for box in each]

        def digest() -> None:
            digester = Digester()
            for tensor in tensors:
                digester.update(tensor)

        own = statistics.median(seconds(digest) for _ in range(REPEATS))
        print(f"digests alone: {own:.3f} s, {size / own:.1f} GB/s, {own / pair[1]:.2%} of a save")
        digests = FolderDigests(write_boxes(boxes, folder, None))
        os.sync()
        for where in ("page cache", "disk"):
            times: dict[str, list[float]] = {"read": [], "verified": []}
            for _ in range(REPEATS):
                for name, act in (("read", read), ("verified", digests.find_damage)):
                    if where == "disk":
                        evict(folder)
                    times[name].append(seconds(lambda act=act: act(folder)))
            told = ", ".join(
                f"{name} at {size / statistics.median(each):.2f} GB/s"
                for name, each in times.items()
            )
            print(f"{where}: {told}")


if __name__ == "__main__":
    main()
