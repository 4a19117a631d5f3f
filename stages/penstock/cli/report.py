"""`penstock report DIR...`: writes the report of a run, or a comparison of several runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.cli.console import Console
from penstock.core.errors import ConfigError, StageError
from penstock.core.os_errors import describe_os_error
from penstock.train.report import write_comparison, write_report

COMPARISON = Path("comparison.html")


def write_reports(folders: Sequence[Path], output: Path | None, console: Console) -> dict[str, Any]:
    """Write the page and print its path. Raises ConfigError for a folder without a run."""
    if len(folders) == 1:
        if output is not None:
            raise ConfigError(
                "--output names the page that compares several runs, and one run is named.\n"
                "  Its page is report.html in its own folder; leave --output out."
            )
        path = _write(folders[0], lambda: write_report(folders[0]))
    else:
        target = output or COMPARISON
        path = _write(target, lambda: write_comparison(folders, target))
    console.result(str(path))
    return {"reports": [str(path)]}


def _write(about: Path, write: Callable[[], Path]) -> Path:
    try:
        return write()
    except OSError as error:
        raise StageError(f"no report of {about}: {describe_os_error(error)}.") from error
