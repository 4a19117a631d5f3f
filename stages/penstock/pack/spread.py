"""The files of a split, spread over processes. How many makes no difference to what they hold."""

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from penstock.core import env
from penstock.core.errors import StageError
from penstock.core.process.die_with_parent import end_with_starter
from penstock.core.process.main_module import without_main_module
from penstock.pack.layout import Layout, RowSamples, build_row_samples
from penstock.pack.settings import PackSettings
from penstock.pack.shards import ShardStats, read_shard_stats, write_shard
from penstock.rows.bin_plan import Indices, PackingPlan
from penstock.rows.prepared import PreparedSamples

StartMethod = Literal["fork", "spawn", "forkserver"]

SHARD_BYTES = 256 << 20
"""Of one file: large enough for an object store, small enough for many to be read at once."""

BYTES_PER_TOKEN = 8

MIN_TOKENS_PER_PROCESS = 16 << 20
"""Tokens below which a process takes longer to start than to write them."""


@dataclass(frozen=True)
class Workers:
    """Processes that write files."""

    count: int = 1
    start_method: StartMethod = "spawn"


@dataclass(frozen=True)
class ShardPlan:
    """One file to be, and what goes into it."""

    prepared: Path
    split: str
    target: Path
    bins: PackingPlan
    sizes: Indices
    """Tokens of the samples in `bins`, or of the pieces of samples."""
    begins: Indices | None
    """The first token of each piece in its sample; None where samples are whole."""
    settings: PackSettings


def plan_shards(
    prepared: Path, split: str, layout: Layout, folder: Path, settings: PackSettings
) -> list[ShardPlan]:
    """The files of a split, with about equally many rows each: as many as `num_shards` or by size,
    and never more than rows."""
    bins, sizes, begins = layout.bins, layout.sizes, layout.begins
    by_size = -(-int(sizes.sum()) * BYTES_PER_TOKEN // SHARD_BYTES)
    count = min(settings.num_shards or by_size, len(bins))
    found: list[ShardPlan] = []
    for index in range(count):
        low, high = (len(bins) * at // count for at in (index, index + 1))
        first = int(bins.ends[low - 1]) if low else 0
        last = int(bins.ends[high - 1])
        rows = PackingPlan(bins.samples[first:last], bins.ends[low:high] - first)
        target = folder / f"rows-{index:05d}-of-{count:05d}.arrow"
        its = None if begins is None else begins[first:last]
        shard = ShardPlan(prepared, split, target, rows, sizes[first:last], its, settings)
        found.append(shard)
    return found


def write_shards(shards: Sequence[ShardPlan], workers: Workers) -> list[ShardStats]:
    """Write the files that are not there, and say of all of them what they hold.

    Raises the first error in the order of the files.
    """
    missing = [shard for shard in shards if not shard.target.exists()]
    tokens = sum(int(shard.sizes.sum()) for shard in missing)
    count = min(workers.count, len(missing), max(1, tokens // MIN_TOKENS_PER_PROCESS))
    if count > 1:
        written = _in_processes(missing, count, workers.start_method)
    else:
        written = _in_this_process(missing)
    new = {shard.target: one for shard, one in zip(missing, written, strict=True)}
    return [new.get(shard.target) or read_shard_stats(shard.target) for shard in shards]


def _in_this_process(shards: Sequence[ShardPlan]) -> list[ShardStats]:
    if not shards:
        return []
    first = shards[0]
    form = _build_form(first.prepared, first.split, first.settings)
    return [write_shard(form, one.bins, one.sizes, one.target, one.begins) for one in shards]


def _in_processes(
    shards: Sequence[ShardPlan], count: int, start_method: StartMethod
) -> list[ShardStats]:
    pool = ProcessPoolExecutor(count, get_context(start_method), _init_worker)
    try:
        with without_main_module():
            futures = [pool.submit(_write_in_worker, shard) for shard in shards]
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        pool.shutdown(cancel_futures=True)
    for future in futures:
        failure = None if future.cancelled() else future.exception()
        if isinstance(failure, BrokenProcessPool):
            raise StageError(
                f"One of {count} packing processes was killed, most likely for want of memory.\n"
                "  Set data.dataset_num_proc lower."
            ) from failure
        if failure:
            raise failure
    return [future.result() for future in futures]


def _init_worker() -> None:
    """A process's first act: it ends with the one that started it, and needs no secrets."""
    end_with_starter()
    env.forget_secrets()


def _write_in_worker(shard: ShardPlan) -> ShardStats:
    settings: Any = shard.settings  # frozen, so it has a hash, which its type does not say
    form = _build_form_once(shard.prepared, shard.split, settings)
    return write_shard(form, shard.bins, shard.sizes, shard.target, shard.begins)


def _build_form(prepared: Path, split: str, settings: PackSettings) -> RowSamples:
    return build_row_samples(PreparedSamples(prepared, split), settings)


_build_form_once = lru_cache(maxsize=1)(_build_form)
"""Mapped once for all files that one worker writes; it lives no longer than the run."""
