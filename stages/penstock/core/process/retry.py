"""Which errors may pass, and retries with exponential backoff."""

import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.core.errors import ArtifactError, ConfigError, Interrupted, PenstockError
from penstock.core.remote.errors import StorageError, classify_error, iter_causes, retry_after

Result = TypeVar("Result")

RUN_TRIES = 7  # Number of tries during a run: survives about half a minute without a connection

PLANNING_TRIES = 3  # Number of tries while a run is planned, because a user waits for the result

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
"""Seconds before the first retry, and the maximum; each pause doubles the previous one."""

LONGEST_ASKED = 60.0  # Maximum of the seconds that a server's Retry-After is followed


def is_transient(error: BaseException) -> bool:
    """Whether a retry with nothing changed may succeed."""
    for cause in iter_causes(error):
        if isinstance(cause, PenstockError):
            if cause.may_pass:
                return True
            if isinstance(cause, ConfigError | ArtifactError | Interrupted):
                return False
        # huggingface_hub's is a ConnectionError, which would count as a lost connection. By its
        # name, as planning a local run does not import that library.
        elif type(cause).__name__ == "OfflineModeIsEnabled":
            return False
        elif isinstance(cause, Exception) and (kind := classify_error(cause)) != "absent":
            return kind == "cut"
    return False


def backoff_seconds(tries: int, first: float) -> list[float]:
    """Seconds before each of `tries` retries; each doubles the previous one."""
    return [first * 2**number for number in range(tries)]


def retry_with_backoff(
    call: Callable[[], Result], pauses: Sequence[float], notify: Callable[[str], None]
) -> Result:
    """Return the result of `call`; after each pause, call it again if its error is transient. There
    is no random jitter: machines that work together pause for equally long and stay in step."""
    for seconds in pauses:
        try:
            return call()
        except PenstockError as error:
            if not is_transient(error):
                raise
            notify(f"{error}\n  The error may be temporary: retrying in {seconds:g} s.")
        time.sleep(seconds)
    return call()


def retry_until_connected(call: Callable[[], Result], *, tries: int = RUN_TRIES) -> Result:
    """Return the result of `call`; retry while the connection is lost. Raises StorageError for
    errors that a retry cannot fix, and OSError for errors of the local disk."""
    pause = FIRST_PAUSE
    while True:
        tries -= 1
        try:
            return call()
        except Exception as error:
            kind = classify_error(error)
            if kind == "local":
                raise
            if kind != "cut" or not tries:
                # The text may contain a signed URL, which a chained traceback would print.
                raise StorageError(kind, error) from None
            delay = retry_after(error) or 0.0
        # With jitter: ranks that lost a server at the same time do not come back at the same time.
        time.sleep(max(min(delay, LONGEST_ASKED), pause * random.uniform(0.5, 1.5)))
        pause = min(2 * pause, LONGEST_PAUSE)
