"""Prepared data that is taken as it lies: found, checked against its own seal, never built.

A sealed result bears the identity it was made with. It is read back from the manifest, and its key
computed from it again, so that what was edited or is unfinished cannot pass for prepared data, and
what is packed or trained from it has the key it would have had on the machine that prepared it.

Tokens that other programs have left bear no identity. They are a source like any other, pinned to
its content, whose records need no tokenizer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, RootModel

from penstock.config.schema.dataset import DatasetConfig
from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.stage import ATTEMPT, Facts, Source, Stage, short, stage_key
from penstock.core.cache.store import REPLACED, PlannedStage, StageResult, find_local
from penstock.core.cache.verify import Verify, require_content
from penstock.core.errors import ArtifactError, ConfigError, PenstockError, StageError
from penstock.core.sources.datasets_folder import saved_in
from penstock.core.sources.local_files import choose, detect_file_kind, names_in

_VOCABULARY = frozenset({"tokenizer.json", "vocab.json", "merges.txt", "vocab.txt"})
_VOCABULARY_SUFFIXES = (".model", ".tiktoken")


class SealedSettings(RootModel[dict[str, Any]]):
    """Settings as a manifest holds them, whatever fields they have."""

    model_config = ConfigDict(defer_build=True)


@dataclass(frozen=True)
class ExternalPrepared(Stage):
    """A sealed result of the prepare stage, known by its manifest alone."""

    name: ClassVar[str] = "prepare"

    version: int  # pyright: ignore[reportIncompatibleVariableOverride]
    settings: SealedSettings  # pyright: ignore[reportIncompatibleVariableOverride]
    sealed_inputs: Mapping[str, Source]

    @property
    def inputs(self) -> Mapping[str, Source]:
        """The sources it was made from, which may be gone."""
        return self.sealed_inputs

    def run(self, out: Path) -> Facts:
        """Raise StageError: what is given is never built."""
        raise StageError(
            f"{out} was sealed when this run began, and is not any more.\n"
            "  Bring it back, or set data.skip_prepare_dataset to false to prepare the data again."
        )


def use_external(step: PlannedStage, verify: Verify = "changed") -> StageResult:
    """The given data as the outcome of a stage that was skipped.

    Raises StageError when it has gone since it was found, ArtifactError when files are missing
    or damaged.
    """
    manifest = find_local(step)
    if manifest:
        require_content(step.path, manifest, verify)
    facts = step.stage.run(step.path) if manifest is None else manifest["facts"]
    return StageResult(
        ExternalPrepared.name, short(stage_key(step.stage)), "skipped", step.path, 0.0, facts
    )


def find_user_prepared(
    place: Path, own_key: Callable[[], str], tokenizer: Source, version: int
) -> PlannedStage | None:
    """The sealed prepared data at `place`: that folder itself, or one in the root that it is.

    Of several in a root the one of this run's `own_key` is taken, which is asked for only then.
    None where nothing is sealed. Raises ConfigError where none can be chosen, or where the data was
    made by another `version` of the stage or with another vocabulary than `tokenizer`'s;
    ArtifactError where a manifest is not as it was sealed.
    """
    found = _find_candidates(place)
    if not found:
        return None
    folder, manifest = found[0] if len(found) == 1 else _choose_own(found, place, own_key)
    step = PlannedStage(_stage_from_manifest(folder, manifest), folder)
    if step.stage.version != version:
        raise ConfigError(
            f"{folder} was prepared by version {step.stage.version} of the stage, and this is "
            f"version {version}, which lays data out otherwise.\n"
            "  Set data.skip_prepare_dataset to false to prepare the data again."
        )
    theirs = step.stage.inputs.get("tokenizer")
    if isinstance(theirs, Source) and (why := _tokenizer_difference(theirs.pin, tokenizer.pin)):
        raise ConfigError(
            f"{folder} was prepared with another tokenizer than this run's: {why}.\n"
            "  Set model.tokenizer_path to the one it was prepared with, or set "
            "data.skip_prepare_dataset to false."
        )
    return step


def find_token_dataset(place: Path) -> DatasetConfig | None:
    """The source that `place` is when tokens of another program lie there: a folder written by
    `datasets` with save_to_disk, or parquet or Arrow files. None where neither does. Of splits
    that are told apart it is the one for training.
    """
    if not place.is_dir() or (place / MANIFEST).is_file():
        return None
    if saved_in(place):
        return DatasetConfig(path=str(place), type="tokenized")
    kinds: tuple[Literal["parquet", "arrow"], ...] = ("parquet", "arrow")
    for kind in kinds:
        found = [name for name in names_in(place) if detect_file_kind(name) == kind]
        # Beside a slice of ours lies what became of its records; slices are no data set.
        if found and not any((place / name).with_suffix(".json").is_file() for name in found):
            names = choose(str(place), found, split=None, ds_type=kind)
            return DatasetConfig(path=str(place), type="tokenized", data_files=names, ds_type=kind)
    return None


def no_prepared_data(place: Path) -> ConfigError:
    """The error for a place without any prepared data."""
    unfinished = [path for path in (place, *_prepared_folders(place)) if (path / ATTEMPT).is_file()]
    hint = f" ({unfinished[0]} is an unfinished attempt)" if unfinished else ""
    foreign = [path for path in _prepared_folders(place) if find_token_dataset(path)]
    if foreign:
        hint = f" (another program has left some in {', '.join(map(str, foreign[:5]))})"
    return ConfigError(
        f"data.dataset_prepared_path {place} holds no finished prepared data{hint}, and "
        "data.skip_prepare_dataset is true.\n"
        "  Name a folder that does, or set data.skip_prepare_dataset to false."
    )


def artifacts_root(place: Path) -> Path:
    """The root that other results go to beside given data: `place`, or the one `place` lies in."""
    if _is_prepared(read_manifest(place)) and place.parent.name == ExternalPrepared.name:
        return place.parent.parent
    return place


Candidate = tuple[Path, dict[str, Any]]


def _find_candidates(place: Path) -> list[Candidate]:
    if not place.is_dir():
        raise ConfigError(
            f"data.dataset_prepared_path {place} is not there, and data.skip_prepare_dataset is "
            "true.\n  Name the folder of prepared data, or set data.skip_prepare_dataset to false."
        )
    itself = read_manifest(place)
    if itself is not None:
        if not _is_prepared(itself):
            raise ConfigError(
                f"data.dataset_prepared_path {place} holds a result of {itself.get('stage')}, not "
                "prepared data.\n  Name a folder of prepared data, or a root that has one."
            )
        return [(place, itself)]
    read = ((folder, read_manifest(folder)) for folder in _prepared_folders(place))
    return [(folder, each) for folder, each in read if each is not None and _is_prepared(each)]


def _prepared_folders(root: Path) -> list[Path]:
    """Where results of prepare lie in a root, or in the folder of that name."""
    folders = sorted(
        path for glob in (f"{ExternalPrepared.name}/*", "*") for path in root.glob(glob)
    )
    hidden = {path for path in folders if path.name.startswith(".") or path.suffix == REPLACED}
    return [path for path in folders if path.is_dir() and path not in hidden]


def _is_prepared(manifest: dict[str, Any] | None) -> bool:
    return manifest is not None and manifest.get("stage") == ExternalPrepared.name


def _choose_own(found: Sequence[Candidate], place: Path, own_key: Callable[[], str]) -> Candidate:
    try:
        mine, why = own_key(), ""
    except PenstockError as error:
        mine, why = None, f" This run's own cannot be told, for {str(error).splitlines()[0]}"
    for folder, manifest in found:
        if manifest["key"] == mine:
            return folder, manifest
    listed = "\n".join(f"    {folder}  {_describe(manifest)}" for folder, manifest in found)
    told = why or f" None of them is this run's ({short(mine or '')})."
    raise ConfigError(
        f"data.dataset_prepared_path {place} holds {len(found)} sets of prepared data, and "
        f"data.skip_prepare_dataset is true.{told}\n{listed}\n"
        "  Set data.dataset_prepared_path to the one that is meant."
    )


def _describe(manifest: dict[str, Any]) -> str:
    rows = manifest["facts"].get("rows", {})
    counts = ", ".join(f"{count} {split}" for split, count in rows.items())
    return f"made {manifest['created']}, samples: {counts}"


def _stage_from_manifest(folder: Path, manifest: dict[str, Any]) -> ExternalPrepared:
    try:
        stage = ExternalPrepared(
            version=manifest["version"],
            settings=SealedSettings(manifest["settings"]),
            sealed_inputs={
                name: Source(each["source"]) for name, each in manifest["inputs"].items()
            },
        )
        sealed = str(manifest["key"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"The manifest in {folder} lacks what a seal holds ({error}).\n"
            "  Restore it, or name other prepared data in data.dataset_prepared_path."
        ) from error
    if stage_key(stage) != sealed:
        raise ArtifactError(
            f"The manifest in {folder} has changed since it was sealed: its key is "
            f"{short(sealed)}, and its settings and inputs give {short(stage_key(stage))}.\n"
            "  Restore it, or set data.skip_prepare_dataset to false to prepare the data again."
        )
    return stage


def _tokenizer_difference(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """Why two tokenizers cannot give the same tokens; empty where that is not known.

    A hub repository and a folder may hold the same tokenizer, as may two repositories; of two
    folders only the files with the vocabulary count.
    """
    builtin = [pin["kind"] == "builtin" for pin in (theirs, mine)]
    if any(builtin):
        return (
            "" if theirs == mine else f"{_describe_pin(theirs)} there, {_describe_pin(mine)} here"
        )
    if theirs["kind"] != "files" or mine["kind"] != "files":
        return ""
    there, here = _vocabulary_files(theirs), _vocabulary_files(mine)
    changed = sorted(name for name in there.keys() & here.keys() if there[name] != here[name])
    return f"{', '.join(changed)} differ" if changed else ""


def _describe_pin(pin: Mapping[str, Any]) -> str:
    names = {"builtin": "name", "hub": "repo"}
    return f"{pin['kind']} {pin[names[pin['kind']]]}" if pin["kind"] in names else "files"


def _vocabulary_files(pin: Mapping[str, Any]) -> dict[str, str]:
    return {
        file["name"]: file["sha256"]
        for file in pin["files"]
        if file["name"] in _VOCABULARY or PurePosixPath(file["name"]).suffix in _VOCABULARY_SUFFIXES
    }
