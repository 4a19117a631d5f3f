"""Weights & Biases tracker; without a login, offline in the run folder, for `wandb sync`."""

# pyright: reportMissingImports=false

import secrets
from collections.abc import Mapping

import wandb

from penstock.core import env
from penstock.train.trackers.run_info import RunInfo
from penstock.train.trackers.tracker import Ending, ResumeState, Tracker


def start_run(run_info: RunInfo, state: ResumeState) -> Tracker:
    """See `StartRun`."""
    # Chosen here and kept over retries of this call: each would otherwise begin a run of its own.
    state.setdefault("id", secrets.token_hex(8))
    mode = None if env.wandb_is_logged_in() or env.wandb_mode() else "offline"
    run = wandb.init(
        project=run_info.project,
        name=run_info.name,
        tags=run_info.tags,
        id=state["id"],
        # Offline, wandb ignores it and warns.
        resume="allow" if mode is None else None,
        dir=run_info.folder,
        config=dict(run_info.settings),
        mode=mode,
        # Log only explicit values: no console output, code or git commit.
        settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
    )
    if run.url:
        state["url"] = run.url
    return _Run(run)


class _Run:
    def __init__(self, run: wandb.Run) -> None:
        self._run = run

    def log(self, step: int, values: Mapping[str, float], timestamp: float) -> None:
        self._run.log({**values, "_timestamp": timestamp}, step=step)

    def close(self, ending: Ending) -> None:
        self._run.finish(exit_code=0 if ending == "finished" else 1)
