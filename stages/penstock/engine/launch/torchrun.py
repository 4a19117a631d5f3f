"""Run torchrun as a child process that never outlives this one, and always may save a checkpoint.

The agent runs in its own process group, so a Ctrl-C at the terminal or a signal to our whole group
reaches only this process, which then forwards exactly one SIGTERM: a second would interrupt the
agent's graceful shutdown. If this process dies abruptly, the kernel signals the agent.
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
from typing import TYPE_CHECKING

from penstock.core.process.hangup import READER_GONE

if TYPE_CHECKING:  # a finished run imports this file and starts nothing
    from penstock.core.process.byte_stream import ByteStream

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
"""Signals that request a stop: from users, schedulers, a closed terminal, and a deadline."""

RDZV_BACKEND = "penstock"

SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""The environment variable of the seconds that torchrun waits for ranks it has asked to end, before
it kills them."""

MARGIN_SECONDS = 4.0
"""How much longer than the ranks, which it kills, the agent may take before it is killed."""


def run_ranks(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    sink: "ByteStream",
    deaths: Path,
    patience: float,
    watch: Callable[[], str | None] = lambda: None,
) -> int:
    """Run `torchrun` with `arguments`, copy its output to `sink`, and return its exit status.

    `deaths` is where the agent lists ranks that a signal has ended. `watch` is called every second
    and may return text to print. Any exception, KeyboardInterrupt included, stops the ranks before
    it propagates; they have `patience` seconds to finish their step and save.
    """
    agent_arguments = [str(os.getpid()), str(deaths), str(patience), *arguments]
    command = [sys.executable, "-m", "penstock.engine.launch.torchrun_agent", *agent_arguments]
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
        # KeyboardInterrupt and SystemExit as well: no rank may outlive this process.
        except BaseException:
            _end(child, sink, patience + MARGIN_SECONDS)
            raise


def _copy(
    child: "subprocess.Popen[bytes]",
    sink: "ByteStream",
    watch: Callable[[], str | None],
) -> None:
    """Copy the child's output until it closes the pipe, with the text from `watch` in between."""
    stream = child.stdout
    assert stream is not None
    looked = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=1.0):
                # Returns what is there without waiting: at most what a pipe holds on Linux.
                block = os.read(stream.fileno(), 65536)
                if not block:
                    return
                _say(sink, block)
            if time.monotonic() - looked >= 1.0:
                looked = time.monotonic()
                if report := watch():
                    _say(sink, f"train: {report}\n".encode())


def _say(sink: "ByteStream", text: bytes) -> None:
    """Raises SystemExit on a closed pipe or terminal."""
    try:
        sink.write(text)
        sink.flush()
    except OSError as error:
        # The reader is gone, and retrying does not help. What a full disk does not take is lost.
        if error.errno in READER_GONE:
            raise SystemExit(128 + signal.SIGPIPE) from None


def _end(child: "subprocess.Popen[bytes]", sink: "ByteStream", seconds: float) -> None:
    """Send one SIGTERM, wait, then SIGKILL; the child's pipe is drained meanwhile."""
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
                # Keep reading the ranks' output: on a full pipe they would block in their save.
                _copy(child, nobody, patience)
        try:
            child.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def _deaf():
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
