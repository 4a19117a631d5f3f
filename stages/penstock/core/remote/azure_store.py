"""What adlfs leaves to the library below it: pauses between retries, and the end of a copy."""

import time
from importlib import import_module
from typing import Any

from penstock.core.remote.answers import AnswerError

RETRIES, FIRST_PAUSE = 2, 1
"""Retries of a request by the library, and seconds before the first of them. By default it pauses
for a minute in all, before the whole call is retried here."""

POLL_SECONDS = 0.5


def shorten_retries(system: Any) -> None:
    """Shorten the library's retries, as its options would: adlfs passes none on."""
    # Not public, so a release may lack it.
    config = getattr(system.service_client, "_config", None)
    policy = getattr(config, "retry_policy", None)
    if policy is not None:
        policy.total_retries = RETRIES
        policy.initial_backoff = policy.random_jitter_range = FIRST_PAUSE


def await_copy(system: Any, path: str) -> None:
    """Wait until the store has copied a blob to `path`: it answers when a copy has begun, and the
    source must stay until its end. Raises AnswerError if the copy fails."""
    container, name, _ = system.split_path(path)

    async def copy_state() -> Any:
        async with system.service_client.get_blob_client(container, name) as client:
            return (await client.get_blob_properties()).copy

    while True:
        copy = import_module("fsspec.asyn").sync(system.loop, copy_state)
        if copy.status != "pending":
            break
        time.sleep(POLL_SECONDS)
    if copy.status not in (None, "success"):
        reason = copy.status_description or "no reason is given"
        raise AnswerError(f"the store answers that the copy has {copy.status} ({reason})")
