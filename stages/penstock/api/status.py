"""How the stages of a plan stand: what is cached, partial, stale or missing, and exactly why."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.core.cache.diff_identity import Difference, differences
from penstock.core.cache.input_digests import ChangedInput, changed_inputs, read_attempt
from penstock.core.cache.manifest import MANIFEST, content_digest, read_manifest
from penstock.core.cache.stage import identity, short, stage_key
from penstock.core.cache.store import PlannedStage, find_complete
from penstock.core.errors import ArtifactError
from penstock.plan import Plan
from penstock.prepare.user_prepared import ExternalPrepared

Standing = Literal["cached", "skipped", "partial", "stale", "missing"]


@dataclass(frozen=True)
class StageStatus:
    """How a stage stands."""

    stage: str
    key: str
    standing: Standing
    where: str
    nearest: Path | None = None
    """The earlier artifact that differs least."""
    changed: tuple[Difference, ...] = ()
    stale_inputs: tuple[ChangedInput, ...] = ()
    """Inputs with other content than the result was made from."""

    @property
    def reasons(self) -> list[str]:
        """Why a result that is there is not used, a line each."""
        lines = [f"{self.stage}: {changed}" for changed in self.stale_inputs]
        if self.nearest:
            lines.append(f"{self.stage}: nearest earlier result is {self.nearest}")
            lines += [f"    {difference}" for difference in self.changed]
        return lines


def stage_statuses(planned: Plan) -> list[StageStatus]:
    """The standing of every stage of the plan, in order. Reads manifests, and builds nothing."""
    present: dict[str, str] = {}
    return [stage_status(step, present) for step in planned.steps]


def stage_status(step: PlannedStage, present: dict[str, str] | None = None) -> StageStatus:
    """The step's standing: sealed, stale, begun, or not there, and then what changed since the
    nearest. `present` are content digests of the steps before, by key; this one's is added."""
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
        taken = isinstance(step.stage, ExternalPrepared)
        return StageStatus(name, key, "skipped" if taken else "cached", step.where)
    attempt = read_attempt(step.path)
    if attempt and attempt["key"] == stage_key(step.stage):
        return StageStatus(name, key, "partial", step.where)
    near = _nearest_result(step)
    if near is None:
        return StageStatus(name, key, "missing", step.where)
    return StageStatus(name, key, "stale", step.where, near[0], tuple(near[1]))


def _nearest_result(step: PlannedStage) -> tuple[Path, list[Difference]] | None:
    mine = _flat_identity(step)
    best: tuple[Path, list[Difference]] | None = None
    pattern = MANIFEST if step.stage.name == "train" else f"*/{MANIFEST}"
    root = step.path if step.stage.name == "train" else step.path.parent
    for manifest in sorted(root.glob(pattern)):
        try:
            record = read_manifest(manifest.parent)
        except ArtifactError:  # of another key: it is not needed here
            continue
        if record is None:
            continue
        theirs = {"version": record["version"], **_flatten(record["settings"], record["inputs"])}
        changed = differences(mine, theirs)
        if best is None or len(changed) < len(best[1]):
            best = manifest.parent, changed
    return best


def _flat_identity(step: PlannedStage) -> dict[str, Any]:
    stage = step.stage
    inputs: dict[str, Any] = {}
    for name, source in stage.inputs.items():
        pin = getattr(source, "pin", None)
        inputs[name] = {"source": dict(pin), "key": source.key} if pin else {"key": source.key}
    return {
        "version": stage.version,
        **_flatten(identity(stage)["settings"], inputs),
    }


def _flatten(settings: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Settings by their own names, inputs by what they pin, or by key where they are artifacts."""
    return {
        **settings,
        "inputs": {n: i.get("source") or {"key": i["key"]} for n, i in inputs.items()},
    }
