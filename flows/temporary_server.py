"""The Prefect server of a flow that has none: on loopback, with a password, ended with its flow.

Prefect's own temporary server outlives a flow that is killed and asks for no password.
`python temporary_server.py DESCRIPTOR PARENT` serves on a listening socket that it inherits.
"""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import httpx
import uvicorn
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    temporary_settings,
)

from penstock.core import env
from penstock.core.errors import UnreachableError
from penstock.core.process.die_with_parent import end_with_parent, outlive_parent_by

SHUTDOWN_SECONDS = 5
"""For requests that are being answered."""


@contextmanager
def temporary_server() -> Generator[None]:
    """Serve Prefect's API inside the block, and make it that of Prefect's settings.

    Raises UnreachableError if it does not start.
    """
    password = f"penstock:{secrets.token_urlsafe(32)}"
    # Bound here and inherited: nothing else can take the port before the server listens at it.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        origin = f"http://127.0.0.1:{listener.getsockname()[1]}"
        descriptor = listener.fileno()
        settings = {
            # In the environment: every user of the machine can read a process's arguments.
            "PREFECT_SERVER_API_AUTH_STRING": password,
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": origin,
            # As Prefect starts its own: without web interface, schedules and telemetry.
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
        }
        with env.meanwhile(settings):
            server = subprocess.Popen(
                [sys.executable, __file__, str(descriptor), str(os.getpid())],
                pass_fds=[descriptor],
                # Ctrl-C in a terminal is for the flow, which reports its end to this server.
                start_new_session=True,
            )
    try:
        _wait_until_healthy(server, f"{origin}/api/health")
        with temporary_settings(
            {PREFECT_API_URL: f"{origin}/api", PREFECT_API_AUTH_STRING: password}
        ):
            try:
                yield
            finally:
                # Threads of Prefect send logs and events; what they still hold is for this server.
                APILogWorker.drain_all()
                EventsWorker.drain_all()
    finally:
        server.terminate()
        try:
            # uvicorn (0.54) waits that long for requests, and then for the app's own shutdown.
            server.wait(2 * SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_healthy(server: "subprocess.Popen[bytes]", address: str) -> None:
    seconds = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
    deadline = time.monotonic() + seconds
    fault = f"it did not answer within {seconds} s"
    # HTTP_PROXY is not for an address of this machine.
    with httpx.Client(trust_env=False, timeout=5) as client:
        while time.monotonic() < deadline:
            if (code := server.poll()) is not None:
                fault = f"it ended with exit status {code}, see above"
                break
            try:
                if client.get(address).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
    raise UnreachableError(
        f"Prefect's temporary server did not start: {fault}.\n"
        "  Run it again, or start a server (prefect server start) and set PREFECT_API_URL; "
        "penstock run needs none."
    )


def main(descriptor: int, parent: int) -> None:
    """Serve until the parent process dies or asks for the end."""
    end_with_parent(parent)
    outlive_parent_by(2 * SHUTDOWN_SECONDS)
    config = uvicorn.Config(
        "prefect.server.api.server:create_app",
        factory=True,
        log_level="error",
        # With the default, `auto`, uvicorn serves on after an error in the app's startup.
        lifespan="on",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
