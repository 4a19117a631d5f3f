"""The ranks of the reference stage: compute reference log-probs by forward passes, and save them.
Log-probs are saved periodically, so that an interrupted run keeps what it has computed."""

import time
from typing import Any

import numpy as np

from penstock.engine.distributed.parallel_dims import rows_per_step
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.reference.samples import iter_rows, sample_digests
from penstock.reference.settings import unread_rows_line
from penstock.rows.reader import PackedRows
from penstock.rows.ref_logprobs import RefLogprobs, write_shared_scores
from penstock.train.checkpointing import Checkpointer
from penstock.train.eval.reference_logprobs import LogprobScorer, SampleLogprobs
from penstock.train.launch.job import Job
from penstock.train.launch.stop_request import StopRequest
from penstock.train.rank import Notify, assembled

SAVE_SECONDS = 30.0  # Interval between writes of log-probs


def reference(
    job: Job, ranks: ProcessInfo, stop: StopRequest, notify: Notify
) -> tuple[dict[str, Any] | None, int]:
    """Compute the missing log-probs of the job's samples.

    Returns:
        The facts, None if stopped before the end, and the number of samples computed.
    """
    assert job.ref_logprobs is not None
    missing: list[bytes] = []
    if ranks.is_main_process:
        missing = RefLogprobs(job.ref_logprobs).missing(sample_digests(job.packed_dir))
    # Machines may see new files of a network file system at different times: rank 0's are taken.
    missing = ranks.all_gather(missing)[0]
    if not missing:
        return {"computed": 0}, 0
    notify(f"{len(missing)} samples are new to this model")
    built = assembled(job, ranks, notify)
    train, rows = job.config.train, PackedRows(job.packed_dir / "data" / "train")
    if train.max_steps is not None:
        read = train.max_steps * rows_per_step(train, built.dims.num_replicas)
        if line := unread_rows_line(read, len(rows), "max_steps"):
            notify(line)
    if job.init_checkpoint:
        Checkpointer(job, built, ranks, notify).load_weights(job.init_checkpoint)
    # After the weights are loaded, once per machine, as each may have files of its own.
    if ranks.local_rank == 0:
        job.require_unchanged_sources()
    held: list[SampleLogprobs] = []
    count, written = 0, time.monotonic()
    for scored in LogprobScorer(job.config, built, ranks).iter_chunks(
        iter_rows(job.packed_dir, missing)
    ):
        held.append(scored)
        count += len(scored.samples)
        # The collective comes first, so that every rank calls it.
        is_stopped = ranks.any_rank(bool(stop)) and count < len(missing)
        if is_stopped or time.monotonic() - written > SAVE_SECONDS:
            _save(job, held, ranks)
            held, written = [], time.monotonic()
        if is_stopped:
            return None, count
    _save(job, held, ranks)
    return {"computed": count}, count


def _save(job: Job, held: list[SampleLogprobs], ranks: ProcessInfo) -> None:
    if held and ranks.is_main_process:
        assert job.ref_logprobs is not None
        samples = [sample for scored in held for sample in scored.samples]
        write_shared_scores(
            job.ref_logprobs, samples, np.concatenate([scored.logprobs for scored in held])
        )
