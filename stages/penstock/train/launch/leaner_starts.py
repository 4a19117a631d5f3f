"""Starts the ranks again with settings that take less memory, when it runs out."""

import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.core.files import remove
from penstock.train.launch.job import LOGS, Job
from penstock.train.launch.rank_failures import ran_out_of_memory
from penstock.train.launch.torchrun import LaunchResult, start_ranks

Settings = Mapping[str, Any]
"""Fields of the config section `train`."""


def start_leaner_ranks(
    job: Job, file: Path, leaner: Sequence[Settings]
) -> tuple[Job, LaunchResult]:
    """Run all ranks to their end, with the job `file`; while memory runs out, again from the newest
    checkpoint, each time with the next settings of `train` in `leaner`, which must not change the
    result. Returns the job that was started last.

    With several nodes the ranks are started once: the launchers of the other nodes would have to
    start theirs again too.
    """
    remaining = enumerate(leaner if job.config.launch.nnodes == 1 else (), 1)
    logs = job.output_dir / LOGS
    while True:
        ended = start_ranks(job, file)
        is_short = ended.exit_status != 0 and ran_out_of_memory(logs)
        number, settings = next(remaining, (0, None)) if is_short else (0, None)
        if settings is None:
            return job, ended
        sys.stderr.write(
            f"train: memory ran out; the ranks start again with {describe_settings(settings)}\n"
        )
        config = job.config.with_fields("train", **settings)
        # A new id, so that late output of the ranks that failed is not taken for these ranks'.
        job = replace(job, config=config, launch_id=uuid.uuid4().hex)
        file = job.write()
        _move_aside(logs, f"out_of_memory_{number}")


def _move_aside(logs: Path, name: str) -> None:
    """Move the log files into a subfolder, where no failure is taken for one of the next ranks."""
    aside = logs / name
    remove(aside)
    aside.mkdir()
    for file in logs.iterdir():
        if file.is_file():
            file.rename(aside / file.name)


def describe_settings(settings: Settings) -> str:
    """Settings of `train`, as in a config."""
    shown = {name: value for name, value in settings.items() if value is not None}
    if "recompute_modules" in shown:
        del shown["enable_gradient_checkpointing"]
        shown["recompute_modules"] = f"[{', '.join(shown['recompute_modules'])}]"
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in shown.items())
