"""Calls in daemon threads, which do not block process exit. No torch."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_background(act: Callable[[], T]) -> Future[T]:
    """Run in a daemon thread, which does not block process exit."""
    future: Future[T] = Future()
    # Mark as running, so that the future cannot be cancelled: the call completes anyway.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised by future.result()
            future.set_exception(error)

    threading.Thread(target=run, name="penstock-sync", daemon=True).start()
    return future
