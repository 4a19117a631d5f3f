"""`penstock prepare CONFIG --shard 2/4`: tokenizes a share of the slices on one of N machines.

Machines that share `data.dataset_prepared_path` tokenize one share each, in parallel or one after
the other. None finishes the result: `penstock prepare CONFIG` does, with all slices cached.
"""

import re
import time
from dataclasses import asdict

from penstock.cli.console import Console, outcome_table
from penstock.cli.run import Request
from penstock.core.cache.stage import short, stage_key
from penstock.core.cache.store import StageResult, find_cached
from penstock.core.errors import ConfigError, StageError
from penstock.core.os_errors import describe_os_error
from penstock.pipeline.plan import RebuildOptions, plan
from penstock.prepare.stage import Prepare


def prepare_share(request: Request, text: str, rebuild: RebuildOptions, console: Console) -> None:
    """Tokenize the missing slices of the share, without finishing the result."""
    number, count = _parse_share(text)
    share = f"{number}/{count}"
    if rebuild != RebuildOptions():
        raise ConfigError(
            "--shard does what is missing, so it goes with neither --force nor --from.\n"
            "  Leave them out; to build again, give them to the penstock prepare that comes last."
        )
    step = plan(request.load(), ("prepare",)).step("prepare")
    stage, started = step.stage, time.monotonic()
    if not isinstance(stage, Prepare):
        raise ConfigError(
            "--shard has nothing to do with data.skip_prepare_dataset: true.\n"
            "  Leave one of the two out."
        )
    if manifest := find_cached(step):
        status, counts = "cached", {"slices": 0, "done": 0, "rows": manifest["facts"]["rows"]}
        summary = f"all of it is cached in {step.where}"
    else:
        try:
            progress = stage.prepare_share(step.path, number - 1, count)
        except OSError as error:
            raise StageError(
                f"share {share} of prepare failed: {describe_os_error(error)}\n"
                "  Finished slices are kept; run the same command again to resume."
            ) from error
        status, counts = ("ran" if progress.done else "cached"), asdict(progress)
        summary = "once all shares have ended, penstock prepare without --shard finishes the data"
    facts = {"share": share, **counts}
    seconds = time.monotonic() - started
    console.outcomes.append(
        StageResult(
            "prepare", short(stage_key(stage)), status, step.path, seconds, facts, step.remote
        )
    )
    console.say(f"prepare: share {share} did {counts['done']} of its {counts['slices']} slices")
    console.say(f"  {summary}")
    console.result(outcome_table(console.outcomes))


def _parse_share(text: str) -> tuple[int, int]:
    """The number of a share, from 1, and the number of all. Raises ConfigError."""
    if not re.fullmatch(r"\d{1,9}/[1-9]\d{0,8}", text, re.ASCII):
        raise ConfigError(
            f"--shard is {text!r}, which is no share.\n  Write --shard 2/4 for the second of four."
        )
    number, count = (int(part) for part in text.split("/"))
    if not 1 <= number <= count:
        raise ConfigError(
            f"--shard is {text}, and shares of {count} are counted from 1 to {count}.\n"
            f"  Write --shard 1/{count} for the first of them."
        )
    return number, count
