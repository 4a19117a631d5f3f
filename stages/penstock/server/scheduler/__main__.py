"""Scheduler process: `python -m penstock.server.scheduler JOB`. Between the API and the workers."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from penstock.core import env
from penstock.server.launch.job import GIVEN_UP, ServerJob, select_settings
from penstock.server.protocol.envelopes import ToScheduler
from penstock.server.protocol.worker_commands import FromWorkers
from penstock.server.protocol.zmq_channel import connecting, listening
from penstock.server.scheduler.scheduler import Scheduler
from penstock.server.scheduler.settings import SchedulerSettings


def main(job_path: Path) -> None:
    """Serve until a signal; then save unsaved models and exit."""
    asyncio.run(serve(ServerJob.read(job_path)))


async def serve(job: ServerJob) -> None:
    """Serve this job. Raises StageError if its address is in use, and StateStoreError if the state
    of an earlier process cannot be read."""
    api = listening(ToScheduler, job.engine_address, env.engine_secret())
    workers = connecting(FromWorkers, job.workers_address, env.workers_secret())
    try:
        engine = Scheduler(read_settings(job), api, workers)
        launcher = os.getppid()

        def ask_to_stop() -> None:
            # If the launcher is dead, another scheduler may have been started.
            if os.getppid() != launcher:
                os._exit(1)
            engine.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ask_to_stop)
        await engine.run()
    finally:
        api.close()
        workers.close()


def read_settings(job: ServerJob) -> SchedulerSettings:
    """The scheduler settings of a server config."""
    config = job.config
    return select_settings(
        config,
        SchedulerSettings,
        output_dir=job.output_dir,
        base_names=config.base_names,
        storage_limit=config.storage_limit_bytes,
        ends_workers=job.mode == "auto",
        worker_max_restarts=config.max_restarts,
        given_up=job.folder / GIVEN_UP,
        requires_keys=job.requires_keys,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
