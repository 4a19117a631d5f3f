"""`penstock report DIR...`: the page of each training run, written again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.cli.console import Console
from penstock.core.errors import StageError
from penstock.core.store import reason_of
from penstock.train.report import write_report


def rewrite_reports(folders: Sequence[Path], console: Console) -> dict[str, Any]:
    """Print the path of each report. Raises ConfigError for a folder that holds no run."""
    written: list[str] = []
    for folder in folders:
        try:
            path = write_report(folder)
        except OSError as error:
            raise StageError(f"no report of {folder}: {reason_of(error)}.") from error
        written.append(str(path))
        console.result(str(path))
    return {"reports": written}
