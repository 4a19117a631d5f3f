"""Push prepared data to a private Hub data set, with one configuration per key.

`load_dataset(repo, key)` returns the samples. An existing key and all other configurations are left
unchanged; all files of a key are committed atomically.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, DatasetCard
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import DatasetInfo

from penstock.core.cache.stage import Artifact, short
from penstock.core.errors import CapabilityError, StageError
from penstock.core.process.scratch_dir import scratch_folder
from penstock.core.sources.local_files import detect_file_kind
from penstock.push.hub_errors import HubRepo, http_status
from penstock.push.parquet import FILE_BYTES, ParquetFile, parquet_files
from penstock.rows.image_files import MEDIA

FIELD = "data.push_dataset_to_hub"
PROVENANCE_FILE = "penstock.json"
"""Provenance file of a key. Its presence marks the key as complete."""
MAX_COMMIT_TRIES = 5  # Number of tries to update the card after concurrent commits
PRECONDITION_FAILED = 412


def push_dataset(
    prepared: Artifact,
    repo: str,
    *,
    endpoint: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> dict[str, Any]:
    """Push complete prepared data to the data set `repo`; return its location.

    Raises CapabilityError for data with images, without a token or write permission, or if the
    repository is public or has data that its card does not name; ArtifactError if the data does not
    match its manifest; StageError for errors of the Hub.
    """
    if (prepared.path / MEDIA).is_dir():
        raise CapabilityError(
            f"{prepared.path} has images, whose tensors are not pushed.\n"
            f"  Leave {FIELD} out, and copy the folder where it is needed."
        )
    target = DatasetTarget(HubRepo.with_token(repo, FIELD, endpoint=endpoint), short(prepared.key))
    info = target.open()
    receipt = {"repo": repo, "config": target.config}
    if target.holds(info):
        return {**receipt, "status": "there already", "commit": info.sha}
    with scratch_folder("push") as folder:
        sent = [
            target.send(file, folder) for file in parquet_files(prepared, file_bytes=file_bytes)
        ]
        commit = target.commit(sent, _build_provenance(prepared), info)
    return {**receipt, "status": "pushed", "commit": commit, "files": len(sent)}


Sent = tuple[ParquetFile, CommitOperationAdd]


@dataclass(frozen=True)
class DatasetTarget:
    """One configuration of a Hub data set."""

    hub: HubRepo
    config: str  # The name of the configuration (a subset of a Hub data set), and of its folder

    def open(self) -> DatasetInfo:
        """Open or create the repository. Raises CapabilityError if it is unsuitable."""
        with self.hub.translate_errors("open"):
            self.hub.api.create_repo(
                self.hub.repo, repo_type="dataset", private=True, exist_ok=True
            )
            info = self._info()
        # create_repo leaves a repository that exists as public as it is.
        if not info.private:
            raise CapabilityError(
                f"{self.hub.repo} is a public data set, and prepared data goes to private ones.\n"
                f"  Make it private on the hub, or name another in {FIELD}."
            )
        has_data = any(map(detect_file_kind, _names(info)))
        if has_data and not self.holds(info) and not _configs(self._card(info)):
            raise CapabilityError(
                f"{self.hub.repo} has data that no configuration in its card lists, and adding a "
                f"configuration would hide it.\n  Name another data set in {FIELD}."
            )
        return info

    def holds(self, info: DatasetInfo) -> bool:
        """Whether this configuration exists; it is then complete."""
        return f"{self.config}/{PROVENANCE_FILE}" in _names(info)

    def send(self, file: ParquetFile, folder: Path) -> Sent:
        """Write and upload one file without committing it, and delete the local copy."""
        local = folder / file.name
        file.write(local)
        addition = CommitOperationAdd(f"{self.config}/{file.name}", local)
        with self.hub.translate_errors("send to"):
            self.hub.api.preupload_lfs_files(
                self.hub.repo, additions=[addition], repo_type="dataset"
            )
        if addition.path_or_fileobj == b"":  # already uploaded; small files go with the commit
            local.unlink()
        return file, addition

    def commit(self, sent: list[Sent], record: bytes, info: DatasetInfo) -> str:
        """Commit the uploaded files with the card that names them; return the commit.

        `record` is the content of PROVENANCE_FILE, `info` the state of the repository that the card
        is read from.
        """
        for _ in range(MAX_COMMIT_TRIES):
            card = self._card(info)
            splits = dict.fromkeys(file.split for file, _ in sent)
            paths = [{"split": s, "path": f"{self.config}/{s}-*.parquet"} for s in splits]
            other_configs = [
                entry for entry in _configs(card) if entry["config_name"] != self.config
            ]
            card.data["configs"] = [
                *other_configs,
                {"config_name": self.config, "data_files": paths},
            ]
            with self.hub.translate_errors("send to"):
                try:
                    done = self.hub.api.create_commit(
                        self.hub.repo,
                        [
                            *(addition for _, addition in sent),
                            CommitOperationAdd(f"{self.config}/{PROVENANCE_FILE}", record),
                            CommitOperationAdd("README.md", str(card).encode()),
                        ],
                        commit_message=f"Upload prepared data {self.config}",
                        repo_type="dataset",
                        # The hub answers 412 where another commit came first, whose card this one
                        # would overwrite.
                        parent_commit=info.sha,
                    )
                except HfHubHTTPError as error:
                    if http_status(error) != PRECONDITION_FAILED:
                        raise
                    info = self._info()
                    if self.holds(info):
                        return str(info.sha)
                    continue
                expected = {addition.path_in_repo for _, addition in sent}
                missing = sorted(expected - _names(self._info(done.oid)))
                self.hub.require_committed(missing, len(sent), done.oid)
                return done.oid
        raise StageError(
            f"{self.hub.repo} was changed by others {MAX_COMMIT_TRIES} times while {self.config} "
            "was added to its card.\n  Run it again: uploaded files are not sent twice."
        )

    def _info(self, revision: str | None = None) -> DatasetInfo:
        return self.hub.api.dataset_info(self.hub.repo, revision=revision)

    def _card(self, info: DatasetInfo) -> DatasetCard:
        if "README.md" not in _names(info):
            return DatasetCard(_NEW_CARD.format(name=self.hub.repo.rpartition("/")[2]))
        with self.hub.translate_errors("read"):
            path = self.hub.api.hf_hub_download(
                self.hub.repo, "README.md", repo_type="dataset", revision=info.sha
            )
            return DatasetCard(Path(path).read_text(encoding="utf-8"))


_NEW_CARD = """---
tags:
- penstock
---

# {name}

Data for fine-tuning, prepared by Penstock. Every configuration is one set of samples, named after
its cache key; `penstock.json` in its folder has the settings and sources.

`input_ids` are token ids and `labels` the targets: label t belongs to token t, and -100 is not
trained. `source` is the data set of a sample, and `row` its index there.
"""


def _configs(card: DatasetCard) -> list[dict[str, Any]]:
    return [config for config in card.data.get("configs") or [] if "config_name" in config]


def _names(info: DatasetInfo) -> set[str]:
    return {sibling.rfilename for sibling in info.siblings or []}


def _build_provenance(prepared: Artifact) -> bytes:
    # Without machine-specific fields and quoted data.
    manifest: Mapping[str, Any] = prepared.manifest
    facts = {name: fact for name, fact in manifest["facts"].items() if name != "dropped_samples"}
    provenance = {
        name: manifest[name] for name in ("format", "stage", "key", "version", "settings", "inputs")
    }
    return (json.dumps({**provenance, "facts": facts}, indent=2, sort_keys=True) + "\n").encode()
