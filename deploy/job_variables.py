"""`job_variables.py worker start ...`: a worker whose runs may not say what is executed.

A flow run can bring job variables of its own, such as `command`, `env` or `image`, over those of
its deployment. Those that `PENSTOCK_JOB_VARIABLES` of the worker does not name crash the run before
anything of it is started.
"""

from typing import Any

from prefect.cli import app
from prefect.workers.base import BaseJobConfiguration

from penstock.core import env

ALLOWED = frozenset((env.variable("PENSTOCK_JOB_VARIABLES") or "cpu,gpus,memory").split(","))

resolve_for_flow_run = BaseJobConfiguration.resolve_for_flow_run.__func__


class JobVariableError(Exception):
    """A flow run has a job variable that this worker does not take from runs."""


async def resolve_allowed(cls: type[BaseJobConfiguration], flow_run: Any, **context: Any) -> Any:
    """Resolve the configuration. Raises JobVariableError for a variable that is not allowed."""
    if refused := sorted(set(flow_run.job_variables or ()) - ALLOWED):
        raise JobVariableError(
            f"this worker takes no {', '.join(refused)} from a flow run. Write it in the "
            "deployment's job_variables (prefect.yaml), or start the worker with "
            f"PENSTOCK_JOB_VARIABLES={','.join(sorted({*ALLOWED, *refused}))}."
        )
    return await resolve_for_flow_run(cls, flow_run, **context)


BaseJobConfiguration.resolve_for_flow_run = classmethod(resolve_allowed)  # pyright: ignore[reportAttributeAccessIssue]

if __name__ == "__main__":
    app()
