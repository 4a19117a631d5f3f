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
    collected_warnings,
    log_process_warnings,
)
from penstock.prepare.readers.file_splits import require_unchanged
from penstock.prepare.readers.read_slice import records
from penstock.prepare.settings import DatasetSettings
from penstock.prepare.slice_cache import Made, SliceCache
from penstock.prepare.slices import Slice
from penstock.prepare.tokenize_slice import tokenize
from penstock.rows.tokenizer import load_tokenizer

WORTH_A_PROCESS = 32 << 20
"""Bytes of a source below which a process takes longer to start than to do them."""


@dataclass(frozen=True)
class Recipe:
    """What slices are made with, and where they go."""

    cache: SliceCache
    tokenizer: str
    """Where it lies, as the user typed it."""
    revision: str | None
    tokenizer_key: str
    """What it is."""
    token: bool | None
    """Whether the hub's login is used; None: if there is one."""


def make_all(slices: Sequence[Slice], recipe: Recipe, num_proc: int) -> int:
    """Make those slices that are missing, and return how many this call made.

    Slices that another run is making are waited for last. Raises the first error in the order of
    the slices.
    """
    recipe.cache.exchange(slices)
    missing = _missing(slices, recipe.cache)
    num_bytes = sum(item.num_bytes for item in missing)
    workers = min(num_proc, len(missing), max(1, num_bytes // WORTH_A_PROCESS))
    if workers > 1:
        made = _in_processes(missing, recipe, workers)
    else:
        made = [make(item, recipe, "skip") for item in missing]
    busy = [item for item, became in zip(missing, made, strict=True) if became == "busy"]
    waited = [make(item, recipe, "wait") for item in busy]
    return (made + waited).count("made")


def make(item: Slice, recipe: Recipe, when_busy: Literal["wait", "skip"]) -> Made:
    """Make one slice in this process, unless it is there or another run is making it."""

    def write(target: Path) -> Tally:
        named = (recipe.tokenizer, recipe.revision, recipe.tokenizer_key)
        its: Any = item.settings  # frozen, so hashable, which its type does not tell
        encode = _encoder(its, item.columns, *named)
        tally = tokenize(item, encode, target, partial(records, item, recipe.token))
        require_unchanged(piece.file for piece in item.pieces)
        return tally

    return recipe.cache.make(item, write, when_busy)


def _missing(slices: Sequence[Slice], cache: SliceCache) -> list[Slice]:
    """Those that are not there, once each."""
    once = list({item.content: item for item in slices}.values())
    return [item for item, there in zip(once, cache.finished(once), strict=True) if not there]


def _in_processes(slices: list[Slice], recipe: Recipe, workers: int) -> list[Made]:
    """Biggest first, so that no process is left alone with much work at the end."""
    # Not forked: the parent may hold threads and locks of the tokenizers library.
    context = get_context("spawn")
    threads = max(1, env.num_processors() // workers)
    begin = (os.getpid(), threads, _purposes(slices, recipe))
    pool = ProcessPoolExecutor(workers, context, _begin, begin)
    try:
        by_size = sorted(slices, key=lambda item: -item.num_bytes)
        with without_main_module():
            futures = {item.content: pool.submit(_make_apart, item, recipe) for item in by_size}
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


def _make_apart(item: Slice, recipe: Recipe) -> tuple[Made, ProcessWarnings]:
    """Make a slice in a process of the pool."""
    with collected_warnings() as messages:
        made = make(item, recipe, "skip")
    return made, ProcessWarnings(str(os.getpid()), messages)


def _purposes(slices: Sequence[Slice], recipe: Recipe) -> set[Purpose]:
    """What the processes need credentials for."""
    pieces = [piece for item in slices for piece in item.pieces]
    found: set[Purpose] = set()
    is_local = recipe.tokenizer.startswith("builtin:") or Path(recipe.tokenizer).exists()
    if not is_local or any(piece.reader in ("hub", "stream") for piece in pieces):
        found.add("hub")
    if any(piece.file and isinstance(piece.file.location, str) for piece in pieces):
        found |= {"cloud", "hub"}
    return found


def _begin(parent: int, threads: int, purposes: Collection[Purpose]) -> None:
    """A process's first act: it ends with its parent, forgets secrets that it has no use for, and
    leaves the others their processors."""
    end_with_parent(parent)
    env.forget_secrets(purposes)
    env.default({"RAYON_NUM_THREADS": str(threads)})  # read when a tokenizer first works


@lru_cache(maxsize=8)
def _encoder(
    its: DatasetSettings, columns: tuple[str, ...] | None, path: str, revision: str | None, key: str
) -> Encoder:
    """Made once in each process for all slices of a source."""
    return Encoder(its, _loaded(path, revision, key), columns)


@lru_cache(maxsize=2)
def _loaded(path: str, revision: str | None, key: str) -> PreTrainedTokenizerBase:
    """Loaded once in each process, for as long as what lies there is the same."""
    del key
    return load_tokenizer(path, revision)
