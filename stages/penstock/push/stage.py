"""The push stage: uploads an exported model to a Hub repository or an fsspec URL.

A push is idempotent: files that are identical at the target are not uploaded again, and if nothing
differs, nothing changes. A dry run has a different cache key from a push, so that its result is not
reused for a push.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import ConfigDict, model_validator

from penstock.config.schema.base import Settings
from penstock.core.cache.record import read_record_fields, write_record
from penstock.core.cache.stage import Artifact, Facts, Stage, short
from penstock.core.errors import PenstockError
from penstock.push.contents import list_contents

if TYPE_CHECKING:
    from penstock.push.copy import CopyTarget
    from penstock.push.hub import HubTarget

log = logging.getLogger("penstock.push")

PLAN = "plan.json"  # The differences found by the first attempt; a resumed push reports the same

_REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class PushSettings(Settings):
    """Where an export is sent. Holds no credential: those come from the environment or a login."""

    # An invalid URL may contain a password, which must not appear in the error message.
    model_config = ConfigDict(hide_input_in_errors=True)

    repo_id: str | None = None
    """Repository on the Hugging Face hub, `owner/name`."""

    url: str | None = None
    """Any URL that fsspec can write to, for example `file:///models/mine` or `s3://bucket/mine`."""

    private: bool = True
    """Whether a repository that has to be created is private."""

    revision: str | None = None
    """Branch of the repository; made when it is missing. None is its main branch."""

    create_pr: bool = False
    """Open a pull request instead of committing to the branch."""

    dry_run: bool = False
    """Only list what would be sent."""

    @model_validator(mode="after")
    def _has_one_target(self) -> Self:
        if (self.repo_id is None) == (self.url is None):
            raise ValueError("write one of push.repo_id and push.url")
        if self.repo_id is not None and not _REPO_ID.fullmatch(self.repo_id):
            raise ValueError("push.repo_id is not of the form owner/name")
        if self.url is not None:
            if self.revision is not None or self.create_pr:
                raise ValueError("push.revision and push.create_pr need push.repo_id, not push.url")
            parts = urlsplit(self.url)
            if parts.password is not None or parts.query:
                raise ValueError(
                    "push.url carries a password or a query; leave them out and put credentials "
                    "where the storage's own client looks for them"
                )
        if self.create_pr and self.revision not in (None, "main"):
            raise ValueError("push.create_pr opens a pull request on main; leave push.revision out")
        return self

    @property
    def target(self) -> str:
        return self.repo_id or self.url or ""


@dataclass(frozen=True)
class Push(Stage):
    """Uploads the files of an export to a target."""

    name: ClassVar[str] = "push"
    version: ClassVar[int] = 1

    settings: PushSettings
    exported: Artifact
    endpoint: str | None = None
    """Not part of the identity: the Hub endpoint, if not huggingface_hub's default
    (HF_ENDPOINT)."""

    @property
    def inputs(self) -> Mapping[str, Artifact]:
        return {"exported": self.exported}

    def run(self, out: Path) -> Facts:
        """Upload the files that differ. A resumed push uploads the remaining files.

        Raises CapabilityError without credentials or without an fsspec driver for the URL,
        ArtifactError if the export does not match its manifest, StageError if the target fails.
        """
        files = list_contents(self.exported)
        facts: dict[str, Any] = {
            "target": self.settings.target,
            "dry_run": self.settings.dry_run,
            "files": [file.fact for file in files],
            "bytes": sum(file.num_bytes for file in files),
        }
        if self.settings.dry_run:
            return facts
        target = self._target()
        target.prepare()
        send, remove = target.difference(files)
        if not (out / PLAN).is_file():
            unchanged = sorted({file.name for file in files} - set(send))
            write_record(out / PLAN, {"sent": send, "unchanged": unchanged, "removed": remove})
        plan = read_record_fields(out / PLAN, "Delete it and push again.")
        receipt = target.send(files, title=f"Upload export {short(self.exported.key)}")
        return {**facts, **plan, **receipt}

    def outside_changes(self) -> list[str]:
        """Files that the target no longer has as they were sent. A pull request may be merged, or
        not, by others. A target that cannot be reached is taken to be as it was, and a warning says
        so."""
        if self.settings.dry_run or self.settings.create_pr:
            return []
        try:
            send, remove = self._target().difference(list_contents(self.exported))
        except FileNotFoundError:  # The export is built again first.
            return []
        except PenstockError as error:
            log.warning("push: %s could not be looked at: %s", self.settings.target, error)
            return []
        return [f"{name} is not at the target as it was sent" for name in send] + [
            f"{name} is at the target again" for name in remove
        ]

    def _target(self) -> "HubTarget | CopyTarget":
        from penstock.push.copy import CopyTarget
        from penstock.push.hub import HubTarget

        if self.settings.url is not None:
            return CopyTarget.open(self.settings.url)
        return HubTarget.open(self.settings, endpoint=self.endpoint)


def push_prepared(prepared: Artifact, repo: str) -> dict[str, Any]:
    """Push complete prepared data to a private Hub data set; see `penstock.push.dataset`."""
    from penstock.push.dataset import push_dataset

    return push_dataset(prepared, repo)
