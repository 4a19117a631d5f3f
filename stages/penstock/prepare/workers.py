"""Tokenize slices in several processes; the output does not depend on their number."""

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
from penstock.core.cache.stage import Source
from penstock.core.errors import CapabilityError, StageError
from penstock.core.process.allowed_env import Purpose
from penstock.core.process.die_with_parent import end_with_parent
from penstock.core.process.main_module import without_main_module
from penstock.core.sources.unchanged import pinned_files, require_unchanged
from penstock.media.bounds import MediaBounds
from penstock.media.cache import MediaCache, MediaCounts
from penstock.media.kinds import KINDS
from penstock.media.load import load_processor
from penstock.media.model_processor import ModelProcessor
from penstock.prepare.bad_records import Tally
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.encode.images import ImagesFound, ImageTokenFound
from penstock.prepare.process_warnings import (
    ProcessWarnings,
    collect_warnings,
    log_process_warnings,
)
from penstock.prepare.readers.file_splits import require_unchanged_pieces
from penstock.prepare.readers.image_pins import require_unchanged_images
from penstock.prepare.readers.read_slice import read_records
from penstock.prepare.settings import DatasetSettings
from penstock.prepare.slice_cache import SliceCache, SliceStatus
from penstock.prepare.slice_images import load_slice_images
from penstock.prepare.slices import Slice
from penstock.prepare.tokenize_slice import Read, tokenize
from penstock.rows.tokenizer import load_stop_token_ids, load_tokenizer

MEDIA_COUNTS = MediaCounts()
"""Images of this process."""

# Bytes of data per process, below which starting a process takes longer than tokenization.
MIN_BYTES_PER_PROCESS = 32 << 20


@dataclass(frozen=True)
class WorkerConfig:
    """Tokenizer and slice cache of the worker processes."""

    cache: SliceCache
    tokenizer: str
    """Path or hub id, as the user wrote it."""
    pinned: Source
    """The tokenizer's content."""
    token: bool | None
    """Whether the Hugging Face login is used; None: if there is one."""

    @property
    def tokenizer_id(self) -> tuple[str, str | None, str]:
        """Path, revision and digest of the tokenizer."""
        return self.tokenizer, self.pinned.pin.get("commit"), self.pinned.key


def tokenize_missing(slices: Sequence[Slice], config: WorkerConfig, num_proc: int) -> int:
    """Tokenize the slices that are not in the cache; returns how many this call tokenized.

    Waits last for slices that another run is tokenizing. Raises the first error in slice order.
    """
    config.cache.exchange(slices)
    # A source may be listed twice: the second worker of a slice would find it busy.
    once = list({item.content: item for item in slices}.values())
    cached = config.cache.lookup(once)
    missing = [item for item, entry in zip(once, cached, strict=True) if not entry]
    num_bytes = sum(item.num_bytes for item in missing)
    workers = min(num_proc, len(missing), max(1, num_bytes // MIN_BYTES_PER_PROCESS))
    if workers > 1:
        batches = _tokenize_in_processes(missing, config, workers)
    else:
        batches = [tokenize_one(item, config, "skip") for item in missing]
    busy = [item for item, became in zip(missing, batches, strict=True) if became == "busy"]
    waited = [tokenize_one(item, config, "wait") for item in busy]
    return (batches + waited).count("made")


def tokenize_one(
    item: Slice, config: WorkerConfig, when_busy: Literal["wait", "skip"]
) -> SliceStatus:
    """Tokenize a slice in this process, unless it is cached or another run is tokenizing it."""

    def write(target: Path) -> Tally:
        settings: Any = item.settings  # frozen, so hashable, which its type does not say
        encode = _build_encoder(settings, item.columns, *config.tokenizer_id)
        read = partial(read_records, item, config.token)
        try:
            tally = tokenize(item, encode, target, read)
        except ImagesFound as images_found:
            tally = _tokenize_with_images(item, encode, target, read, config, images_found)
        # Under its key, a slice of content that changed since it was planned would be found again
        # and again.
        require_unchanged_pieces(item.pieces)
        if item.images:
            require_unchanged_images(item.pieces, item.settings, item.columns, item.images)
        require_unchanged(pinned_files([config.pinned]))
        return tally

    return config.cache.get_or_tokenize(item, write, when_busy)


def _tokenize_with_images(
    item: Slice,
    encode: Encoder,
    target: Path,
    read: Read,
    config: WorkerConfig,
    images_found: ImagesFound,
) -> Tally:
    """Tokenize a slice with media; records with those that the model does not take are
    dropped."""

    def open_cache(kind: str) -> MediaCache | None:
        try:
            bounds = item.settings.media_bounds
            processor = _load_processor_once(kind, encode.tokenizer, *config.tokenizer_id, bounds)
        except CapabilityError:
            if not isinstance(images_found, ImageTokenFound):
                raise
            return None  # a slice without media needs none
        if processor is None:
            return None
        return MediaCache(config.cache.folder, processor, config.cache.shared, MEDIA_COUNTS)

    kinds = [*KINDS] if isinstance(images_found, ImageTokenFound) else []
    images, names = load_slice_images(
        encode, read, open_cache, kinds, allow_private=item.settings.allow_private_urls
    )
    tally = tokenize(item, encode.with_images(images or "refused"), target, read)
    tally.media = names
    kinds_read = images.kinds.values() if images else ()
    tally.lacking = sorted({extra for kind in kinds_read for extra in kind.lacking})
    return tally


def _tokenize_in_processes(
    slices: list[Slice], config: WorkerConfig, workers: int
) -> list[SliceStatus]:
    # Not fork: threads and locks of the tokenizers library do not survive it.
    context = get_context("spawn")
    # Rayon, with which tokenizers encodes a batch, starts a thread per CPU in each process.
    threads = max(1, env.num_processors() // workers)
    begin = (os.getpid(), threads, _credential_purposes(slices, config))
    pool = ProcessPoolExecutor(workers, context, _init_worker, begin)
    try:
        # Largest first, so that processes finish together.
        by_size = sorted(slices, key=lambda item: -item.num_bytes)
        # The pool starts its processes as work is submitted.
        # spawn would import the parent's main module in each, and so run a script again.
        with without_main_module():
            futures = {
                item.content: pool.submit(_tokenize_in_worker, item, config) for item in by_size
            }
        wait(futures.values(), return_when=FIRST_EXCEPTION)
    finally:
        # Without cancel_futures it would first tokenize all that is still queued behind an error.
        pool.shutdown(cancel_futures=True)
    ended = [done for done in futures.values() if done.done() and not done.cancelled()]
    log_process_warnings(done.result()[1] for done in ended if not done.exception())
    in_order = [futures[item.content] for item in slices]
    # Of a cancelled future, exception() raises CancelledError.
    for failure in (done.exception() for done in in_order if not done.cancelled()):
        if isinstance(failure, BrokenProcessPool):
            raise StageError(
                f"One of {workers} tokenization processes was killed, most likely because "
                "memory ran out.\n  Set data.dataset_num_proc lower."
            ) from failure
        if failure:
            raise failure
    return [done.result()[0] for done in in_order]


def _tokenize_in_worker(item: Slice, config: WorkerConfig) -> tuple[SliceStatus, ProcessWarnings]:
    with collect_warnings() as messages:
        tokenized = tokenize_one(item, config, "skip")
    return tokenized, ProcessWarnings(str(os.getpid()), messages)


def _credential_purposes(slices: Sequence[Slice], config: WorkerConfig) -> set[Purpose]:
    pieces = [piece for item in slices for piece in item.pieces]
    purposes: set[Purpose] = set()
    is_local = config.tokenizer.startswith("builtin:") or Path(config.tokenizer).exists()
    if not is_local or any(piece.reader in ("hub", "stream") for piece in pieces):
        purposes.add("hub")
    if any(piece.file and isinstance(piece.file.location, str) for piece in pieces):
        purposes |= {"cloud", "hub"}
    return purposes


def _init_worker(parent: int, threads: int, purposes: Collection[Purpose]) -> None:
    # Workers hold both ends of the pool's queue: after a SIGKILL of the parent they see no end.
    end_with_parent(parent)
    env.forget_secrets(purposes)
    env.default({"RAYON_NUM_THREADS": str(threads)})  # read when a tokenizer first works


# One encoder per process and data set; tokenizers and processors while their content is the same.
@lru_cache(maxsize=8)
def _build_encoder(
    settings: DatasetSettings,
    columns: tuple[str, ...] | None,
    path: str,
    revision: str | None,
    key: str,
) -> Encoder:
    tokenizer = _load_tokenizer_once(path, revision, key)
    stops = load_stop_token_ids(path, revision)
    return Encoder(settings, tokenizer, columns, stop_token_ids=stops)


@lru_cache(maxsize=4)
def _load_processor_once(
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    revision: str | None,
    key: str,
    bounds: MediaBounds,
) -> ModelProcessor | None:
    # Of the cache's key alone: files of a folder may change under the same path.
    del key
    return load_processor(kind, path, revision, tokenizer, bounds)


@lru_cache(maxsize=2)
def _load_tokenizer_once(path: str, revision: str | None, key: str) -> PreTrainedTokenizerBase:
    del key
    return load_tokenizer(path, revision)
