"""Torchrun as a child that never outlives us and always gets one chance to save.

The agent runs in a process group of its own, so a Ctrl-C at the terminal or a signal to our whole
group reaches this process alone, which then passes on exactly one SIGTERM: a second would cut the
agent's orderly close short. When this process dies without a word, the kernel signals the agent.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""What asks to stop: people, schedulers, and a deadline."""

RDZV_BACKEND = "penstock"
"""Torchrun's name for our own rendezvous, which the agent brings along."""

MARGIN_SECONDS = 4.0
"""How much longer the agent may take than the ranks, which it kills, before it is killed itself."""


def run_ranks(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    sink: BinaryIO,
    deaths: Path,
    patience: float,
    watch: Callable[[], str | None] = lambda: None,
) -> int:
    """Run `torchrun` with `arguments` in this environment, copying what it prints to `sink`; return
    its exit status.

    `deaths` is where the agent lists ranks that a signal has ended. `watch` is asked every second
    and may return what to print, too. Any exception here or from it, KeyboardInterrupt included,
    ends the ranks before it travels on; they have `patience` seconds to finish their step and save.
    """
    words = [str(os.getpid()), str(deaths), str(patience), *arguments]
    command = [sys.executable, "-m", "penstock.engine.launch.torchrun_agent", *words]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        process_group=0,
    ) as child:
        try:
            _copy(child, sink, watch)
            return child.wait()
        except BaseException:
            _end(child, sink, patience + MARGIN_SECONDS)
            raise


def _copy(
    child: "subprocess.Popen[bytes]",
    sink: BinaryIO,
    watch: Callable[[], str | None],
) -> None:
    """Pass the child's output on until it closes its end, with what `watch` says in between."""
    stream = child.stdout
    assert stream is not None
    looked = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=1.0):
                block = os.read(stream.fileno(), 65536)
                if not block:
                    return
                _say(sink, block)
            if time.monotonic() - looked >= 1.0:
                looked = time.monotonic()
                if said := watch():
                    _say(sink, f"train: {said}\n".encode())


def _say(sink: BinaryIO, text: bytes) -> None:
    """Raises SystemExit when nobody listens any more: who started this is gone, and is no fault
    that passes."""
    try:
        sink.write(text)
        sink.flush()
    except BrokenPipeError:
        raise SystemExit(128 + signal.SIGPIPE) from None


def _end(child: "subprocess.Popen[bytes]", sink: BinaryIO, seconds: float) -> None:
    """One SIGTERM, then patience, then SIGKILL; the child's pipe is drained all the while."""
    with _deaf():
        child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds

        def patience() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError

        with contextlib.suppress(TimeoutError), Path(os.devnull).open("wb") as nobody:
            try:
                _copy(child, sink, patience)
            except SystemExit:
                # What ranks say must go somewhere, or they wait for that with their save.
                _copy(child, nobody, patience)
        try:
            child.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def _deaf():
    """Ignore further requests to stop while stopping."""
    try:
        before = [(s, signal.signal(s, signal.SIG_IGN)) for s in REQUESTS]
    except ValueError:
        yield  # signals belong to the main thread; elsewhere there is nothing to ignore
        return
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
