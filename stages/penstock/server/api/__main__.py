"""The API process: `python -m penstock.server.api JOB`. It speaks HTTP and asks the engine."""

import asyncio
import sys
from pathlib import Path

import uvicorn

from penstock.config.server import ServerConfig
from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.server.addresses import is_loopback
from penstock.server.api.app import create_app
from penstock.server.api.settings import ApiSettings
from penstock.server.job import ServerJob
from penstock.server.protocol.asks import FromEngine
from penstock.server.protocol.zmq import connecting

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep a connection that is idle, so that they do not write to a closed one."""
GRACE_SECONDS = 5
"""That requests have to end when the process is told to."""
POLL_SECONDS = GRACE_SECONDS - 1.0
"""That polls wait yet then: what they wait for may come, and else they say that it did not."""
LOOK_SECONDS = 0.1


def main(job_path: Path) -> None:
    """Serve until a signal says to end. Raises ConfigError where keys are asked for and missing."""
    asyncio.run(serve(ServerJob.read(job_path), env.server_keys()))


async def serve(job: ServerJob, keys: tuple[str, ...]) -> None:
    """Serve the API of this job."""
    if not keys and not is_loopback(job.api_host):
        raise ConfigError(
            f"api_host is {job.api_host}, which other machines reach, and there are no keys.\n"
            f"  Name api_keys_file, or set {env.SERVER_KEYS}; or serve on 127.0.0.1."
        )
    settings = settings_of(job.config, keys)
    app = create_app(connecting(FromEngine, job.engine_address, env.engine_secret()), settings)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=job.api_host,
            port=job.api_port,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )
    ending = asyncio.create_task(_end_polls(server, app.state.service.closing))
    try:
        await server.serve()
    finally:
        ending.cancel()


async def _end_polls(server: uvicorn.Server, closing: asyncio.Event) -> None:
    while not server.should_exit:
        await asyncio.sleep(LOOK_SECONDS)
    await asyncio.sleep(POLL_SECONDS)
    closing.set()


def settings_of(config: ServerConfig, keys: tuple[str, ...]) -> ApiSettings:
    """What of the server's settings is read here."""
    return ApiSettings(
        keys=keys,
        max_request_bytes=config.max_request_mb << 20,
        max_pending_requests=config.max_pending_requests,
        requests_per_minute=config.requests_per_minute,
        operation_timeout=config.operation_timeout,
        future_ttl=config.future_ttl,
        idle_session_timeout=config.idle_session_timeout,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
