"""Checkpoint storage below `output_dir`, with a size limit. Temporary folders begin with a dot,
which is not allowed in clients' names."""

import asyncio
import os
import shutil
import stat
import uuid
from pathlib import Path

from penstock.core.replace_folder import replace_folder
from penstock.server.scheduler.checkpoint_names import CHECKPOINT, MODEL, CheckpointRef, Subfolder
from penstock.server.scheduler.errors import RequestError

SUBFOLDERS: tuple[Subfolder, ...] = ("weights", "sampler_weights")


class Storage:
    """Checkpoint folders."""

    def __init__(self, output_dir: Path, limit: int) -> None:
        """`limit`: maximum bytes of `output_dir`."""
        output_dir.mkdir(parents=True, exist_ok=True)
        self.root = output_dir.resolve()
        self.limit = limit

    def folder(self, ref: CheckpointRef) -> Path:
        """The folder of a checkpoint. Raises RequestError if a symbolic link points outside."""
        folder = self.root / ref.subfolder / ref.model / ref.name
        for part in (folder, folder.parent, folder.parent.parent):
            if part.is_symlink():
                raise RequestError(
                    "invalid",
                    f"{part.relative_to(self.root)} in output_dir is a link, which is not followed."
                    "\n  Put the folder itself there.",
                )
        return folder

    def exists(self, ref: CheckpointRef) -> bool:
        return self.folder(ref).is_dir()

    def size(self, ref: CheckpointRef) -> int:
        return folder_num_bytes(self.folder(ref))

    def check_space(self, needed: int, purpose: str) -> None:
        """Raises RequestError if `needed` more bytes would exceed the limit or fill the disk."""
        used = folder_num_bytes(self.root)
        if used + needed > self.limit:
            raise RequestError(
                "storage_limit",
                f"{purpose} takes about {format_bytes(needed)}, and output_dir holds"
                f" {format_bytes(used)}: together more than storage_limit"
                f" ({format_bytes(self.limit)}).\n"
                "  Delete checkpoints, or raise storage_limit.",
            )
        free = shutil.disk_usage(self.root).free
        if needed > free:
            raise RequestError(
                "storage_limit",
                f"{purpose} takes about {format_bytes(needed)}, and the disk of output_dir has"
                f" {format_bytes(free)} left.\n  Delete checkpoints, or make room on the disk.",
            )

    def temp_folder(self, ref: CheckpointRef) -> Path:
        """A temporary folder beside it, not created yet."""
        folder = self.folder(ref)
        return folder.with_name(f".{folder.name}.new")

    def publish(self, ref: CheckpointRef) -> None:
        """Rename the temporary folder to its final name, deleting an existing one."""
        folder = self.folder(ref)
        old = replace_folder(self.temp_folder(ref), folder, folder.with_name(f".{folder.name}.old"))
        if old:
            discard(old)

    def move_to_trash(self, ref: CheckpointRef) -> Path | None:
        """Rename it; returns the new path, to be deleted, or None if it did not exist."""
        folder = self.folder(ref)
        if not folder.exists():
            return None
        gone = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.gone")
        folder.rename(gone)
        return gone

    def finish_interrupted(self) -> None:
        """Complete operations that an earlier process had started."""
        for subfolder in SUBFOLDERS:
            for dotted in (self.root / subfolder).glob("*/.*"):
                if dotted.is_symlink() or not dotted.is_dir():
                    continue
                folder = dotted.with_name(dotted.name[1:].removesuffix(".old"))
                # It died between the two renames of `replace_folder`, which Linux makes in one.
                if dotted.suffix == ".old" and not folder.exists():
                    dotted.rename(folder)
                else:
                    discard(dotted)

    def list_checkpoints(self) -> list[CheckpointRef]:
        """All existing checkpoints, by name."""
        refs = [
            CheckpointRef(folder.parent.name, subfolder, folder.name)
            for subfolder in SUBFOLDERS
            if not (self.root / subfolder).is_symlink()
            for folder in (self.root / subfolder).glob("*/*")
            if CHECKPOINT.fullmatch(folder.name) and MODEL.fullmatch(folder.parent.name)
            if not folder.is_symlink() and not folder.parent.is_symlink() and folder.is_dir()
        ]
        return sorted(refs)


class TrashCollector:
    """Deletes folders in the background."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Task[None]] = set()

    def discard(self, folders: list[Path]) -> None:
        for folder in folders:
            task = asyncio.create_task(asyncio.to_thread(discard, folder))
            # asyncio itself refers to tasks only weakly.
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def done(self) -> None:
        """Wait until all deletions are complete."""
        if self._under_way:
            await asyncio.wait(self._under_way)


def folder_num_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, without those behind links or deleted meanwhile."""
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    total += folder_num_bytes(Path(entry.path))
                elif stat.S_ISREG(status.st_mode):
                    total += status.st_size
    except (FileNotFoundError, NotADirectoryError):
        return total
    return total


def discard(folder: Path) -> None:
    """Delete a folder, if it exists."""
    if folder.is_dir() and not folder.is_symlink():
        # What cannot be deleted now is left to `finish_interrupted` of the next process.
        shutil.rmtree(folder, ignore_errors=True)


def format_bytes(count: int) -> str:
    """Format a number of bytes."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
