"""Entry point of one rank of a training run: reads the job, writes the outcome."""

import faulthandler
import logging
import platform
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.core import env
from penstock.core.cache.record import write_record
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.file_lock import acquire_lock
from penstock.core.process.die_with_parent import end_with_parent, outlive_parent_by
from penstock.core.process.hangup import lossy_output
from penstock.core.process.rank_heartbeat import Heartbeat
from penstock.engine.build import BuiltModel, assemble
from penstock.engine.distributed.ranks import ProcessInfo, destroy_process_group, init_process_group
from penstock.engine.hf.config import read_hf_config
from penstock.engine.rng import use_deterministic_algorithms
from penstock.train.dataloader import LoaderConfig, prepare
from penstock.train.launch.hang_watchdog import DEFAULT_TIMEOUT_SECONDS, heartbeat_folder
from penstock.train.launch.job import LOGS, OUTCOME, RANKS_LOCK, Job
from penstock.train.launch.rank_failures import failure_file, write_failure
from penstock.train.launch.rank_stacks import register_stack_dump
from penstock.train.launch.stop_request import StopRequest
from penstock.train.report.format import layout_text
from penstock.train.trainer import Trainer

# Added to the launcher's timeout for collectives: the launcher can dump the stacks of ranks that
# hang, but not after they have timed out.
MARGIN_SECONDS = 10.0

log = logging.getLogger("penstock.train")

Notify = Callable[[str], None]

Work = Callable[[Job, ProcessInfo, StopRequest, Notify], tuple[dict[str, Any] | None, int]]
"""The work of all ranks of a job. Returns the facts, or None if asked to stop before the end, and
the last step."""


def train(
    job: Job, ranks: ProcessInfo, stop: StopRequest, notify: Notify
) -> tuple[dict[str, Any] | None, int]:
    """Train to the end, or until asked to stop."""
    prepare(LoaderConfig.of(job.config, ranks.device))
    loop = Trainer(job, assembled(job, ranks, notify), ranks, stop)
    layout = layout_text(loop.built.layout)
    log.info("%d rows, %d steps, layout: %s", len(loop.rows), loop.total_steps, layout)
    facts = loop.run()
    log.info("stopped at step %d of %d", loop.at.step, loop.total_steps)
    return facts, loop.at.step


def assembled(job: Job, ranks: ProcessInfo, notify: Notify) -> BuiltModel:
    """Build the job's model. Raises ConfigError if the rows have token ids outside its
    vocabulary."""
    ranks.heartbeat.set_phase("loading the model")
    hf_config = read_hf_config(
        job.config_path, job.config.model.foundation, runs_code=job.config.model.trust_remote_code
    )
    options = {"adapter": job.adapter, "images": job.images}
    built = assemble(job.config, hf_config, job.weights, ranks, notify, **options)
    # CUDA answers an index outside the embedding with an assertion that names no cause.
    if job.max_token_id >= built.vocab_size:
        raise ConfigError(
            f"the packed rows hold token id {job.max_token_id}, and the model's vocabulary ends at "
            f"{built.vocab_size - 1}.\n"
            "  model.tokenizer_path and model.config_path do not belong together."
        )
    return built


def main(path: Path, work: Work = train) -> None:
    """Run the job in `path` on this rank; write the outcome, or this rank's failure."""
    end_with_parent()
    job = Job.read(path)
    outlive_parent_by(job.config.launch.stop_timeout)
    rank, _, _ = env.rank_variables() or (0, 0, 1)
    # Of an earlier attempt, where torchrun has restarted the ranks (launch.max_restarts).
    failure_file(job.output_dir / LOGS, rank).unlink(missing_ok=True)
    # Before the heartbeat, which tells the watchdog this pid: unhandled, SIGUSR1 ends a process.
    register_stack_dump(job.output_dir / LOGS, rank)
    try:
        _be_rank(job, Heartbeat(heartbeat_folder(job), rank=rank), work)
    except PenstockError as error:
        # The launcher prints the first rank's error; tracebacks of all ranks would hide it.
        sys.exit(error.exit_code)
    destroy_process_group()


def run_by_hand(job: Job, work: Work = train) -> None:
    """Run one rank of the job in this process, which another launcher started.

    The process group is not destroyed and is reused by the next job: a destroyed group cannot be
    initialized again under one torchrun.
    """
    _be_rank(job, Heartbeat(), work)


def _be_rank(job: Job, pulse: Heartbeat, work: Work) -> None:
    rank, _, _ = env.rank_variables() or (0, 0, 1)
    # Only rank 0 checks the file; the ranks then agree on a stop.
    stop = StopRequest(None if rank else job.output_dir).install_handlers()
    ranks = init_process_group(
        (job.config.launch.timeout or DEFAULT_TIMEOUT_SECONDS) + MARGIN_SECONDS, pulse
    )
    faulthandler.enable()
    # A dead launcher has closed this pipe: a print that fails must not cost the last save.
    with lossy_output("stdout", "stderr"):
        try:
            run_rank(job, ranks, stop, work)
        except Exception as error:
            log.exception("failed")
            write_failure(job.output_dir / LOGS, ranks.rank, error)
            raise


def run_rank(
    job: Job, ranks: ProcessInfo, stop: StopRequest, work: Work = train
) -> dict[str, Any] | None:
    """Run the work; rank 0 writes the outcome. Returns None if stopped before the end."""

    def notify(line: str) -> None:
        log.info(line)
        if ranks.is_main_process:
            sys.stderr.write(f"{work.__name__}: {line}\n")

    log_file = job.output_dir / LOGS / f"rank_{ranks.rank}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    _log_to(logging.FileHandler(log_file), "%(asctime)s %(levelname)s %(message)s")
    log.setLevel(logging.INFO)
    # Libraries give the root logger handlers, which would print each line once more.
    log.propagate = False
    with ExitStack() as held:
        log_ranks = job.config.train.log_ranks
        is_shown = log_ranks == "all" or (log_ranks == "local0" and ranks.local_rank == 0)
        # Rank 0's messages are on the terminal already, above its progress display.
        if is_shown and not ranks.is_main_process:
            terminal = _log_to(
                logging.StreamHandler(sys.stderr),
                f"{work.__name__}, rank {ranks.rank}: %(message)s",
            )
            held.callback(log.removeHandler, terminal)
        if ranks.is_main_process:
            # Ranks of a killed launcher may still be saving; they exit within a step.
            held.enter_context(acquire_lock(job.output_dir / RANKS_LOCK))
        if job.config.train.enable_full_determinism:
            use_deterministic_algorithms()
        launches = _one_run(job, ranks)
        job = _with_same_settings(job, ranks)
        facts, step = work(job, ranks, stop, notify)
        if ranks.is_main_process:
            outcome = {"facts": facts, "step": step, "signal": stop.signum, "launches": launches}
            write_record(job.output_dir / OUTCOME, outcome)
        return facts


def _one_run(job: Job, ranks: ProcessInfo) -> list[str]:
    """The launch ids of the ranks, one per machine.

    Raises ConfigError on every rank if they have different configs.
    """
    own_run = (job.key, job.launch_id, platform.node())
    # Compared before any work: ranks of two configs would wait for each other in different
    # collectives until those time out.
    launches: list[tuple[str, str, str]] = ranks.all_gather(own_run)
    other_hosts = sorted({host for key, _, host in launches if key != launches[0][0]})
    if other_hosts:
        raise ConfigError(
            f"{', '.join(other_hosts)} and {launches[0][2]} were started to train different "
            "things: not all that decides the result is the same there.\n"
            "  Start every machine with the same config, and the same files behind it."
        )
    return sorted({launch for _, launch, _ in launches})


def _with_same_settings(job: Job, ranks: ProcessInfo) -> Job:
    """The job with the same micro-batches and activation checkpointing on every rank.

    Launchers of nodes with unlike memory may have chosen unlike ones; the collectives of their
    steps would not match. What needs less memory is taken.
    """
    train = job.config.train
    own = train.rows_at_once, train.enable_gradient_checkpointing, train.recompute_modules
    everyone = ranks.all_gather(own)
    rows = min(rows for rows, _, _ in everyone)
    changes: dict[str, Any] = {} if rows == train.rows_at_once else {"micro_batch_size": rows}
    if any(settings[1:] != everyone[0][1:] for settings in everyone):
        changes |= {"enable_gradient_checkpointing": True, "recompute_modules": None}
    return replace(job, config=job.config.with_fields("train", **changes)) if changes else job


def _log_to(handler: logging.Handler, format: str) -> logging.Handler:
    handler.setFormatter(logging.Formatter(format))
    log.addHandler(handler)
    return handler
