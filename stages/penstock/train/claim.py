"""Whether a run may use its output folder: claimed under the folder's lock, before any work."""

from collections.abc import Callable

from penstock.core.cache.diff_identity import differences
from penstock.core.cache.input_digests import read_attempt, recorded_identity, reopen
from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.stage import identity, short, stage_key
from penstock.core.cache.store import PlannedStage
from penstock.core.errors import ArtifactError, ConfigError
from penstock.core.files import backup_rename
from penstock.train.launch.job import write_earlier_keys
from penstock.train.lengthen import find_shorter
from penstock.train.stage import Train


def claim(
    step: PlannedStage, notify: Callable[[str], None], *, fresh: bool, resumes: bool = True
) -> None:
    """Reject an output folder with another run, or move that run aside (`fresh`).

    An unfinished run with another key is taken over if the config names a checkpoint to load, and a
    shorter run if this one `resumes` and goes on from it.
    """
    try:
        record = read_manifest(step.path) or read_attempt(step.path)
    except ArtifactError:
        if not fresh:
            raise
        backup_rename(step.path)
        return
    if record is None:
        return
    if fresh:
        backup_rename(step.path)
        return
    key = stage_key(step.stage)
    if record["key"] == key:
        return
    is_finished = (step.path / MANIFEST).is_file()
    if isinstance(step.stage, Train) and step.stage.checkpoint and not is_finished:
        return
    changed = differences(identity(step.stage), recorded_identity(record))
    lines = "\n".join(f"    {difference}" for difference in changed[:12])
    state = "a finished run" if is_finished else "an unfinished run"
    remedy = "\n  Name another train.output_dir, or add --fresh to move the old one aside."
    if resumes and (run := find_shorter(step, record)):
        refusal = run.refusal()
        if refusal is None:
            notify(f"train: {state} is lengthened, from {run.newest}; what differs:\n{lines}")
            write_earlier_keys(step.path, key, record["key"])
            reopen(step.path)
            return
        remedy = f"\n  It cannot be lengthened: {refusal}{remedy}"
    raise ConfigError(
        f"train.output_dir {step.where} holds {state} of another key: {short(record['key'])} "
        f"there, {short(key)} here. What differs:\n{lines}{remedy}"
    )
