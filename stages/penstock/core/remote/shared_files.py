"""Shared remote cache of files: created by the first machine, downloaded by the others.

Names are content-addressed, so an existing file never needs to be checked, and two machines that
create the same file at once upload the same bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.core.remote.artifact_sync import download, transfer
from penstock.core.remote.path import RemotePath

Files = tuple[str, ...]  # Names that belong together; the last one marks the group as complete


@dataclass(frozen=True)
class SharedCache:
    """A local folder and the remote folder that it is shared with."""

    url: str
    folder: Path

    def exchange(self, file_sets: Iterable[Files]) -> None:
        """Download files that are missing locally, and upload files that are missing remotely.

        Makes one listing request, however many files there are. Raises StageError if the connection
        is lost, CapabilityError if access is denied.
        """
        remote_names = set(RemotePath.from_url(self.url).files())

        def synchronize(files: Files) -> None:
            is_here = all((self.folder / name).is_file() for name in files)
            is_there = all(name in remote_names for name in files)
            if is_there and not is_here:
                self._fetch(files)
            elif is_here and not is_there:
                self.send(files)

        transfer(synchronize, file_sets)

    def send(self, files: Files) -> None:
        """Upload files that were just created locally, the completion marker last."""
        root = RemotePath.from_url(self.url)
        for name in files:
            (root / name).put(self.folder / name)

    def _fetch(self, files: Files) -> None:
        root = RemotePath.from_url(self.url)
        for name in files:
            download(root / name, self.folder / name)
