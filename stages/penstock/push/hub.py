"""Push to a Hugging Face Hub repository in one commit; only files that differ are uploaded.
huggingface_hub chooses the transfer of large files (Xet if `hf_xet` is installed, else LFS)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from penstock.core.sources.unchanged import git_digest
from penstock.push.contents import PushFile, obsolete_files
from penstock.push.hub_errors import HubRepo
from penstock.push.stage import PushSettings


@dataclass(frozen=True)
class HubTarget:
    """A Hub model repository at one revision."""

    hub: HubRepo
    settings: PushSettings

    @classmethod
    def open(cls, settings: PushSettings, *, endpoint: str | None = None) -> "HubTarget":
        """The repository, which need not exist. Raises CapabilityError without a token."""
        hub = HubRepo.with_token(settings.repo_id or "", "push.repo_id", endpoint=endpoint)
        return cls(hub, settings)

    def prepare(self) -> None:
        """Create the repository and its branch. Raises CapabilityError offline or without
        permission."""
        revision = self.settings.revision
        with self.hub.translate_errors("open"):
            self.api.create_repo(self._repo, private=self.settings.private, exist_ok=True)
            # A ref such as refs/pr/1 is of a pull request, and no branch.
            if revision and not revision.startswith("refs/"):
                self.api.create_branch(self._repo, branch=revision, exist_ok=True)

    def difference(self, files: Sequence[PushFile]) -> tuple[list[str], list[str]]:
        with self.hub.translate_errors("read"):
            return self._difference(files, self._revision)

    def send(self, files: Sequence[PushFile], *, title: str) -> dict[str, Any]:
        """Commit the files that differ and return the commit; without a difference, the latest
        commit.

        With `create_pr`, an open pull request of the same title is updated. Raises StageError if
        the Hub fails or does not store a file.
        """
        with self.hub.translate_errors("send to"):
            revision = self._revision
            pull_request: Any = None
            if self.settings.create_pr and any(self._difference(files, revision)):
                discussions = self.api.get_repo_discussions(
                    self._repo, discussion_type="pull_request", discussion_status="open"
                )
                pull_request = next((d for d in discussions if d.title == title), None)
                revision = pull_request.git_reference if pull_request else revision
            # Again, as the pull request may hold the files of an earlier push.
            send, remove = self._difference(files, revision)
            if not send and not remove:
                commit = self.api.model_info(self._repo, revision=revision).sha
                url = pull_request.url if pull_request else None
                return self._receipt(str(commit), url)
            by_name = {file.name: file for file in files}
            done = self.api.create_commit(
                self._repo,
                [
                    *(CommitOperationDelete(path_in_repo=name) for name in remove),
                    *(CommitOperationAdd(name, by_name[name].path) for name in send),
                ],
                commit_message=title,
                revision=None if revision == "main" else revision,
                create_pr=self.settings.create_pr and pull_request is None,
            )
            missing, _ = self._difference(files, done.oid)
            self.hub.require_committed(missing, len(files), done.oid)
            url = pull_request.url if pull_request else done.pr_url
            return self._receipt(done.oid, url)

    @property
    def api(self) -> HfApi:
        return self.hub.api

    @property
    def _repo(self) -> str:
        return self.hub.repo

    @property
    def _revision(self) -> str:
        return self.settings.revision or "main"

    def _receipt(self, commit: str, pull_request: str | None) -> dict[str, Any]:
        url = f"{self.api.endpoint}/{self._repo}"
        return {"url": url, "commit": commit, "pull_request": pull_request}

    def _difference(self, files: Sequence[PushFile], revision: str) -> tuple[list[str], list[str]]:
        try:
            entries = list(self.api.list_repo_tree(self._repo, recursive=True, revision=revision))
        except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
            entries = []  # A repository without commits has no tree.
        remote = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

        def is_identical(file: PushFile) -> bool:
            at_hub = remote.get(file.name)
            if at_hub is None or at_hub.size != file.num_bytes:
                return False
            if at_hub.lfs is not None:
                return at_hub.lfs.sha256 == file.sha256
            return at_hub.blob_id == git_digest(file.path)

        send = [file.name for file in files if not is_identical(file)]
        return send, obsolete_files(remote, files)
