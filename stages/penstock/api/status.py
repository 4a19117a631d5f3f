"""The state of the stages of a plan: cached, skipped, partial, stale or missing, and why."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.core.cache.diff_identity import Difference, differences
from penstock.core.cache.input_digests import ChangedInput, changed_inputs, read_attempt
from penstock.core.cache.manifest import MANIFEST, content_digest, read_manifest
from penstock.core.cache.stage import identity, short, stage_key
from penstock.core.cache.store import PlannedStage, find_complete
from penstock.core.errors import ArtifactError
from penstock.pipeline.plan import Plan
from penstock.prepare.user_prepared import ExternalPrepared
from penstock.train.stage import Train

Standing = Literal["cached", "skipped", "partial", "stale", "missing"]


@dataclass(frozen=True)
class StageStatus:
    """The state of a stage."""

    stage: str
    key: str
    standing: Standing
    where: str
    nearest: Path | None = None
    """The earlier result with the fewest differences."""
    changed: tuple[Difference, ...] = ()
    stale_inputs: tuple[ChangedInput, ...] = ()
    """Inputs whose content has changed since the result was built."""
    lengthens: str | None = None
    """Whether a run goes on from the shorter one in its folder."""

    @property
    def reasons(self) -> list[str]:
        """Why an existing result is not used, one reason per line."""
        lines = [f"{self.stage}: {changed}" for changed in self.stale_inputs]
        if self.nearest:
            lines.append(f"{self.stage}: nearest earlier result is {self.nearest}")
            lines += [f"    {difference}" for difference in self.changed]
        if self.lengthens:
            lines.append(f"{self.stage}: {self.lengthens}")
        return lines


def stage_statuses(planned: Plan) -> list[StageStatus]:
    """The state of every stage of the plan, in order. Reads manifests and builds nothing."""
    present: dict[str, str] = {}
    return [stage_status(step, present) for step in planned.steps]


def stage_status(step: PlannedStage, present: dict[str, str] | None = None) -> StageStatus:
    """The state of a step and, if it is not cached, the differences from the nearest result.
    `present` has the content digests of earlier steps by key; this step's is added."""
    name, key = step.stage.name, short(stage_key(step.stage))
    present = {} if present is None else present
    if manifest := find_complete(step):
        present[manifest["key"]] = content_digest(manifest)
        now = {
            name: present[source.key]
            for name, source in step.stage.inputs.items()
            if source.key in present
        }
        if changed := changed_inputs(step.stage, manifest, now):
            return StageStatus(name, key, "stale", step.where, stale_inputs=tuple(changed))
        is_external = isinstance(step.stage, ExternalPrepared)
        return StageStatus(name, key, "skipped" if is_external else "cached", step.where)
    attempt = read_attempt(step.path)
    if attempt and attempt["key"] == stage_key(step.stage):
        return StageStatus(name, key, "partial", step.where)
    near = _nearest_result(step)
    if near is None:
        return StageStatus(name, key, "missing", step.where)
    changed = tuple(near[1])
    return StageStatus(
        name, key, "missing", step.where, near[0], changed, lengthens=_lengthens(step)
    )


def _lengthens(step: PlannedStage) -> str | None:
    stage, record = step.stage, read_manifest(step.path)
    if not isinstance(stage, Train) or not record or read_manifest(stage.packed.path) is None:
        return None
    from penstock.train.lengthen import find_shorter

    if not (run := find_shorter(step, record)):
        return None
    refusal = run.refusal()
    return f"it cannot be lengthened: {refusal}" if refusal else f"it goes on from {run.newest}"


def _nearest_result(step: PlannedStage) -> tuple[Path, list[Difference]] | None:
    stage = step.stage
    pins = {name: getattr(source, "pin", None) for name, source in stage.inputs.items()}
    own_identity = {
        "version": stage.version,
        **identity(stage)["settings"],
        "inputs": {
            name: dict(pins[name] or {"key": source.key}) for name, source in stage.inputs.items()
        },
    }
    best: tuple[Path, list[Difference]] | None = None
    # Training writes to train.output_dir itself, other stages to a folder named by their key.
    pattern = MANIFEST if stage.name == "train" else f"*/{MANIFEST}"
    root = step.path if stage.name == "train" else step.path.parent
    for manifest in sorted(root.glob(pattern)):
        try:
            record = read_manifest(manifest.parent)
        except ArtifactError:  # a damaged result with another key does not matter
            continue
        if record is None:
            continue
        inputs = {
            # Inputs by their pin, or by key if they are results of stages.
            name: entry.get("source") or {"key": entry["key"]}
            for name, entry in record["inputs"].items()
        }
        recorded = {"version": record["version"], **record["settings"], "inputs": inputs}
        changed = differences(own_identity, recorded)
        if best is None or len(changed) < len(best[1]):
            best = manifest.parent, changed
    return best
