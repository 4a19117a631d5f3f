"""Recurring fine-tuning as a Prefect flow, for a schedule or an event.

`python flows/recurring.py CONFIG [--section.field value]`, or as a deployment (see prefect.yaml and
docs/guide/recurring.md). A flow run is one tick of `penstock.pipeline.recurring`; its tasks are the
stages, and its final state is named after the decision.
"""

import re
import sys

# First, for what it sets before Prefect is imported.
from finetune import build_flow_run_name, build_stage_runner, run_from_command_line  # isort: skip

import cloudpickle
from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed

from parameters import ConfigFile, Overrides, load_run
from penstock.core.errors import Interrupted
from penstock.pipeline.plan import RebuildOptions
from penstock.pipeline.recurring import Verdict, tick
from penstock.pipeline.releasing import open_releases

# For workers of a cluster, as finetune does.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

STATES: dict[Verdict, str] = {
    "released": "Released",
    "kept": "Kept",
    "waiting": "Waiting",
    "up_to_date": "UpToDate",
    "paused": "Held",
    "busy": "Busy",
}
"""Names of final states by verdict. All are of Prefect's type COMPLETED."""

SHOWN = 20
"""Number of decisions in the table in the UI, the newest first."""

COLUMNS = ("time", "verdict", "release", "new_samples", "slices", "reused_slices", "line")


@flow(name="recurring", flow_run_name=build_flow_run_name, persist_result=False)
def recurring(config: ConfigFile, overrides: Overrides = None) -> State[str]:
    """Train again if the sources have new samples, and release the model if it is better."""
    run, logger = load_run(config, overrides), get_run_logger()
    run_as_task = build_stage_runner(run, logger)
    try:
        decision = tick(
            run, lambda planned, name: run_as_task(planned, name, RebuildOptions()), logger.info
        )
    except Interrupted as stopped:
        return Cancelled(name="Stopped", message=str(stopped))
    logger.info(decision.line)
    newest_first = open_releases(run).decisions()[: -SHOWN - 1 : -1]
    create_table_artifact(
        [{name: release.get(name) for name in COLUMNS} for release in newest_first],
        f"penstock-releases-{_slug(run.release.name or '')}",
        decision.line,
    )
    return Completed(name=STATES[decision.verdict], message=decision.line, data=decision.line)


def _slug(name: str) -> str:
    """The name in the characters that artifact keys allow."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(run_from_command_line(recurring, "recurring.py"))
