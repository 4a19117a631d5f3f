"""Figures as JSON lines, in the folder that `PENSTOCK_BENCH_OUT` names: whoever runs many
benchmarks reads them there. Without it they are printed and no more."""

import json
import os
from pathlib import Path

FOLDER = "PENSTOCK_BENCH_OUT"
FILE = "figures.jsonl"


def out_folder() -> Path | None:
    """Where figures, traces and the like are kept; None if nobody asks for them."""
    found = os.environ.get(FOLDER)
    return Path(found) if found else None


def record(
    name: str,
    value: float,
    unit: str = "",
    *,
    goal: float | None = None,
    at_most: bool = False,
) -> bool | None:
    """Keep a figure. Returns whether its goal, the least it is to be or with `at_most` the most,
    is reached; None without a goal."""
    # Of numpy's numbers a comparison is numpy's bool, which is not JSON.
    reached = None if goal is None else bool(value <= goal if at_most else value >= goal)
    if folder := out_folder():
        figure = {"name": name, "value": value, "unit": unit, "goal": goal, "at_most": at_most}
        with (folder / FILE).open("a") as file:
            file.write(json.dumps({**figure, "reached": reached}) + "\n")
    return reached
