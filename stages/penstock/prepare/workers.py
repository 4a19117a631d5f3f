"""Slices spread over processes. How many makes no difference to what they write."""

import os
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from penstock.core import env
from penstock.core.errors import StageError
from penstock.core.process.allowed_env import Purpose
from penstock.core.process.die_with_parent import end_with_parent
from penstock.core.process.main_module import without_main_module
from penstock.prepare.bad_records import Tally
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.process_warnings import (
    ProcessWarnings,
    collect_warnings,
    log_process_warnings,
)
from penstock.prepare.readers.file_splits import require_unchanged
from penstock.prepare.readers.read_slice import read_records
from penstock.prepare.settings import DatasetSettings
from penstock.prepare.slice_cache import SliceCache, SliceStatus
from penstock.prepare.slices import Slice
from penstock.prepare.tokenize_slice import tokenize
from penstock.rows.tokenizer import load_tokenizer

MIN_BYTES_PER_PROCESS = 32 << 20
"""Bytes of a source below which a process takes longer to start than to do them."""


@dataclass(frozen=True)
class WorkerConfig:
    """What slices are made with, and where they go."""

    cache: SliceCache
    tokenizer: str
    """Where it lies, as the user typed it."""
    revision: str | None
    tokenizer_key: str
    """What it is."""
    token: bool | None
    """Whether the hub's login is used; None: if there is one."""


def tokenize_missing(slices: Sequence[Slice], config: WorkerConfig, num_proc: int) -> int:
    """Make those slices that are missing, and return how many this call made.

    Slices that another run is making are waited for last. Raises the first error in the order of
    the slices.
    """
    config.cache.exchange(slices)
    missing = _find_missing(slices, config.cache)
    num_bytes = sum(item.num_bytes for item in missing)
    workers = min(num_proc, len(missing), max(1, num_bytes // MIN_BYTES_PER_PROCESS))
    if workers > 1:
        made = _tokenize_in_processes(missing, config, workers)
    else:
        made = [tokenize_one(item, config, "skip") for item in missing]
    busy = [item for item, became in zip(missing, made, strict=True) if became == "busy"]
    waited = [tokenize_one(item, config, "wait") for item in busy]
    return (made + waited).count("made")


def tokenize_one(
    item: Slice, config: WorkerConfig, when_busy: Literal["wait", "skip"]
) -> SliceStatus:
    """Make one slice in this process, unless it is there or another run is making it."""

    def write(target: Path) -> Tally:
        named = (config.tokenizer, config.revision, config.tokenizer_key)
        its: Any = item.settings  # frozen, so hashable, which its type does not tell
        encode = _build_encoder(its, item.columns, *named)
        tally = tokenize(item, encode, target, partial(read_records, item, config.token))
        require_unchanged(piece.file for piece in item.pieces)
        return tally

    return config.cache.get_or_tokenize(item, write, when_busy)


def _find_missing(slices: Sequence[Slice], cache: SliceCache) -> list[Slice]:
    """Those that are not there, once each."""
    once = list({item.content: item for item in slices}.values())
    return [item for item, there in zip(once, cache.lookup(once), strict=True) if not there]


def _tokenize_in_processes(
    slices: list[Slice], config: WorkerConfig, workers: int
) -> list[SliceStatus]:
    """Biggest first, so that no process is left alone with much work at the end."""
    # Not forked: the parent may hold threads and locks of the tokenizers library.
    context = get_context("spawn")
    threads = max(1, env.num_processors() // workers)
    begin = (os.getpid(), threads, _credential_purposes(slices, config))
    pool = ProcessPoolExecutor(workers, context, _init_worker, begin)
    try:
        by_size = sorted(slices, key=lambda item: -item.num_bytes)
        with without_main_module():
            futures = {
                item.content: pool.submit(_tokenize_in_worker, item, config) for item in by_size
            }
        wait(futures.values(), return_when=FIRST_EXCEPTION)
    finally:
        pool.shutdown(cancel_futures=True)
    ended = [done for done in futures.values() if done.done() and not done.cancelled()]
    log_process_warnings(done.result()[1] for done in ended if not done.exception())
    in_order = [futures[item.content] for item in slices]
    failures = [done.exception() for done in in_order if not done.cancelled()]
    for failure in failures:
        if isinstance(failure, BrokenProcessPool):
            raise StageError(
                f"One of {workers} preparing processes was killed, most likely for want of "
                "memory.\n  Set data.dataset_num_proc lower."
            ) from failure
        if failure:
            raise failure
    return [done.result()[0] for done in in_order]


def _tokenize_in_worker(item: Slice, config: WorkerConfig) -> tuple[SliceStatus, ProcessWarnings]:
    """Make a slice in a process of the pool."""
    with collect_warnings() as messages:
        made = tokenize_one(item, config, "skip")
    return made, ProcessWarnings(str(os.getpid()), messages)


def _credential_purposes(slices: Sequence[Slice], config: WorkerConfig) -> set[Purpose]:
    """What the processes need credentials for."""
    pieces = [piece for item in slices for piece in item.pieces]
    found: set[Purpose] = set()
    is_local = config.tokenizer.startswith("builtin:") or Path(config.tokenizer).exists()
    if not is_local or any(piece.reader in ("hub", "stream") for piece in pieces):
        found.add("hub")
    if any(piece.file and isinstance(piece.file.location, str) for piece in pieces):
        found |= {"cloud", "hub"}
    return found


def _init_worker(parent: int, threads: int, purposes: Collection[Purpose]) -> None:
    """A process's first act: it ends with its parent, forgets secrets that it has no use for, and
    leaves the others their processors."""
    end_with_parent(parent)
    env.forget_secrets(purposes)
    env.default({"RAYON_NUM_THREADS": str(threads)})  # read when a tokenizer first works


@lru_cache(maxsize=8)
def _build_encoder(
    its: DatasetSettings, columns: tuple[str, ...] | None, path: str, revision: str | None, key: str
) -> Encoder:
    """Made once in each process for all slices of a source."""
    return Encoder(its, _load_tokenizer_once(path, revision, key), columns)


@lru_cache(maxsize=2)
def _load_tokenizer_once(path: str, revision: str | None, key: str) -> PreTrainedTokenizerBase:
    """Loaded once in each process, for as long as what lies there is the same."""
    del key
    return load_tokenizer(path, revision)
