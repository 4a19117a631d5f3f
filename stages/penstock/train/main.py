"""One rank of a training run, from its job to its outcome."""

import faulthandler
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from filelock import FileLock

from penstock.core import env
from penstock.core.errors import PenstockError
from penstock.core.files import write_json
from penstock.core.orphan import end_with_parent
from penstock.engine.assemble import assemble
from penstock.engine.hf_config import read_hf_config
from penstock.engine.ranks import Ranks, join, leave
from penstock.train.job import LOGS, OUTCOME, RANKS_LOCK, Job
from penstock.train.loader import Reading, prepare
from penstock.train.loop import Loop, check_job
from penstock.train.stopping import StopRequest

DEFAULT_TIMEOUT_SECONDS = 1800.0

log = logging.getLogger("penstock.train")


def main(path: Path) -> None:
    """Run the job in `path` on this rank; leave its outcome, or this rank's failure, beside it."""
    end_with_parent()
    run_by_hand(Job.read(path))


def run_by_hand(job: Job) -> None:
    """Be one rank of the job in this process, whoever started it."""
    stop = StopRequest().listen()
    ranks = join(job.config.launch.timeout or DEFAULT_TIMEOUT_SECONDS)
    faulthandler.enable()
    try:
        run_rank(job, ranks, stop)
    except Exception as error:
        _leave_failure(job, ranks, error)
        raise
    leave()


def run_rank(job: Job, ranks: Ranks, stop: StopRequest) -> dict[str, Any] | None:
    """Assemble, train, and let the leading rank write the outcome. None: stopped before the end."""
    _log_to(job.output_dir / LOGS / f"rank_{ranks.rank}.log")

    def notify(line: str) -> None:
        log.info(line)
        if ranks.leads:
            sys.stderr.write(f"train: {line}\n")

    with ExitStack() as held:
        if ranks.leads:
            # Ranks of a run whose launcher was killed may still be saving; they end within a step.
            held.enter_context(FileLock(job.output_dir / RANKS_LOCK))
        return _run(job, ranks, stop, notify)


def _run(
    job: Job, ranks: Ranks, stop: StopRequest, notify: Callable[[str], None]
) -> dict[str, Any] | None:
    run = job.config
    reading = Reading.of(run.data, ranks.device)
    if reading.num_workers:
        prepare(reading)
    elif run.data.dataloader_num_workers:
        notify(
            "rows are mapped into memory and read in this process; write "
            "data.dataloader_num_workers to have others read ahead"
        )
    if run.train.use_wandb is None and env.wandb_is_logged_in():
        notify("nothing goes to Weights & Biases, which is not available yet; see metrics.jsonl")
    hf_config = read_hf_config(job.config_path, run.model.foundation)
    built = assemble(run, hf_config, job.weights, ranks, notify)
    loop = Loop(job, built, ranks, stop)
    check_job(job, built.vocab_size)
    log.info("%d rows, %d steps, layout %s", len(loop.rows), loop.total_steps, built.layout)
    facts = loop.run()
    log.info("stopped at step %d of %d", loop.at.step, loop.total_steps)
    if ranks.leads:
        outcome = {
            "facts": facts,
            "step": loop.at.step,
            "signal": stop.signum,
            "launch": job.launch,
        }
        write_json(job.output_dir / OUTCOME, outcome)
    return facts


def _leave_failure(job: Job, ranks: Ranks, error: Exception) -> None:
    """This rank's error, for the launcher: the earliest one is the cause, the rest are echoes."""
    log.error("failed", exc_info=error)
    record = {
        "rank": ranks.rank,
        "time": time.time(),
        "message": str(error) if isinstance(error, PenstockError) else "",
        "error": f"{type(error).__name__}: {error}",
        "exit_code": error.exit_code if isinstance(error, PenstockError) else 1,
        "traceback": "".join(traceback.format_exception(error)),
    }
    (job.output_dir / LOGS / f"failure_{ranks.rank}.json").write_text(json.dumps(record))


def _log_to(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
