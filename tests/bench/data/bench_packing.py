"""How few rows packing needs and how fast, beside what others use:
`python -m tests.bench.data.bench_packing`.

For every distribution, capacity and number of samples: rows over the lower bound and the CPU
seconds of a plan (nobody's uses more than one thread), the median of several runs that take turns
in one process. Peers that are not installed are named as missing. Best fit decreasing of all
samples at once stands for the peers that need minutes for it. `--memory N` only says what N samples
take.
"""

import argparse
import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.rows.bin_plan import sequential
from penstock.rows.packing.best_fit import best_fit
from penstock.rows.packing.lower_bound import fewest_rows
from penstock.rows.packing.multipack import multipack
from tests.rows.lengths import NAMES, lengths_of

Packer = Callable[[np.ndarray, int], int]
"""Lengths and capacity to the number of rows."""

OURS = "ours"
GOALS = {4096: 15, 8192: 7, 32768: 2}
"""How many times as fast as axolotl a million lognormal lengths are to be packed."""


def ours(lengths: np.ndarray, capacity: int) -> int:
    rng = np.random.Generator(np.random.PCG64(0))
    return len(multipack(lengths, capacity, len(lengths), rng))


def ours_in_groups(lengths: np.ndarray, capacity: int) -> int:
    rng = np.random.Generator(np.random.PCG64(0))
    return len(multipack(lengths, capacity, 100_000, rng))


def next_fit(lengths: np.ndarray, capacity: int) -> int:
    return len(sequential(lengths, capacity))


def global_best_fit(lengths: np.ndarray, capacity: int) -> int:
    return best_fit(np.bincount(lengths, minlength=capacity + 1), (), capacity).num_rows


def peers() -> tuple[dict[str, tuple[Packer, int]], list[str]]:
    """What is installed, each with the most samples it can be asked for, and what is missing."""
    found: dict[str, tuple[Packer, int]] = {}
    missing = []
    try:
        pack_parallel = importlib.import_module("axolotl.utils.samplers.multipack").pack_parallel

        def axolotl(lengths: np.ndarray, capacity: int) -> int:
            return len(pack_parallel(lengths, capacity, 100_000, capacity, 1))

        axolotl(np.array([1, 2, 3]), 4)  # compiles
        found["axolotl multipack"] = axolotl, 10**7
    except ImportError as error:
        missing.append(f"axolotl ({error})")
    try:
        greedy_knapsack = _file_of(
            "llamafactory", "data/processor/processor_utils.py"
        ).greedy_knapsack

        def llama_factory(lengths: np.ndarray, capacity: int) -> int:
            parts = (lengths[i : i + 1000].tolist() for i in range(0, len(lengths), 1000))
            return sum(len(greedy_knapsack(part, capacity)) for part in parts)

        def llama_factory_global(lengths: np.ndarray, capacity: int) -> int:
            return len(greedy_knapsack(lengths.tolist(), capacity))

        found["LLaMA-Factory"] = llama_factory, 10**6
        found["LLaMA-Factory global"] = llama_factory_global, 10**5
    except ImportError as error:
        missing.append(f"LLaMA-Factory ({error})")
    try:
        import datasets
        import pyarrow as pa

        pack_dataset = importlib.import_module("trl").pack_dataset

        datasets.disable_progress_bars()
        datasets.disable_caching()

        def trl(lengths: np.ndarray, capacity: int, batch: int = 1000) -> int:
            # It cannot plan without moving tokens, so they are as small as they can be.
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            ids = pa.LargeListArray.from_arrays(offsets, np.zeros(offsets[-1], dtype=np.int8))
            table = datasets.Dataset(pa.table({"input_ids": ids}))
            return len(pack_dataset(table, capacity, map_kwargs={"batch_size": batch}))

        found["TRL bfd"] = trl, 10**4
        found["TRL bfd global"] = (
            lambda lengths, capacity: trl(lengths, capacity, len(lengths)),
            10**4,
        )
    except ImportError as error:
        missing.append(f"TRL ({error})")
    return found, missing


def _file_of(package: str, path: str) -> Any:
    """One file of a package, without what the package imports besides."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"No module named {package!r}")
    file = Path(found.submodule_search_locations[0]) / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def measure(packers: dict[str, Packer], lengths: np.ndarray, capacity: int, repeat: int) -> dict:
    """(rows, median seconds) of each; they take turns."""
    rows, seconds = {}, {name: [] for name in packers}
    for turn in range(repeat):
        for name, packer in packers.items():
            if turn and seconds[name][0] > 5:
                continue  # once is enough to know
            started = time.process_time()
            rows[name] = packer(lengths, capacity)
            seconds[name].append(time.process_time() - started)
    return {name: (rows[name], statistics.median(seconds[name])) for name in packers}


def memory(count: int) -> None:
    """The memory that packing takes beyond the lengths, in a process of its own. Linux only."""
    lengths = lengths_of("lognormal", count, 4096)
    ours(lengths[:10_000], 4096)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making the lengths
    before = _status("VmRSS")
    started = time.process_time()
    rows = ours(lengths, 4096)
    seconds = time.process_time() - started
    bound = fewest_rows(np.bincount(lengths, minlength=4097), 4096)
    print(
        f"{count} samples: {seconds:.2f} CPU s, {(_status('VmHWM') - before) / count:.0f} bytes a "
        f"sample, rows / bound {rows / bound:.5f}   goals for 10,000,000: 2.5 s, 60 bytes, 1.0001"
    )


def _status(name: str) -> int:
    [line] = [s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(name)]
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--capacity", type=int, nargs="+", default=[4096, 8192, 32768])
    parser.add_argument("--names", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    parser.add_argument("--memory", type=int, metavar="N")
    arguments = parser.parse_args()
    if arguments.memory:
        memory(arguments.memory)
        return
    found, missing = peers()
    print(f"missing: {', '.join(missing) or 'none'}")
    own: dict[str, tuple[Packer, int]] = {
        OURS: (ours, 10**9),
        "ours, groups of 100,000": (ours_in_groups, 10**9),
        "sequential": (next_fit, 10**9),
        "best fit decreasing": (global_best_fit, 10**9),
    }
    records, beaten = [], []
    for name in arguments.names:
        for capacity in arguments.capacity:
            for count in arguments.n:
                lengths = lengths_of(name, count, capacity)
                bound = fewest_rows(np.bincount(lengths, minlength=capacity + 1), capacity)
                packers = {n: p for n, (p, most) in {**own, **found}.items() if count <= most}
                results = measure(packers, lengths, capacity, arguments.repeat)
                print(f"\n{name}, rows of {capacity}, {count} samples; bound {bound}")
                ours_rows, ours_seconds = results[OURS]
                for packer, (rows, seconds) in results.items():
                    print(
                        f"  {packer:24} {rows / bound:8.5f} {rows - bound:+7d} rows "
                        f"{seconds:9.4f} s {seconds / ours_seconds:8.2f} x our time"
                    )
                    record = {"name": name, "capacity": capacity, "count": count, "bound": bound}
                    records.append({**record, "packer": packer, "rows": rows, "seconds": seconds})
                    if rows < ours_rows and packer != "ours, groups of 100,000":
                        beaten.append(f"{name} {capacity} {count}: {packer} {rows} < {ours_rows}")
                    if (name, count, packer) == ("lognormal", 10**6, "axolotl multipack"):
                        print(f"  goal: {GOALS.get(capacity)} x axolotl's speed")
    print("\nfewer rows than ours:", "; ".join(beaten) or "none, anywhere")
    this = [sys.executable, "-m", "tests.bench.data.bench_packing"]
    subprocess.run([*this, "--memory", "10000000"], check=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
