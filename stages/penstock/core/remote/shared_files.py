"""Files that all machines share by name: made once by whoever comes first, fetched by the others.

Names stand for content, so a file that is there need never be looked at again, and two machines
that make the same one at once send the same bytes.
"""

import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from penstock.core.files import atomic_write
from penstock.core.remote.open import open_file
from penstock.core.remote.path import RemotePath, checked

AT_ONCE = 8
CHUNK = 4 << 20

Files = tuple[str, ...]
"""Names that belong together, the one that vouches for the others last."""


@dataclass(frozen=True)
class SharedCache:
    """A folder on this machine and the folder behind a URL that has what others made."""

    url: str
    folder: Path

    def exchange(self, wanted: Iterable[Files]) -> None:
        """Fetch what is there and not here, and send what is here and not there.

        One listing is asked for, however many there are. Raises StageError when the connection
        breaks, CapabilityError when the store refuses.
        """
        there = set(RemotePath.of(self.url).files())
        with ThreadPoolExecutor(AT_ONCE) as pool:
            jobs = [pool.submit(self._even_out, files, there) for files in wanted]
            for job in jobs:
                job.result()

    def send(self, files: Files) -> None:
        """Send files that were just made here, the one that vouches for the others last."""
        root = RemotePath.of(self.url)
        for name in files:
            (root / checked(name)).put(self.folder / name)

    def _even_out(self, files: Files, there: set[str]) -> None:
        is_here = all((self.folder / name).is_file() for name in files)
        is_there = all(name in there for name in files)
        if is_there and not is_here:
            self._fetch(files)
        elif is_here and not is_there:
            self.send(files)

    def _fetch(self, files: Files) -> None:
        root = RemotePath.of(self.url)
        for name in files:
            with (
                atomic_write(self.folder / checked(name)) as part,
                open_file((root / name).url) as source,
                part.open("wb") as stream,
            ):
                shutil.copyfileobj(source, stream, CHUNK)
