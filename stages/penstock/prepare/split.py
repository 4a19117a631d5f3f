"""Plan and write the files of `data/train` and `data/validation`.

A slice that is stored whole is a hard link to the cache. Partial slices are written to new files,
unless a sealed artifact beside this one has a file with the same samples.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.cache.attempt_files import finished_write, take_over
from penstock.core.cache.digest_cache import digest_files, keep_cached_across_links
from penstock.core.cache.manifest import MANIFEST, read_manifest
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import short
from penstock.core.errors import ArtifactError
from penstock.core.files import link, read_json, regular_files
from penstock.prepare.select.filter_state import Mask
from penstock.prepare.select.select import Selection
from penstock.prepare.settings import PrepareSettings
from penstock.prepare.slice_cache import media_files
from penstock.prepare.slices import TokenizedSlice
from penstock.rows.arrow import map_batches, source_array, to_arrow, with_columns
from penstock.rows.image_files import MEDIA
from penstock.rows.prepared import PLAN
from penstock.rows.schema import SPLITS, prepared_schema

FORMAT = 1
"""Increase it if the same samples must be written in other record batches."""

BATCH_SAMPLES = 1000
BATCH_BYTES = 32 << 20
"""Size at which a record batch is written, in samples or bytes."""


@dataclass(frozen=True)
class SlicePart:
    """Samples of one slice in a file: those in `start:stop` where `keep` is true (None: all)."""

    entry: TokenizedSlice
    start: int
    stop: int
    keep: Mask | None

    def __len__(self) -> int:
        return self.stop - self.start if self.keep is None else int(self.keep.sum())

    @property
    def is_whole(self) -> bool:
        """Whether it contains the whole slice."""
        return self.keep is None and (self.start, self.stop) == (0, self.entry[2].rows)

    def as_json(self) -> list[Any]:
        """Identity of its samples."""
        mask = None if self.keep is None else blake2b(np.packbits(self.keep).tobytes()).hexdigest()
        return [self.entry[0].key, self.start, self.stop, mask]


@dataclass(frozen=True)
class DataFile:
    """One file of a split and its content, in order."""

    name: str
    content: str
    """Digest of its samples: files with the same digest have the same bytes."""
    shares: tuple[SlicePart, ...]

    @property
    def is_slice(self) -> bool:
        """Whether it is exactly one whole slice."""
        return len(self.shares) == 1 and self.shares[0].is_whole


def plan_files(
    finished: Sequence[TokenizedSlice], selection: Selection, settings: PrepareSettings
) -> dict[str, list[DataFile]]:
    """The files of each split: one per non-empty slice; for training `num_dataset_shards_to_save`
    files, if set and there are that many samples."""
    shares: dict[str, list[SlicePart]] = {split: [] for split in SPLITS}
    for entry, part in zip(finished, selection.masks, strict=True):
        for split, mask in zip(SPLITS, (part.train, part.validation), strict=True):
            share = SlicePart(entry, 0, entry[2].rows, mask)
            if len(share):
                shares[split].append(share)
    files = {
        split: [
            DataFile(f"slice-{share.entry[0].key}.arrow", _content_digest([share]), (share,))
            for share in shares[split]
        ]
        for split in SPLITS
    }
    if settings.num_dataset_shards_to_save is not None:
        files["train"] = _split_evenly(shares["train"], settings.num_dataset_shards_to_save)
    return files


def publish_splits(
    finished: Sequence[TokenizedSlice], selection: Selection, settings: PrepareSettings, out: Path
) -> None:
    """Write the files of both splits to `out/data`, except those that an earlier attempt wrote; its
    other files are deleted."""
    published: set[Path] = set()
    linked_files: list[tuple[Path, Path]] = []
    partial: list[tuple[DataFile, Path]] = []
    for split, files in plan_files(finished, selection, settings).items():
        for file in files:
            target = out / file_path(split, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            published.add(target)
            if file.is_slice:
                linked_files.append((file.shares[0].entry[1], target))
            elif not take_over(target):
                partial.append((file, target))
    same = _find_same_files(out, {file.content for file, _ in partial}) if partial else {}
    linked_files += ((same[f.content], target) for f, target in partial if f.content in same)
    links = [*linked_files, *_media_links(finished, selection, out)]
    # A link changes the ctime of its source, by which cached digests are recognized.
    with keep_cached_across_links(source for source, _ in links):
        for source, target in links:
            link(source, target)
    for file, target in partial:
        if file.content not in same:
            tallies = [share.entry[2] for share in file.shares]
            schema = prepared_schema(
                settings.kind,
                is_scored=settings.first_read.is_scored,
                has_images=any(tally.media for tally in tallies),
                is_weighted=any(tally.weighted for tally in tallies),
            )
            _write(file, schema, target)
    published |= {target for _, target in links}
    for path in regular_files(out):
        if path.suffix == ".arrow" and path not in published:
            path.unlink()


def _media_links(
    finished: Sequence[TokenizedSlice], selection: Selection, out: Path
) -> list[tuple[Path, Path]]:
    """(file of images in the cache, its place in the artifact) of the slices in a split."""
    links: dict[Path, Path] = {}
    for (_, path, tally), masks in zip(finished, selection.masks, strict=True):
        if any(mask is None or mask.any() for mask in (masks.train, masks.validation)):
            for file in sorted(media_files(path, tally)):
                links[file] = out / MEDIA / file.name
    for target in links.values():
        target.parent.mkdir(parents=True, exist_ok=True)
    return list(links.items())


def file_path(split: str, file: DataFile) -> str:
    """Path of a file in the artifact."""
    return f"data/{split}/{file.name}"


def _content_digest(shares: Sequence[SlicePart]) -> str:
    return short(digest_json([FORMAT, *(share.as_json() for share in shares)]))


def _split_evenly(shares: Sequence[SlicePart], num_files: int) -> list[DataFile]:
    """Split all samples, in order, into `num_files` files whose sizes differ by at most one."""
    starts = np.cumsum([0, *map(len, shares)]).tolist()
    total = starts[-1]
    count = min(num_files, total)
    data_files: list[DataFile] = []
    for low, high in pairwise(total * number // count for number in range(count + 1)):
        parts: list[SlicePart] = []
        for index in range(bisect_right(starts, low) - 1, bisect_left(starts, high)):
            share = shares[index]
            first, last = max(low - starts[index], 0), min(high - starts[index], len(share))
            if share.keep is None:
                part = SlicePart(share.entry, share.start + first, share.start + last, None)
            else:
                rows = np.flatnonzero(share.keep)[first:last]
                begin, end = int(rows[0]), int(rows[-1]) + 1
                keep = share.keep[begin:end]
                part = SlicePart(share.entry, share.start + begin, share.start + end, keep)
            parts.append(part)
        content = _content_digest(parts)
        data_files.append(DataFile(f"slice-{content}.arrow", content, tuple(parts)))
    return data_files


def _find_same_files(out: Path, wanted_digests: set[str]) -> dict[str, Path]:
    """Files with the `wanted_digests` content in sealed artifacts beside `out`, verified by digest.

    Artifacts that cannot be read are skipped."""
    files_by_digest: dict[str, tuple[Path, str]] = {}
    for manifest in sorted(out.parent.glob(f"*/{MANIFEST}")):
        folder = manifest.parent
        if "." in folder.name:
            continue  # set aside, in order to be built again
        try:
            record = read_manifest(folder)
            if record is None:
                continue
            sealed = {file["path"]: file["sha256"] for file in record["files"]}
            # Before it is believed: an edited plan could name a file that has other samples.
            if digest_files([folder / PLAN]) != [sealed[PLAN]]:
                continue
            splits = read_json(folder / PLAN)["splits"]
            for entry in (entry for split in SPLITS for entry in splits[split]):
                path = folder / entry["file"]
                if entry["content"] in wanted_digests and path.is_file():
                    files_by_digest[entry["content"]] = (path, sealed[entry["file"]])
        except (OSError, ArtifactError, KeyError, TypeError):
            continue
    # A hard link shares the bytes: damage in another artifact would be sealed in this one too.
    digests = digest_files([path for path, _ in files_by_digest.values()])
    return {
        content: path
        for (content, (path, sealed)), digest in zip(files_by_digest.items(), digests, strict=True)
        if digest == sealed
    }


def _write(file: DataFile, schema: pa.Schema, target: Path) -> None:
    with (
        finished_write(target) as part,
        pa.OSFile(str(part), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        for batch in _iter_batches(file, schema):
            writer.write_batch(batch)


def _iter_batches(file: DataFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    # One dictionary of sources for the whole file, which the Arrow file format requires.
    labels = list(dict.fromkeys(share.entry[0].label for share in file.shares))
    held: list[pa.RecordBatch] = []
    for share in file.shares:
        number = labels.index(share.entry[0].label)
        for selected in _iter_selected(share):
            batch = with_columns(selected, schema)
            sources = source_array(batch.num_rows, number, labels)
            columns = [sources if n == "source" else batch.column(n) for n in schema.names]
            held.append(pa.RecordBatch.from_arrays(columns, schema=schema))
            samples, size = sum(b.num_rows for b in held), sum(b.nbytes for b in held)
            if samples >= BATCH_SAMPLES or size >= BATCH_BYTES:
                yield pa.concat_batches(held)
                held = []
    if held:
        yield pa.concat_batches(held)


def _iter_selected(share: SlicePart) -> Iterator[pa.RecordBatch]:
    row = 0
    for batch in map_batches(share.entry[1]):
        low, high = max(share.start - row, 0), min(share.stop - row, batch.num_rows)
        if low < high:
            part = batch.slice(low, high - low)
            first = row + low - share.start
            rows = np.arange(high - low)
            if share.keep is not None:
                rows = np.flatnonzero(share.keep[first : first + high - low])
            # Always copied: IPC would write all tokens of the batch that a slice is a view of.
            if len(rows):
                yield part.take(to_arrow(rows))
        row += batch.num_rows
