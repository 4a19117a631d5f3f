"""MLflow tracker: a tracking server, or a database in the run folder."""

# pyright: reportMissingImports=false

from collections.abc import Mapping

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from penstock.core.remote.urls import redact
from penstock.train.trackers.run_info import RunInfo, resolve_mlflow_uri
from penstock.train.trackers.tracker import Ending, Memory, Tracker

MOST_AT_ONCE = 100
"""Maximum parameters per request."""
LONGEST = 6000
"""Maximum characters of a parameter."""


def begin(card: RunInfo, memory: Memory) -> Tracker:
    """See `Begin`."""
    client = MlflowClient(tracking_uri=resolve_mlflow_uri(card))
    if "id" in memory:
        client.update_run(memory["id"], status="RUNNING")
    else:
        _create(client, card, memory)
    # Also if an earlier attempt created the run but did not log the settings.
    if memory.get("owes_settings"):
        _tell_settings(client, card, memory["id"])
        del memory["owes_settings"]
    return _Run(client, memory["id"])


def _create(client: MlflowClient, card: RunInfo, memory: Memory) -> None:
    tags = {"penstock.key": card.key, **dict.fromkeys(card.tags, "true")}
    run = client.create_run(_experiment(client, card.project), run_name=card.name, tags=tags)
    memory |= {"id": run.info.run_id, "owes_settings": True}
    if (uri := resolve_mlflow_uri(card)).startswith("http"):
        place = f"experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
        memory["url"] = f"{redact(uri).rstrip('/')}/#/{place}"


def _tell_settings(client: MlflowClient, card: RunInfo, run_id: str) -> None:
    params = [Param(_named(name), str(value)[:LONGEST]) for name, value in card.settings.items()]
    for start in range(0, len(params), MOST_AT_ONCE):
        client.log_batch(run_id, params=params[start : start + MOST_AT_ONCE])


class _Run:
    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client, self._id = client, run_id

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        time = int(at * 1000)
        found = [Metric(_named(name), value, time, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=found)

    def close(self, ending: Ending) -> None:
        status = "FINISHED" if ending == "finished" else "KILLED"
        self._client.set_terminated(self._id, status=status)


def _experiment(client: MlflowClient, name: str) -> str:
    if found := client.get_experiment_by_name(name):
        return found.experiment_id
    try:
        return client.create_experiment(name)
    except MlflowException:
        # Another run has created it in the meantime.
        if found := client.get_experiment_by_name(name):
            return found.experiment_id
        raise


def _named(name: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return "".join(sign if sign.isalnum() or sign in "_-. /" else "_" for sign in name)
