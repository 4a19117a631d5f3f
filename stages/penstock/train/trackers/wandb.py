"""Weights & Biases tracker; without a login, offline in the run folder, for `wandb sync`."""

# pyright: reportMissingImports=false

import secrets
from collections.abc import Mapping

import wandb

from penstock.core import env
from penstock.train.trackers.run_info import RunInfo
from penstock.train.trackers.tracker import Ending, Memory, Tracker


def begin(card: RunInfo, memory: Memory) -> Tracker:
    """See `Begin`."""
    memory.setdefault("id", secrets.token_hex(8))
    mode = None if env.wandb_is_logged_in() or env.wandb_mode() else "offline"
    run = wandb.init(
        project=card.project,
        name=card.name,
        tags=card.tags,
        id=memory["id"],
        resume="allow" if mode is None else None,
        dir=card.folder,
        config=dict(card.settings),
        mode=mode,
        # Log only explicit values: no console output, code or git commit.
        settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
    )
    if run.url:
        memory["url"] = run.url
    return _Run(run)


class _Run:
    def __init__(self, run: wandb.Run) -> None:
        self._run = run

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._run.log({**values, "_timestamp": at}, step=step)

    def close(self, ending: Ending) -> None:
        self._run.finish(exit_code=0 if ending == "finished" else 1)
