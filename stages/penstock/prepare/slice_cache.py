"""Slice cache shared by all runs: `<dataset_prepared_path>/slices/<key16>.arrow`.

A slice's note has the counts of its records (see `core.cache.noted_files`). Features computed from
a slice are stored beside it, and tensors of its images below `media`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.core.cache.noted_files import Note, WriteStatus, get_or_write, read_notes
from penstock.core.remote.shared_files import Files, SharedCache
from penstock.media.kinds import has_extra
from penstock.prepare.bad_records import Tally
from penstock.prepare.slices import Slice, TokenizedSlice
from penstock.rows.image_files import MEDIA

SliceStatus = WriteStatus


@dataclass(frozen=True)
class SliceCache:
    """The folder of all slices."""

    folder: Path
    shared: SharedCache | None = None
    """The same cache at a URL, shared by all machines."""

    def slice_path(self, item: Slice) -> Path:
        """Path of the slice's file, which may not exist yet."""
        return self.folder / f"{item.content}.arrow"

    def lookup(self, slices: Sequence[Slice]) -> list[TokenizedSlice | None]:
        """Each slice with its file and counts; None for a slice that is missing or damaged, or
        whose images are, or that lacked packages which are installed now."""
        paths = [self.slice_path(item) for item in slices]
        notes = read_notes(paths)
        tallies = {path: Tally.from_json(note["tally"]) for path, note in notes.items()}
        media = {path: media_files(path, tally) for path, tally in tallies.items()}
        intact = read_notes([*{file for files in media.values() for file in files}])
        usable = {
            path: tally
            for path, tally in tallies.items()
            if intact.keys() >= media[path] and not _is_outdated(tally)
        }
        return [
            (item, path, usable[path]) if path in usable else None
            for item, path in zip(slices, paths, strict=True)
        ]

    def exchange(self, slices: Sequence[Slice]) -> None:
        """Download slices that other machines have tokenized, and upload those that they lack."""
        if self.shared:
            self.shared.exchange({_file_names(item.content) for item in slices})
            # After the slices: their notes name the files of media.
            notes = read_notes([self.slice_path(item) for item in slices])
            media = {name for note in notes.values() for name in note["tally"].get("media", ())}
            self.shared.exchange({_file_names(f"{MEDIA}/{name}") for name in media})

    def get_or_tokenize(
        self, item: Slice, tokenize: Callable[[Path], Tally], when_busy: Literal["wait", "skip"]
    ) -> SliceStatus:
        """Unless the slice is cached, call `tokenize`, which writes it to the given path.

        If another run is tokenizing it, waits or returns "busy" at once, as `when_busy` says.
        """

        def send() -> None:
            if self.shared:
                # Not its media, which their own cache sends (`MediaCache.get_or_process`).
                self.shared.send(_file_names(item.content))

        target = self.slice_path(item)

        def is_usable(note: Note) -> bool:
            tally = Tally.from_json(note["tally"])
            files = media_files(target, tally)
            return read_notes([*files]).keys() >= files and not _is_outdated(tally)

        def write(part: Path) -> Mapping[str, Any]:
            return {"tally": tokenize(part).as_json()}

        return get_or_write(target, write, when_busy, send, is_usable)


def _is_outdated(tally: Tally) -> bool:
    """Whether records were left out for lack of packages that are installed now."""
    return any(map(has_extra, tally.lacking))


def media_files(slice_path: Path, tally: Tally) -> set[Path]:
    """The files with the images of a slice."""
    return {slice_path.parent / MEDIA / f"{name}.arrow" for name in tally.media}


def _file_names(name: str) -> Files:
    return f"{name}.arrow", f"{name}.json"
