"""Releases: numbered exports with their lineage, and a pointer to the latest one.

A release has hard links to the exported files, so it stays valid when the export is pruned or
built again. Links take no space.
"""

import math
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from penstock.config.schema.run import RunConfig
from penstock.core.cache import provenance
from penstock.core.cache.digest_cache import sha256_file
from penstock.core.cache.manifest import RELEASE, content_digest
from penstock.core.cache.record import FORMAT, digest_json
from penstock.core.cache.store import find_cached
from penstock.core.cache.verify import MAX_LISTED_FILES, Verify, damaged_files
from penstock.core.errors import ArtifactError, ConfigError
from penstock.core.releases.local import Notify, ReleaseStore, release_folder_name
from penstock.core.releases.remote import open_release_store
from penstock.core.remote.urls import is_url, url_join
from penstock.pipeline.plan import Plan
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.prepare.select.seen_samples import SeenSamples

RELEASES = "releases"
"""Folder of `pipeline.artifacts_path` for all releases."""

VERSION = 1
"""Version of the manifests of releases."""


@dataclass(frozen=True)
class Figures:
    """Metrics of a new model and of the released one, evaluated on the same rows."""

    metric: str
    new: float
    released: float | None
    """None while nothing is released."""
    all_of_new: Mapping[str, float]
    all_of_released: Mapping[str, float]


@dataclass(frozen=True)
class Candidate:
    """An exported model that may be released."""

    planned: Plan
    """Its run up to the export."""
    compared_with: int | None
    """The release it was compared with; None if there was none."""
    started_from: int | None
    """The release that its training continued from; None if it started from the base model."""
    seen_samples: "SeenSamples"
    """The samples it was trained on, including those of the releases it continues from."""
    new_samples: int
    figures: Figures | None


def release_location(run: RunConfig) -> str:
    """The folder or URL of the run's releases. Raises ConfigError without `release.name`."""
    if run.release.name is None:
        raise ConfigError(
            "this run releases nothing: release.name is not set.\n"
            "  Write it, for example release: {name: my-model}."
        )
    root, below = run.pipeline.artifacts_path, (RELEASES, run.release.name)
    return url_join(root, *below) if is_url(root) else str(Path(root).joinpath(*below))


def open_releases(run: RunConfig) -> ReleaseStore:
    """Open the run's releases. Raises ConfigError without `release.name`."""
    return open_release_store(release_location(run))


def release(store: ReleaseStore, candidate: Candidate, notify: Notify) -> int | None:
    """Release the candidate under a new number, and return it. None if another release was made
    since the comparison."""
    exported = candidate.planned.step("export")
    manifest = find_cached(exported)
    if manifest is None:
        raise ArtifactError(f"{exported.where} is gone.\n  Run it again to export it again.")
    with store.writing(notify):
        # Asked again under the lock, which nobody holds while a model trains and is compared.
        before = store.latest()
        if before != candidate.compared_with:
            return None
        number = _find_unpublished(store, manifest, before)
        if number is None:
            with TemporaryDirectory() as aside:
                samples = candidate.seen_samples.write(Path(aside))
                files = {file["path"]: exported.path / file["path"] for file in manifest["files"]}
                num_bytes, digest = samples.stat().st_size, sha256_file(samples)
                samples_entry = {"path": samples.name, "bytes": num_bytes, "sha256": digest}
                listed = [*manifest["files"], samples_entry]

                def manifest_of(number: int) -> dict[str, Any]:
                    return _manifest(candidate, number, listed, store)

                number = store.add(manifest_of, {**files, samples.name: samples}, exported.remote)
        # Last: a release that is whole but not pointed to is found again by _find_unpublished.
        store.set_latest(number, store.withdrawn)
        return number


def roll_back(store: ReleaseStore, to: int | None, notify: Notify) -> tuple[int | None, int]:
    """Point to release `to`, or to the one before the latest; returns the old and new number.

    Later releases are withdrawn: a run that produces the same model does not release it again.
    Raises ConfigError for a number that does not exist.
    """
    with store.writing(notify):
        numbers = store.numbers()
        try:
            now, withdrawn = store.latest(), store.withdrawn
        except ArtifactError:  # a rollback may be there to replace a damaged pointer
            if to is None:
                raise
            now, withdrawn = None, set[int]()
        if to is None:
            to = _rollback_target(now, numbers, withdrawn)
        if to is None or to not in numbers:
            have = ", ".join(map(release_folder_name, numbers)) or "none"
            change = "nothing before the latest release"
            if to is not None:
                change = f"no release {release_folder_name(to)}"
            raise ConfigError(
                f"{store.where} has {change}; there are {have}.\n  Name one with --to NUMBER."
            )
        above = {number for number in numbers if to < number <= (now or numbers[-1])}
        store.set_latest(to, (withdrawn | above) - {to})
    return now, to


def prunable(store: ReleaseStore, keep_last: int) -> list[int]:
    """All releases but the newest `keep_last`, the latest, and the target of a rollback from it."""
    numbers, latest = store.numbers(), store.latest()
    target = _rollback_target(latest, numbers, store.withdrawn)
    kept_numbers = {*numbers[-keep_last:], latest, target}
    return [number for number in numbers if number not in kept_numbers]


def is_better(run: RunConfig, figures: Figures) -> bool:
    """Whether the new model is better than the released one by `release.min_delta`. A NaN of the
    new model is never better; any number is better than none."""
    new, old = figures.new, figures.released
    if math.isnan(new):
        return False
    if old is None or math.isnan(old):
        return True
    return run.release.sign * (new - old) > run.release.min_delta


def _rollback_target(
    latest: int | None, numbers: list[int], withdrawn: Collection[int]
) -> int | None:
    """The target of a rollback: the newest release below the latest that is not withdrawn."""
    return max((n for n in numbers if n < (latest or 0) and n not in withdrawn), default=None)


def is_release_from(manifest: Mapping[str, Any], key: str, content: str | None) -> bool:
    """Whether a release is the export with this key and content digest, if both are known."""
    export = manifest["inputs"]["export"]
    if content and "digest" in export and export["digest"] != content:
        return False
    return export["key"] == key


def verified_folder(store: ReleaseStore, number: int, verify: Verify) -> Path:
    """The verified local folder of a release. Raises ArtifactError for damaged files."""
    folder, manifest = store.folder(number), store.manifest(number)
    if verify != "off" and (damaged := damaged_files(folder, manifest["files"], verify)):
        raise ArtifactError(
            f"release {release_folder_name(number)} in {folder} is damaged:\n  "
            + "\n  ".join(damaged[:MAX_LISTED_FILES])
            + "\n  Restore it, or point to another with penstock releases rollback."
        )
    return folder


def _find_unpublished(
    store: ReleaseStore, manifest: Mapping[str, Any], latest: int | None
) -> int | None:
    """The number of this export if its releaser died before it moved the pointer."""
    newest = max(store.numbers(), default=0)
    if newest <= (latest or 0) or newest in store.withdrawn:
        return None
    is_same = is_release_from(store.manifest(newest), manifest["key"], content_digest(manifest))
    return newest if is_same else None


def _manifest(
    candidate: Candidate, number: int, files: list[dict[str, Any]], store: ReleaseStore
) -> dict[str, Any]:
    """The manifest of a release, in the format of all manifests."""
    planned, run = candidate.planned, candidate.planned.run
    steps = {step.stage.name: step for step in planned.steps if step.stage.name != "push"}
    manifests = {name: find_cached(step) or {} for name, step in steps.items()}
    inputs = {name: {"key": step.artifact.key} for name, step in steps.items()}
    for name, manifest in manifests.items():
        if manifest:
            inputs[name]["digest"] = content_digest(manifest)
    if candidate.started_from is not None:
        inputs["previous"] = {"key": store.manifest(candidate.started_from)["key"]}
    figures = candidate.figures
    prepared, trained, exported = (manifests[name] for name in ("prepare", "train", "export"))
    return {
        "format": FORMAT,
        "stage": RELEASE,
        "version": VERSION,
        "key": digest_json([RELEASE, run.release.name, number, inputs]),
        "settings": run.release.model_dump(mode="json"),
        "inputs": inputs,
        "files": files,
        "facts": {
            "name": run.release.name,
            "number": number,
            "folders": exported["facts"]["folders"],
            "started_from": candidate.started_from,
            "compared_with": candidate.compared_with,
            "new_samples": candidate.new_samples,
            "known_samples": len(candidate.seen_samples.digests),
            "data_files": sorted(candidate.seen_samples.files),
            "data": {
                "pins": {name: source["key"] for name, source in prepared["inputs"].items()},
                **{name: prepared["facts"].get(name) for name in ("rows", "tokens", "sources")},
            },
            "base": {
                name: source for name, source in trained["inputs"].items() if "source" in source
            },
            "trained": {
                name: trained["facts"].get(name) for name in ("steps", "epochs", "final_loss")
            },
            "evaluation": None
            if figures is None
            else {
                "metric": figures.metric,
                "new": dict(figures.all_of_new),
                "released": dict(figures.all_of_released),
            },
        },
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": {"penstock": __version__, **provenance.versions()},
        "host": platform.node(),
    }
