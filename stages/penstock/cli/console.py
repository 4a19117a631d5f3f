"""Output of commands and their exit codes.

Results go to stdout, all other lines to stderr. With `--json`, stdout has one JSON object on its
last line and nothing else.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.api.tables import outcome_table as outcome_table
from penstock.api.tables import table as table
from penstock.core.errors import PenstockError
from penstock.core.os_errors import describe_os_error, is_of_the_machine
from penstock.core.process.hangup import hangup_signals, lossy_output

if TYPE_CHECKING:  # the store imports pydantic, which `--help` does without
    from penstock.core.cache.store import StageResult


@dataclass
class Console:
    """The output of one command."""

    as_json: bool = False
    debug: bool = False
    outcomes: "list[StageResult]" = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields added to the JSON object, whether the command fails or not."""
    exit_code: int = 0
    """Exit code of a command that raises nothing."""

    def say(self, line: str) -> None:
        """Write a line to stderr."""
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def result(self, text: str) -> None:
        """Print the result; with --json the object has it instead."""
        if not self.as_json:
            print(text)

    def finish(self, error: dict[str, Any] | None = None, **more: Any) -> None:
        """Print the JSON object, with --json."""
        if self.as_json:
            stages = [_outcome_as_json(outcome) for outcome in self.outcomes]
            record = {"ok": error is None, "stages": stages, "error": error, **self.more, **more}
            print(json.dumps(record, sort_keys=True))


def run(console: Console, command: Callable[[], dict[str, Any] | None]) -> int:
    """Run a command and return its exit code; every error is printed as one block of text.

    The command may return fields to add to the JSON object.
    """
    try:
        # A command whose terminal is closed goes on, though nobody reads its log any more.
        with lossy_output("stderr"), _signals_as_exit():
            more = command()
    except PenstockError as error:
        return _report_error(console, error, str(error), error.exit_code)
    except KeyboardInterrupt as error:
        return _report_error(
            console, error, "interrupted; run the same command again to resume", 130
        )
    except SystemExit as error:
        if error.code in (128 + signal.SIGTERM, 128 + signal.SIGHUP):
            text = "terminated; run the same command again to resume"
            return _report_error(console, error, text, int(error.code))
        # The help of a group without a command has typer's own exit code.
        raise
    except BrokenPipeError:
        # The reader of stdout (`| head`) has exited; flushing at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:  # noqa: BLE001 - the edge of the process
        if is_of_the_machine(error):
            text = f"{describe_os_error(error)}.\n  Then run the same command again."
        else:
            text = (
                f"{type(error).__name__}: {error}\n"
                "  This is a bug in Penstock; --debug prints the traceback."
            )
        return _report_error(console, error, text, 1)
    console.finish(**(more or {}))
    return console.exit_code


def _report_error(console: Console, error: BaseException, text: str, code: int) -> int:
    if console.debug:
        sys.stderr.write("".join(traceback.format_exception(error)))
    console.say(f"error: {text}")
    console.finish(error={"type": type(error).__name__, "message": text, "exit_code": code})
    return code


def _outcome_as_json(outcome: "StageResult") -> dict[str, Any]:
    return {
        "stage": outcome.stage,
        "key": outcome.key,
        "status": outcome.status,
        "path": outcome.where,
        "seconds": round(outcome.seconds, 3),
        "facts": dict(outcome.facts),
    }


@contextmanager
def _signals_as_exit() -> Generator[None]:
    # SIGINT is KeyboardInterrupt already; the default action of these two ends Python without
    # `finally`, so that child processes would go on and temporary files stay.
    def unwind(signum: int, _frame: object) -> None:
        raise SystemExit(128 + signum)

    signals = (signal.SIGTERM, *hangup_signals())
    before = [(signum, signal.signal(signum, unwind)) for signum in signals]
    try:
        yield
    finally:
        for signum, handler in before:
            signal.signal(signum, handler)
