"""One rank of a training run, from its job to its outcome."""

import faulthandler
import logging
import platform
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from filelock import FileLock

from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.core.files import write_json
from penstock.core.orphan import end_with_parent, outlive_parent_by
from penstock.core.pulse import Pulse
from penstock.engine.assemble import assemble
from penstock.engine.determinism import use_only_deterministic_kernels
from penstock.engine.hf_config import read_hf_config
from penstock.engine.ranks import Ranks, join, leave
from penstock.train.endings import failure_file, leave_failure
from penstock.train.job import LOGS, OUTCOME, RANKS_LOCK, Job
from penstock.train.loader import Reading, prepare
from penstock.train.loop import Loop, check_job
from penstock.train.stacks import show_on_request
from penstock.train.stopping import StopRequest
from penstock.train.watch import DEFAULT_TIMEOUT_SECONDS, pulse_folder

MARGIN_SECONDS = 10.0
"""Collective operations wait this much longer than the launcher, which can ask all ranks for their
stacks while they hang, and none once they have given up."""

log = logging.getLogger("penstock.train")


def main(path: Path) -> None:
    """Run the job in `path` on this rank; leave its outcome, or this rank's failure, beside it."""
    end_with_parent()
    job = Job.read(path)
    outlive_parent_by(job.config.launch.stop_timeout)
    rank, _, _ = env.rank_variables() or (0, 0, 1)
    failure_file(job.output_dir / LOGS, rank).unlink(missing_ok=True)
    show_on_request(job.output_dir / LOGS, rank)
    _be_rank(job, Pulse(pulse_folder(job), rank=rank))


def run_by_hand(job: Job) -> None:
    """Be one rank of the job in this process, whoever started it."""
    _be_rank(job, Pulse())


def _be_rank(job: Job, pulse: Pulse) -> None:
    rank, _, _ = env.rank_variables() or (0, 0, 1)
    # One of them looks: they agree on what any of them has heard.
    stop = StopRequest(None if rank else job.output_dir).listen()
    ranks = join((job.config.launch.timeout or DEFAULT_TIMEOUT_SECONDS) + MARGIN_SECONDS, pulse)
    faulthandler.enable()
    try:
        run_rank(job, ranks, stop)
    except Exception as error:
        log.exception("failed")
        leave_failure(job.output_dir / LOGS, ranks.rank, error)
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
    if run.train.enable_full_determinism:
        use_only_deterministic_kernels()
    launches = _one_run(job, ranks)
    reading = Reading.of(run, ranks.device)
    if reading.num_workers:
        prepare(reading)
    elif run.data.dataloader_num_workers:
        notify(
            "rows are mapped into memory and read in this process; write "
            "data.dataloader_num_workers to have others read ahead"
        )
    ranks.pulse.begins("loading the model")
    hf_config = read_hf_config(job.config_path, run.model.foundation)
    built = assemble(run, hf_config, job.weights, ranks, notify, adapter=job.adapter)
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
            "launches": launches,
        }
        write_json(job.output_dir / OUTCOME, outcome)
    return facts


def _one_run(job: Job, ranks: Ranks) -> list[str]:
    """The starts that the ranks come from, one for each machine.

    Raises ConfigError on every rank if they were told to train different things.
    """
    mine = (job.key, job.launch, platform.node())
    told: list[tuple[str, str, str]] = ranks.gather(mine)
    others = sorted({host for key, _, host in told if key != told[0][0]})
    if others:
        raise ConfigError(
            f"{', '.join(others)} and {told[0][2]} were started to train different things: not all "
            "that decides the result is the same there.\n"
            "  Start every machine with the same config, and the same files behind it."
        )
    return sorted({launch for _, launch, _ in told})


def _log_to(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
