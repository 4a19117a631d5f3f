"""Calls in daemon threads that no end of the process waits for. No torch."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_background(act: Callable[[], T]) -> Future[T]:
    """Do it in a thread that no end of the process waits for."""
    future: Future[T] = Future()
    # Who waits no more does not cancel it: it is done all the same.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised where its result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="penstock-sync", daemon=True).start()
    return future
