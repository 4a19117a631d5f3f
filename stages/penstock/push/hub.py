"""Sending files to a repository on the Hugging Face hub, in one commit, and only what differs.

The token is asked for here, handed to the hub's client, and kept nowhere else. Large files go the
way huggingface_hub chooses (Xet where `hf_xet` is installed, else LFS).
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
)
from huggingface_hub.hf_api import RepoFile

from penstock.core import env
from penstock.core.errors import CapabilityError, PenstockError, StageError
from penstock.push.contents import SentFile, superseded
from penstock.push.stage import PushSettings

_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]+")


@dataclass(frozen=True)
class HubTarget:
    """A model repository at one revision, with the right to write to it."""

    api: HfApi
    settings: PushSettings

    @classmethod
    def open(cls, settings: PushSettings, *, endpoint: str | None = None) -> "HubTarget":
        """Find or make the repository and its branch.

        Raises CapabilityError without a token, without the right to write, or offline.
        """
        token = env.hub_token() or get_token()
        if not token:
            raise CapabilityError(
                f"There is no Hugging Face token, and {settings.repo_id} cannot be written without "
                "one.\n  Set HF_TOKEN to a token that may write, or log in once with "
                "`hf auth login`."
            )
        target = cls(HfApi(endpoint=endpoint, token=token, library_name="penstock"), settings)
        with target._speaking("open"):
            target.api.create_repo(target._repo, private=settings.private, exist_ok=True)
            if settings.revision and not settings.revision.startswith("refs/"):
                target.api.create_branch(target._repo, branch=settings.revision, exist_ok=True)
        return target

    def difference(self, files: Sequence[SentFile]) -> tuple[list[str], list[str]]:
        """Names of files that the repository lacks or holds otherwise, and names to remove."""
        with self._speaking("read"):
            return self._difference(files, self._base)

    def send(self, files: Sequence[SentFile], *, title: str) -> dict[str, Any]:
        """Commit what differs and return the commit; without a difference, the newest commit there.

        With `create_pr`, a pull request of the same title that is still open is continued rather
        than opened twice. Raises StageError when the hub fails or does not keep a file.
        """
        with self._speaking("send to"):
            revision = self._base
            pull_request = None
            if self.settings.create_pr and any(self._difference(files, revision)):
                pull_request = self._open_pull_request(title)
                revision = pull_request.git_reference if pull_request else revision
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
            self._check_arrived(files, done.oid)
            url = pull_request.url if pull_request else done.pr_url
            return self._receipt(done.oid, url)

    @property
    def _repo(self) -> str:
        return self.settings.repo_id or ""

    @property
    def _base(self) -> str:
        return self.settings.revision or "main"

    def _receipt(self, commit: str, pull_request: str | None) -> dict[str, Any]:
        url = f"{self.api.endpoint}/{self._repo}"
        return {"url": url, "commit": commit, "pull_request": pull_request}

    def _difference(self, files: Sequence[SentFile], revision: str) -> tuple[list[str], list[str]]:
        there = self._tree(revision)
        send = [file.name for file in files if not _is_same(file, there.get(file.name))]
        return send, superseded(there, files)

    def _tree(self, revision: str) -> dict[str, RepoFile]:
        try:
            found = list(self.api.list_repo_tree(self._repo, recursive=True, revision=revision))
        except EntryNotFoundError:  # a repository without any commit has no tree
            return {}
        return {entry.path: entry for entry in found if isinstance(entry, RepoFile)}

    def _open_pull_request(self, title: str) -> Any:
        for discussion in self.api.get_repo_discussions(
            self._repo, discussion_type="pull_request", discussion_status="open"
        ):
            if discussion.title == title:
                return discussion
        return None

    def _check_arrived(self, files: Sequence[SentFile], commit: str) -> None:
        missing, _ = self._difference(files, commit)
        if missing:
            raise StageError(
                f"{len(missing)} of {len(files)} files are not in commit {commit} of {self._repo} "
                f"although the hub took it: {', '.join(missing[:5])}.\n"
                "  Look for them in the repository's .gitignore, then push again."
            )

    @contextmanager
    def _speaking(self, doing: str) -> Iterator[None]:
        """Turn what the client raises into our errors.

        The client's own errors are not chained: they quote addresses that carry signatures, and
        the log of a failed attempt holds every chained text.
        """
        try:
            yield
        except PenstockError:
            raise
        except OfflineModeIsEnabled:
            raise CapabilityError(
                f"{self._repo} cannot be reached: HF_HUB_OFFLINE is set.\n"
                "  Unset it to push, or list what would be sent with --push.dry_run true."
            ) from None
        except (HTTPError, OSError, RuntimeError, ValueError) as error:
            raise self._translated(doing, error) from None

    def _translated(self, doing: str, error: BaseException) -> PenstockError:
        status = _status_of(error)
        said = self._printable(error)
        at = f"{self._repo} at {self.api.endpoint}"
        if status in (401, 403):
            return CapabilityError(
                f"The hub refuses to {doing} {at} with this token (HTTP {status}): {said}\n"
                f"  Use a token that may write to {self._repo} (HF_TOKEN or `hf auth login`), or "
                "change push.repo_id."
            )
        if status == 404:
            return CapabilityError(
                f"{at} does not exist, or this token may not see it (HTTP 404): {said}\n"
                "  Check push.repo_id and push.revision, and which account the token belongs to."
            )
        fault = f"HTTP {status}" if status else type(error).__name__
        return StageError(
            f"Could not {doing} {at} ({fault}): {said}\n"
            "  Push again: what has arrived is not sent twice."
        )

    def _printable(self, error: BaseException) -> str:
        """What the client says and its cause, without signatures and without the token."""
        said = str(error) if error.__cause__ is None else f"{error} {error.__cause__}"
        text = _QUERY.sub(r"\1", " ".join(said.split()))[:500]
        return text.replace(str(self.api.token), "<token>")


def _status_of(error: BaseException | None) -> int | None:
    """The HTTP status behind an error; the client wraps the errors of its upload threads."""
    while error is not None:
        if isinstance(error, HfHubHTTPError) and error.response is not None:
            return error.response.status_code
        error = error.__cause__
    return None


def _is_same(file: SentFile, there: RepoFile | None) -> bool:
    if there is None or there.size != file.num_bytes:
        return False
    if there.lfs is not None:
        return there.lfs.sha256 == file.sha256
    return there.blob_id == _git_blob_id(file)


def _git_blob_id(file: SentFile) -> str:
    """The name git gives to the content: SHA-1 of a header with the size, then the bytes."""
    digest = hashlib.sha1(f"blob {file.num_bytes}\0".encode(), usedforsecurity=False)
    with file.path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
