"""Write the files of a split in several processes; the output does not depend on their number."""

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from penstock.core import env
from penstock.core.cache.attempt_files import take_over
from penstock.core.errors import StageError
from penstock.core.process.die_with_parent import end_with_starter
from penstock.core.process.main_module import without_main_module
from penstock.pack.plan_rows import RowPlan, RowSamples, build_row_samples
from penstock.pack.settings import PackSettings
from penstock.pack.shards import ShardStats, read_shard_stats, write_shard
from penstock.rows.bin_plan import Indices, PackingPlan
from penstock.rows.prepared import PreparedSamples

StartMethod = Literal["fork", "spawn", "forkserver"]

# Approximate size of one file: large enough for object stores, small enough to read several in
# parallel.
SHARD_BYTES = 256 << 20

# Token id and label, int32 each.
BYTES_PER_TOKEN = 8

# Tokens per process, below which starting a process takes longer than writing.
MIN_TOKENS_PER_PROCESS = 16 << 20


@dataclass(frozen=True)
class Workers:
    """Number and start method of writer processes."""

    count: int = 1
    start_method: StartMethod = "spawn"


@dataclass(frozen=True)
class ShardPlan:
    """One planned file and its content."""

    prepared: Path
    split: str
    target: Path
    bins: PackingPlan
    sizes: Indices
    """Number of tokens of each sample (or piece) in `bins`."""
    begins: Indices | None
    """Index of each piece's first token in its sample; None for whole samples."""
    settings: PackSettings


def plan_shards(
    prepared: Path, split: str, row_plan: RowPlan, folder: Path, settings: PackSettings
) -> list[ShardPlan]:
    """Plan the files of a split, with about equally many rows each: `num_shards` files, or by size;
    at most one per row."""
    bins, sizes, begins = row_plan.bins, row_plan.sizes, row_plan.begins
    by_size = -(-int(sizes.sum()) * BYTES_PER_TOKEN // SHARD_BYTES)
    count = min(settings.num_shards or by_size, len(bins))
    plans: list[ShardPlan] = []
    for index in range(count):
        low, high = (len(bins) * bound // count for bound in (index, index + 1))
        first = int(bins.ends[low - 1]) if low else 0
        last = int(bins.ends[high - 1])
        rows = PackingPlan(bins.samples[first:last], bins.ends[low:high] - first)
        target = folder / f"rows-{index:05d}-of-{count:05d}.arrow"
        shard_begins = None if begins is None else begins[first:last]
        plans.append(
            ShardPlan(prepared, split, target, rows, sizes[first:last], shard_begins, settings)
        )
    return plans


def write_shards(shards: Sequence[ShardPlan], workers: Workers) -> list[ShardStats]:
    """Write the missing files; returns the statistics of all files.

    Raises the first error in file order.
    """
    missing = [shard for shard in shards if not take_over(shard.target)]
    tokens = sum(int(shard.sizes.sum()) for shard in missing)
    count = min(workers.count, len(missing), max(1, tokens // MIN_TOKENS_PER_PROCESS))
    if count > 1:
        written = _in_processes(missing, count, workers.start_method)
    else:
        written: list[ShardStats] = []
        form = None
        for shard in missing:
            form = form or _build_form(shard.prepared, shard.split, shard.settings)
            written.append(write_shard(form, shard.bins, shard.sizes, shard.target, shard.begins))
    new = {shard.target: shard_stats for shard, shard_stats in zip(missing, written, strict=True)}
    return [
        new.get(shard.target) or read_shard_stats(shard.target, shard.sizes) for shard in shards
    ]


def _in_processes(
    shards: Sequence[ShardPlan], count: int, start_method: StartMethod
) -> list[ShardStats]:
    pool = ProcessPoolExecutor(count, get_context(start_method), _init_worker)
    try:
        with without_main_module():
            # The pool starts its processes at the first submit.
            futures = [pool.submit(_write_in_worker, shard) for shard in shards]
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        pool.shutdown(cancel_futures=True)
    for future in futures:
        failure = None if future.cancelled() else future.exception()
        if isinstance(failure, BrokenProcessPool):
            raise StageError(
                f"One of {count} packing processes was killed, most likely because memory "
                "ran out.\n  Set data.dataset_num_proc lower."
            ) from failure
        if failure:
            raise failure
    return [future.result() for future in futures]


def _init_worker() -> None:
    end_with_starter()
    env.forget_secrets()


def _write_in_worker(shard: ShardPlan) -> ShardStats:
    settings: Any = shard.settings  # frozen, so hashable, which its type does not say
    form = _build_form_once(shard.prepared, shard.split, settings)
    return write_shard(form, shard.bins, shard.sizes, shard.target, shard.begins)


def _build_form(prepared: Path, split: str, settings: PackSettings) -> RowSamples:
    return build_row_samples(PreparedSamples(prepared, split), settings)


# Cached: samples are memory-mapped once per worker process.
_build_form_once = lru_cache(maxsize=1)(_build_form)
