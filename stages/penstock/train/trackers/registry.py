"""Tracker registry: supported trackers, which ones a run uses, and whether they are installed."""

from collections.abc import Mapping
from importlib.util import find_spec

from penstock.config.schema.train import TrainConfig
from penstock.core import env
from penstock.core.errors import CapabilityError

TITLES: Mapping[str, str] = {
    "wandb": "Weights & Biases",
    "tensorboard": "TensorBoard",
    "mlflow": "MLflow",
    "trackio": "trackio",
}
"""Our trackers, by the module that each imports, which is also the extra that installs it, and the
names shown to users."""


def is_installed(name: str) -> bool:
    """Whether the package of a tracker is installed. Imports nothing."""
    return find_spec(name) is not None


def require_trackers(train: TrainConfig) -> None:
    """Raise CapabilityError for a configured tracker whose package is not installed."""
    for name in TITLES:
        if getattr(train, f"use_{name}") and not is_installed(name):
            raise CapabilityError(
                f"train.use_{name} is true, and the package {name} is not installed.\n"
                f"  pip install 'penstock[{name}]', or leave it out: metrics.jsonl and report.html "
                "are written anyway."
            )


def select_trackers(train: TrainConfig) -> tuple[list[str], list[str]]:
    """Names of the trackers to use, and messages about that."""
    names = [name for name in TITLES if getattr(train, f"use_{name}")]
    notes: list[str] = []
    is_logged_in = env.wandb_is_logged_in()
    if train.use_wandb is None and is_logged_in:
        if is_installed("wandb"):
            names.insert(0, "wandb")
        else:
            notes.append(
                "this machine is logged in to Weights & Biases, and the package wandb is not "
                "installed, so nothing is logged there; pip install 'penstock[wandb]', or write "
                "train.use_wandb: false"
            )
    if train.use_wandb and not is_logged_in and not env.wandb_mode():
        notes.append(
            "there is no login to Weights & Biases, so the run is logged offline in the folder "
            "wandb of output_dir; `wandb sync` uploads it later"
        )
    return [*names, *train.trackers], notes
