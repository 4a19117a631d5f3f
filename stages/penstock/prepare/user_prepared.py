"""Prepared data that the user supplies (`data.skip_prepare_dataset`): found and verified, not
built.

The manifest of a sealed result contains its identity. The key is recomputed from it, so edited or
unfinished data is rejected, and later stages get the same cache keys as on the machine that
prepared the data.

Token data sets of other programs have no manifest. They are ordinary sources of type `tokenized`,
pinned by content.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, RootModel

from penstock.config.loading.fault import shown
from penstock.config.schema.data import DataConfig
from penstock.config.schema.dataset import DatasetConfig
from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.stage import ATTEMPT, Facts, Source, Stage, short, stage_key
from penstock.core.cache.store import REPLACED, PlannedStage, StageResult, find_local
from penstock.core.cache.verify import Verify, require_content
from penstock.core.errors import ArtifactError, ConfigError, PenstockError, StageError
from penstock.core.sources.datasets_folder import read_saved_folder
from penstock.core.sources.local_files import detect_file_kind, list_names, select_data_files
from penstock.prepare.chat_templates.resolve import resolve_chat_template
from penstock.prepare.settings import DatasetSettings, PrepareSettings

UNUSED = DataConfig.model_fields.keys() & (
    PrepareSettings.model_fields.keys() | DatasetSettings.model_fields.keys()
) - {"datasets", "test_datasets", "decontaminate_datasets", "chat_template"}
"""Settings of the section `data`, besides sources, that decide what is prepared."""

_VOCABULARY = frozenset({"tokenizer.json", "vocab.json", "merges.txt", "vocab.txt"})
_VOCABULARY_SUFFIXES = (".model", ".tiktoken")


class SealedSettings(RootModel[dict[str, Any]]):
    """Settings as stored in a manifest, with any fields."""

    # pydantic would build its validator on import; few runs use data that the user prepared.
    model_config = ConfigDict(defer_build=True)


@dataclass(frozen=True)
class ExternalPrepared(Stage):
    """A sealed result of the prepare stage, rebuilt from its manifest."""

    name: ClassVar[str] = "prepare"

    version: int  # pyright: ignore[reportIncompatibleVariableOverride]
    settings: SealedSettings  # pyright: ignore[reportIncompatibleVariableOverride]
    sealed_inputs: Mapping[str, Source]

    @property
    def inputs(self) -> Mapping[str, Source]:
        """The sources it was made from, which may not exist anymore."""
        return self.sealed_inputs

    def run(self, out: Path) -> Facts:
        """Raise StageError: user-supplied data is never built."""
        raise StageError(
            f"{out} was complete when this run started, and is not anymore.\n"
            "  Restore it, or set data.skip_prepare_dataset to false to prepare the data again."
        )


def use_external(step: PlannedStage, verify: Verify = "changed") -> StageResult:
    """Return user-supplied data as the result of a skipped stage.

    Raises StageError if it was removed since it was found, ArtifactError if files are missing or
    damaged.
    """
    manifest = find_local(step)
    if manifest:
        require_content(step.path, manifest, verify)
    # It raises: this stage builds nothing.
    facts = step.stage.run(step.path) if manifest is None else manifest["facts"]
    return StageResult(
        ExternalPrepared.name, short(stage_key(step.stage)), "skipped", step.path, 0.0, facts
    )


def find_user_prepared(
    prepared_path: Path, own_key: Callable[[], str], tokenizer: Source, version: int
) -> PlannedStage | None:
    """Find sealed prepared data at `prepared_path`: an artifact folder, or a root that has one.

    If a root contains several, the one with this run's key is used; `own_key` is called only then.
    None if nothing is sealed. Raises ConfigError if none can be chosen, or if the data was made by
    another `version` of the stage or with another vocabulary than that of `tokenizer`;
    ArtifactError if a manifest was changed.
    """
    candidates = _find_candidates(prepared_path)
    if not candidates:
        return None
    folder, manifest = (
        candidates[0] if len(candidates) == 1 else _choose_own(candidates, prepared_path, own_key)
    )
    step = PlannedStage(_stage_from_manifest(folder, manifest), folder)
    if step.stage.version != version:
        raise ConfigError(
            f"{folder} was prepared by version {step.stage.version} of the stage, and this is "
            f"version {version}, which writes data differently.\n"
            "  Set data.skip_prepare_dataset to false to prepare the data again."
        )
    tokenizer_source = step.stage.inputs.get("tokenizer")
    if isinstance(tokenizer_source, Source) and (
        why := _tokenizer_difference(tokenizer_source.pin, tokenizer.pin)
    ):
        raise ConfigError(
            f"{folder} was prepared with another tokenizer than this run's: {why}.\n"
            "  Set model.tokenizer_path to the one it was prepared with, or set "
            "data.skip_prepare_dataset to false."
        )
    return step


def find_token_dataset(folder: Path) -> DatasetConfig | None:
    """The token data set in `folder`, written by another program: a `save_to_disk` folder of
    `datasets`, or Parquet or Arrow files. None if there is none. Of several splits, uses the
    training split.
    """
    if not folder.is_dir() or (folder / MANIFEST).is_file():
        return None
    if read_saved_folder(folder):
        return DatasetConfig(path=str(folder), type="tokenized")
    kinds: tuple[Literal["parquet", "arrow"], ...] = ("parquet", "arrow")
    for kind in kinds:
        file_names = [name for name in list_names(folder) if detect_file_kind(name) == kind]
        # Arrow files with a JSON file of the same name are slices of a slice cache.
        if file_names and not any(
            (folder / name).with_suffix(".json").is_file() for name in file_names
        ):
            names = select_data_files(str(folder), file_names, split=None, ds_type=kind)
            return DatasetConfig(path=str(folder), type="tokenized", data_files=names, ds_type=kind)
    return None


def unused_settings(data: DataConfig, prepared: Stage) -> Iterator[str]:
    """A line for each written setting of the section `data` with which user-supplied data was not
    prepared. Its sources are not looked at."""
    if not isinstance(prepared, ExternalPrepared):
        return
    sealed = prepared.settings.root
    written = data.model_dump(
        mode="json", include={name for name in UNUSED if data.is_non_default(name)}
    )
    if template := resolve_chat_template(data):
        written["chat_template"] = template.model_dump(mode="json")
    for name, value in written.items():
        if name in PrepareSettings.model_fields:
            used = [sealed.get(name, PrepareSettings.model_fields[name].default)]
        else:
            default = DatasetSettings.model_fields[name].default
            used = [dataset.get(name, default) for dataset in sealed["datasets"]]
        if value not in used:
            yield (
                f"data.{name}: {shown(value)} is not used, since data.skip_prepare_dataset is true,"
                f" and the prepared data was made with {shown(used[0])}"
            )


def no_prepared_data(folder: Path) -> ConfigError:
    """Error for a folder without prepared data."""
    unfinished = [
        path for path in (folder, *_prepared_folders(folder)) if (path / ATTEMPT).is_file()
    ]
    hint = f" ({unfinished[0]} is an unfinished attempt)" if unfinished else ""
    foreign = [path for path in _prepared_folders(folder) if find_token_dataset(path)]
    if foreign:
        hint = f" (token data sets of another program: {', '.join(map(str, foreign[:5]))})"
    return ConfigError(
        f"data.dataset_prepared_path {folder} holds no finished prepared data{hint}, and "
        "data.skip_prepare_dataset is true.\n"
        "  Name a folder with prepared data, or set data.skip_prepare_dataset to false."
    )


def artifacts_root(folder: Path) -> Path:
    """Root folder for other results beside user-supplied data: `folder`, or the root of
    `folder`."""
    if _is_prepared(read_manifest(folder)) and folder.parent.name == ExternalPrepared.name:
        return folder.parent.parent
    return folder


Candidate = tuple[Path, dict[str, Any]]


def _find_candidates(root: Path) -> list[Candidate]:
    if not root.is_dir():
        raise ConfigError(
            f"data.dataset_prepared_path {root} does not exist, and data.skip_prepare_dataset is "
            "true.\n  Name the folder of prepared data, or set data.skip_prepare_dataset to false."
        )
    itself = read_manifest(root)
    if itself is not None:
        if not _is_prepared(itself):
            raise ConfigError(
                f"data.dataset_prepared_path {root} holds a result of {itself.get('stage')}, not "
                "prepared data.\n  Name a folder of prepared data, or a root that has one."
            )
        return [(root, itself)]
    read = ((folder, read_manifest(folder)) for folder in _prepared_folders(root))
    return [
        (folder, candidate)
        for folder, candidate in read
        if candidate is not None and _is_prepared(candidate)
    ]


def _prepared_folders(root: Path) -> list[Path]:
    """Candidate folders of prepare results in a root, or in its subfolder `prepare`."""
    folders = sorted(
        path for glob in (f"{ExternalPrepared.name}/*", "*") for path in root.glob(glob)
    )
    hidden = {path for path in folders if path.name.startswith(".") or path.suffix == REPLACED}
    return [path for path in folders if path.is_dir() and path not in hidden]


def _is_prepared(manifest: dict[str, Any] | None) -> bool:
    return manifest is not None and manifest.get("stage") == ExternalPrepared.name


def _choose_own(
    candidates: Sequence[Candidate], prepared_path: Path, own_key: Callable[[], str]
) -> Candidate:
    try:
        key, why = own_key(), ""
    except PenstockError as error:
        key, why = None, f" This run's key cannot be computed: {str(error).splitlines()[0]}"
    for folder, manifest in candidates:
        if manifest["key"] == key:
            return folder, manifest
    lines: list[str] = []
    for folder, manifest in candidates:
        rows = manifest["facts"].get("rows", {})
        counts = ", ".join(f"{count} {split}" for split, count in rows.items())
        lines.append(f"    {folder}  made {manifest['created']}, samples: {counts}")
    listed = "\n".join(lines)
    reason = why or f" None of them is this run's ({short(key or '')})."
    raise ConfigError(
        f"data.dataset_prepared_path {prepared_path} holds {len(candidates)} sets of prepared "
        f"data, and data.skip_prepare_dataset is true.{reason}\n{listed}\n"
        "  Set data.dataset_prepared_path to one of them."
    )


def _stage_from_manifest(folder: Path, manifest: dict[str, Any]) -> ExternalPrepared:
    try:
        stage = ExternalPrepared(
            version=manifest["version"],
            settings=SealedSettings(manifest["settings"]),
            sealed_inputs={
                name: Source(source["source"]) for name, source in manifest["inputs"].items()
            },
        )
        sealed = str(manifest["key"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"The manifest in {folder} is incomplete ({error}).\n"
            "  Restore it, or name other prepared data in data.dataset_prepared_path."
        ) from error
    if stage_key(stage) != sealed:
        raise ArtifactError(
            f"The manifest in {folder} has changed since it was written: its key is "
            f"{short(sealed)}, and its settings and inputs give {short(stage_key(stage))}.\n"
            "  Restore it, or set data.skip_prepare_dataset to false to prepare the data again."
        )
    return stage


def _tokenizer_difference(stored: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Why two tokenizers cannot give the same tokens; empty if that is not known.

    A hub repository and a folder may contain the same tokenizer, as may two repositories; two
    folders are compared by their vocabulary files.
    """
    builtin = [pin["kind"] == "builtin" for pin in (stored, own)]
    if any(builtin):
        return "" if stored == own else f"{_describe_pin(stored)} there, {_describe_pin(own)} here"
    if stored["kind"] != "files" or own["kind"] != "files":
        return ""
    stored_files, own_files = _vocabulary_files(stored), _vocabulary_files(own)
    changed = sorted(
        name
        for name in stored_files.keys() & own_files.keys()
        if stored_files[name] != own_files[name]
    )
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
