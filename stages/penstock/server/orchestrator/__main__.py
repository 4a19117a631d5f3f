"""The engine process: `python -m penstock.server.orchestrator JOB`. Between the API and workers."""

import asyncio
import sys
from pathlib import Path

from penstock.core import env
from penstock.server.job import GIVEN_UP, ServerJob
from penstock.server.orchestrator.engine import Engine
from penstock.server.orchestrator.settings import EngineSettings
from penstock.server.protocol.asks import ToEngine
from penstock.server.protocol.commands import FromWorkers
from penstock.server.protocol.zmq import connecting, listening


def main(job_path: Path) -> None:
    """Serve until a signal says to end."""
    asyncio.run(serve(ServerJob.read(job_path)))


async def serve(job: ServerJob) -> None:
    """Serve this job. Raises StageError where its address is taken, and RegistryError where what
    an earlier process knew cannot be read."""
    api = listening(ToEngine, job.engine_address, env.engine_secret())
    workers = connecting(FromWorkers, job.workers_address, env.workers_secret())
    try:
        await Engine(settings_of(job), api, workers).run()
    finally:
        api.close()
        workers.close()


def settings_of(job: ServerJob) -> EngineSettings:
    """What of the server's settings is read here."""
    config = job.config
    return EngineSettings(
        output_dir=job.output_dir,
        base_names=config.base_names,
        storage_limit=config.storage_limit_bytes,
        skip_initial_checkpoint=config.skip_initial_checkpoint,
        idle_session_timeout=config.idle_session_timeout,
        sequence_gap_timeout=config.sequence_gap_timeout,
        sample_packing_sequence_len=config.sample_packing_sequence_len,
        enable_packing=config.enable_packing,
        sample_packing_strategy=config.sample_packing_strategy,
        worker_connection_timeout=config.worker_connection_timeout,
        worker_max_retries=config.worker_max_retries,
        operation_timeout=config.operation_timeout,
        given_up=job.folder / GIVEN_UP,
        sync_allowed_hosts=config.sync_allowed_hosts,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
