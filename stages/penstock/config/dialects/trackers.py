"""Trackers that a foreign file asks for, where their packages are here."""

from importlib.util import find_spec

from penstock.config.dialects.dialect import Rule, listed
from penstock.config.dialects.draft import Entry

TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")
EVENTS = "train.use_tensorboard"


def track(entry: Entry, tracker: str) -> None:
    """Ask for `wandb`, `tensorboard`, `mlflow` or `trackio`, or say that its package is missing.

    Other tools go on without a tracker, and a run here must not end for one either.
    """
    if find_spec(tracker) is not None:
        entry.put(f"train.use_{tracker}", True)
    else:
        entry.approximated(
            f"{tracker} is not installed here: pip install 'penstock[{tracker}]', and translate"
            " again; metrics.jsonl and report.html are written anyway"
        )


def tracks(tracker: str) -> Rule:
    """The rule of a truth that asks for a tracker."""

    def rule(entry: Entry) -> None:
        if entry.value:
            track(entry, tracker)
        else:
            entry.put(f"train.use_{tracker}", False)

    return rule


def reports(entry: Entry) -> None:
    """`report_to`: one tracker, several, `all` or `none`."""
    wanted = [str(name) for name in listed(entry.value) if name != "none"]
    if not wanted:
        entry.put("train.use_wandb", False)
    for name in wanted:
        if name in TRACKERS:
            track(entry, name)
            if name == "tensorboard" and entry.get("logging_dir") and entry.draft.value(EVENTS):
                entry.put("train.log_dir", entry.get("logging_dir"))
        else:
            entry.approximated(f"{name} is not told; there are {', '.join(TRACKERS)}")


def events_folder(entry: Entry) -> None:
    """`logging_dir`, where TensorBoard's events are."""
    if "tensorboard" in listed(entry.get("report_to")):
        entry.decides("train.log_dir")
    else:
        entry.no_effect("read with report_to: tensorboard alone")
