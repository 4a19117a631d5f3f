"""Names beside a run's results that lead to what was exported of it last."""

from penstock.config.run import RunConfig
from penstock.core.errors import StageError
from penstock.core.mirror import home_of
from penstock.core.store import Outcome


def link_exported(outcome: Outcome, run: RunConfig) -> None:
    """Let `<output_dir>/hf` (and `adapter`) lead to what was exported last."""
    for name in ("hf", "adapter"):
        link = home_of(run.train.output_dir) / name
        target = outcome.path / name
        if link.exists() and not link.is_symlink():
            raise StageError(
                f"{link} is in the way: it is not a link of ours.\n"
                "  Move it elsewhere and run again."
            )
        wanted = target.resolve() if target.is_dir() else None
        if link.is_symlink() and (wanted is None or link.resolve() != wanted):
            link.unlink()
        if wanted and not link.is_symlink():
            link.symlink_to(wanted)
