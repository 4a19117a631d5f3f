"""Slices spread over processes. How many makes no difference to what they write."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from penstock.core.errors import StageError
from penstock.prepare.formats.registry import encoder
from penstock.prepare.slices import Slice
from penstock.prepare.tokenise import tokenise
from penstock.rows.tokenizer import load_tokenizer

Job = tuple[Slice, Path, str, str | None]
"""A slice, its target, and the tokenizer's path and revision."""


def run_all(
    slices: Sequence[tuple[Slice, Path]], tokenizer: str, revision: str | None, num_proc: int
) -> None:
    """Tokenise every slice to its target. Raises the first error in the order of the slices."""
    jobs = [(item, target, tokenizer, revision) for item, target in slices]
    workers = min(num_proc, len(jobs))
    if workers <= 1:
        loaded = load_tokenizer(tokenizer, revision) if jobs else None
        for item, target in slices:
            assert loaded is not None
            tokenise(item, encoder(item.settings, loaded), target)
        return
    # Not forked: the parent may hold threads and locks of the tokenizers library.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_run, job) for job in jobs]
        try:
            for future in futures:
                future.result()
        except BrokenProcessPool as error:
            raise StageError(
                f"One of {workers} preparing processes was killed, most likely for want of "
                "memory.\n  Set data.dataset_num_proc lower."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _run(job: Job) -> None:
    item, target, path, revision = job
    tokenise(item, encoder(item.settings, _of_this_worker(path, revision)), target)


@cache
def _of_this_worker(path: str, revision: str | None) -> PreTrainedTokenizerBase:
    """Loaded once in each worker, which lives no longer than the run."""
    return load_tokenizer(path, revision)
