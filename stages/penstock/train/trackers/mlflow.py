"""MLflow tracker: a tracking server, or a database in the run folder."""

# pyright: reportMissingImports=false

from collections.abc import Mapping

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from penstock.core.remote.urls import redact
from penstock.train.trackers.run_info import RunInfo, resolve_mlflow_uri
from penstock.train.trackers.tracker import Ending, ResumeState, Tracker

MAX_PARAMS_PER_REQUEST = 100
"""Maximum parameters per request that a server accepts (REST API, log-batch)."""
MAX_PARAM_LENGTH = 6000
"""Maximum characters of a parameter."""


def start_run(run_info: RunInfo, state: ResumeState) -> Tracker:
    """See `StartRun`."""
    client = MlflowClient(tracking_uri=resolve_mlflow_uri(run_info))
    if "id" in state:
        # The end of the earlier start has closed it.
        client.update_run(state["id"], status="RUNNING")
    else:
        tags = {"penstock.key": run_info.key, **dict.fromkeys(run_info.tags, "true")}
        experiment = _get_or_create_experiment(client, run_info.project)
        run = client.create_run(experiment, run_name=run_info.name, tags=tags)
        state |= {"id": run.info.run_id, "owes_settings": True}
        if (uri := resolve_mlflow_uri(run_info)).startswith("http"):
            path = f"experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
            state["url"] = f"{redact(uri).rstrip('/')}/#/{path}"
    # Also if an earlier attempt created the run but did not log the settings.
    if state.get("owes_settings"):
        _log_params(client, run_info, state["id"])
        del state["owes_settings"]
    return _Run(client, state["id"])


def _log_params(client: MlflowClient, run_info: RunInfo, run_id: str) -> None:
    params = [
        Param(_clean_name(name), str(value)[:MAX_PARAM_LENGTH])
        for name, value in run_info.settings.items()
    ]
    for start in range(0, len(params), MAX_PARAMS_PER_REQUEST):
        client.log_batch(run_id, params=params[start : start + MAX_PARAMS_PER_REQUEST])


class _Run:
    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client, self._id = client, run_id

    def log(self, step: int, values: Mapping[str, float], timestamp: float) -> None:
        # MLflow's timestamps are whole milliseconds.
        time = int(timestamp * 1000)
        metrics = [Metric(_clean_name(name), value, time, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, ending: Ending) -> None:
        status = "FINISHED" if ending == "finished" else "KILLED"
        self._client.set_terminated(self._id, status=status)


def _get_or_create_experiment(client: MlflowClient, name: str) -> str:
    if experiment := client.get_experiment_by_name(name):
        return experiment.experiment_id
    try:
        return client.create_experiment(name)
    except MlflowException:
        # Another run has created it in the meantime.
        if experiment := client.get_experiment_by_name(name):
            return experiment.experiment_id
        raise


def _clean_name(name: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return "".join(sign if sign.isalnum() or sign in "_-. /" else "_" for sign in name)
