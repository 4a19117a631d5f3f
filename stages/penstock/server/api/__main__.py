"""API process: `python -m penstock.server.api JOB`. Forwards HTTP requests to the scheduler."""

import asyncio
import gc
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from penstock.config.server.config import ServerConfig
from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.core.process.rendezvous_endpoint import is_loopback_host
from penstock.server.api.app import create_app
from penstock.server.api.context import AppState
from penstock.server.api.http_protocol import Connection, max_open_connections
from penstock.server.api.log_limit import LogLimit
from penstock.server.api.settings import ApiSettings
from penstock.server.launch.job import ServerJob, select_settings
from penstock.server.protocol.envelopes import FromScheduler
from penstock.server.protocol.zmq_channel import connecting

LOG = logging.getLogger(__name__)

# Longer than clients keep an idle connection, so that they do not write to a closed one.
KEEP_ALIVE_SECONDS = 75
GRACE_SECONDS = 5  # Seconds for open requests to finish on shutdown
# Seconds that polls still wait on shutdown: their result may arrive.
POLL_SECONDS = GRACE_SECONDS - 1.0
LOOK_SECONDS = 0.1


def main(job_path: Path) -> None:
    """Serve until a signal. Raises ConfigError if API keys are required and missing."""
    # Here, not in serve: filters stay with the handlers of a process.
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())
    asyncio.run(serve(ServerJob.read(job_path), env.server_keys()))


async def serve(job: ServerJob, keys: tuple[str, ...]) -> None:
    """Serve the API of this job."""
    if not keys and not is_loopback_host(job.api_host):
        raise ConfigError(
            f"api_host is {job.api_host}, which other machines reach, and there are no keys.\n"
            f"  Name api_keys_file, or set {env.SERVER_KEYS}; or serve on 127.0.0.1."
        )
    limit = job.config.max_connections
    max_connections, backlog = max_open_connections(limit)
    if max_connections < limit:
        LOG.warning(
            "%d connections may be open, and max_connections is %d: raise the limit of open files"
            " (ulimit -n)",
            max_connections,
            limit,
        )
    settings = replace(
        read_settings(job.config, keys),
        max_connections=max_connections,
        image_processor=job.image_processor,
    )
    app = create_app(connecting(FromScheduler, job.engine_address, env.engine_secret()), settings)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=job.api_host,
            port=job.api_port,
            http=cast(Any, partial(Connection, app.state.service.connections)),
            # Else uvicorn hands a connection that asks for WebSocket to a protocol without these
            # limits.
            ws="none",
            backlog=backlog,
            # Its own handlers would not have the limit of log lines.
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )
    # With the objects of all modules, a full garbage collection takes some 50 ms, during which no
    # heartbeat is answered.
    gc.collect()
    gc.freeze()
    service: AppState = app.state.service

    async def end_polls() -> None:
        # The lifespan's shutdown is too late: uvicorn first waits for open requests, as polls are.
        while not server.should_exit:
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.sleep(POLL_SECONDS)
        service.shutting_down.set()

    ending = asyncio.create_task(end_polls())
    warming = asyncio.create_task(service.codec_pool.start())
    try:
        await server.serve()
    finally:
        ending.cancel()
        warming.cancel()


def read_settings(config: ServerConfig, keys: tuple[str, ...]) -> ApiSettings:
    """The API settings of a server config."""
    return select_settings(
        config, ApiSettings, keys=keys, max_request_bytes=config.max_request_mb << 20
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
