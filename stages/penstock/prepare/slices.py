"""Slices: records of one source that are tokenized and cached together, with content-based keys.

The cache key of a slice contains everything that determines its samples: the tokenizer, the data
set's settings, and digests of its records. It does not contain seeds, shuffling, weights or the
validation split, nor the position of its records, so most changes of a run reuse its slices.

Sharding is applied here as well: every `shards`th record of a slice belongs to one shard, and of
those every `dataset_shard_num`th. The offset is derived from the slice's content, so that over many
slices all shards get about equally many records; every record is in exactly one shard.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import Source, short
from penstock.core.sources.pin import has_processor_files
from penstock.prepare.bad_records import Tally
from penstock.prepare.readers.file_splits import FileSplit, split_source
from penstock.prepare.readers.image_pins import digest_images
from penstock.prepare.readers.registry import count_records
from penstock.prepare.settings import DatasetSettings, PrepareSettings

FORMAT = 6
"""Increase it if the same records and settings must give other samples. 5: a conversation has the
tokens of its whole text, and a turn ends with one stop token; a text that begins with BOS gets no
second one. 6: tokenized records have the loss weights of their column."""

MEDIA_FORMAT = 2
"""Increase it if the same records with media, or with tokens that stand for them, must give other
samples."""

# Settings that select records; the slice key contains digests of those records instead.
RECORD_SELECTION = {
    "shards",
    "shards_idx",
    "preprocess_shards",
    "streaming",
    "dataset_shard_num",
    "dataset_shard_idx",
    "document_split",
}

Role = Literal["train", "validation", "avoid"]
"""Use of a slice; `avoid`: decontamination data, which must not be trained on."""


@dataclass(frozen=True)
class Slice:
    """Records of data set number `dataset` of the sources of its role."""

    key: str
    """16 hex digits, unique in the run."""
    content: str
    """Cache key, 16 hex digits; equals `key` unless the same records are listed twice."""
    role: Role
    dataset: int
    label: str
    settings: DatasetSettings
    columns: tuple[str, ...] | None
    pieces: tuple[FileSplit, ...]
    first: int = 0
    """Index of the first record that is used, in all pieces together."""
    step: int = 1
    """Stride: every `step`th record is used."""
    images: str | None = None
    """Digest of the images that its records name by path."""

    @property
    def file(self) -> str:
        """Name of its Arrow file in an artifact."""
        return f"slice-{self.key}.arrow"

    @property
    def num_bytes(self) -> int:
        """Approximate size, for load balancing."""
        return sum(piece.num_bytes for piece in self.pieces)


TokenizedSlice = tuple[Slice, Path, Tally]
"""(slice, path of its Arrow file, counts of its records)."""


def plan_slices(
    settings: PrepareSettings,
    train: Sequence[Source],
    validation: Sequence[Source],
    avoid: Sequence[Source],
    tokenizer: Source,
    *,
    token: bool | None = None,
) -> list[Slice]:
    """All slices, training first, in the order of the sources and of their records.

    Training sources of weight 0 have none. Raises StageError for a file that is empty or of another
    type, CapabilityError for a hub data set that cannot be fetched.
    """
    weights = [mix.weight for mix in settings.mix] or [1.0] * len(train)
    roles: list[tuple[Role, Sequence[Source], tuple[DatasetSettings, ...]]] = [
        ("train", train, settings.datasets),
        ("validation", validation, settings.test_datasets),
        ("avoid", avoid, settings.decontaminate_datasets),
    ]
    planned = [
        _build_slice(role, index, source, source_settings, settings, tokenizer, pieces)
        for role, sources, all_of_them in roles
        for index, (source, source_settings) in enumerate(zip(sources, all_of_them, strict=True))
        if role != "train" or weights[index]
        for pieces in _split_into_slices(source, source_settings, token)
    ]
    return _with_unique_keys(planned)


def dataset_label(source: Source) -> str:
    """Display name of the data set."""
    pin = source.pin
    return str(pin[{"files": "label", "hub": "repo", "builtin": "name"}[pin["kind"]]])


def select_shard(slices: Sequence[Slice], index: int, count: int) -> list[Slice]:
    """The slices of share `index` of `count`; every slice is in exactly one share.

    Slices are assigned by size in boustrophedon order, so that shares have about equal size.
    """
    once = {item.content: item for item in slices}
    # Each machine sorts for itself: ties by content, or shares could overlap or leave a slice out.
    by_size = sorted(once.values(), key=lambda item: (-item.num_bytes, item.content))
    share_order = [*range(count), *reversed(range(count))]
    return [
        item for rank, item in enumerate(by_size) if share_order[rank % len(share_order)] == index
    ]


def _build_slice(
    role: Role,
    dataset: int,
    source: Source,
    dataset_settings: DatasetSettings,
    settings: PrepareSettings,
    tokenizer: Source,
    pieces: tuple[FileSplit, ...],
) -> Slice:
    label = dataset_label(source)
    held = digest_json([piece.as_json() for piece in pieces])
    first, step = _record_stride(dataset_settings, held)
    columns = settings.select_columns
    takes_media = has_processor_files(tokenizer)
    images = digest_images(pieces, dataset_settings, columns) if takes_media else None
    key = digest_json(
        {
            "format": FORMAT,
            "tokenizer": tokenizer.key,
            "settings": dataset_settings.model_dump(mode="json", exclude=RECORD_SELECTION),
            "columns": columns,
            # Samples have it in their column `source`.
            "label": label,
            "holds": held,
            "records": [first, step],
            # Left out where they say nothing: an entry would give every slice of text another key.
            **({"images": images} if images else {}),
            **({"media": MEDIA_FORMAT} if takes_media else {}),
        }
    )
    name = short(key)
    return Slice(
        name, name, role, dataset, label, dataset_settings, columns, pieces, first, step, images
    )


def _record_stride(settings: DatasetSettings, held: str) -> tuple[int, int]:
    """(first record, stride) of a slice.

    Record j is in shard (j + a) mod `shards`; of that shard's records, number k is in part
    (k + b) mod `dataset_shard_num`. a and b are taken from the content digest.
    """
    pieces, parts = settings.shards or 1, settings.dataset_shard_num or 1
    j = ((settings.shards_idx or 0) - int(held[:8], 16)) % pieces
    k = ((settings.dataset_shard_idx or 0) - int(held[8:16], 16)) % parts
    return j + pieces * k, pieces * parts


def _with_unique_keys(slices: list[Slice]) -> list[Slice]:
    """Give slices with the same records (a source listed twice, for weight) distinct keys."""
    counts: Counter[str] = Counter()
    unique_slices: list[Slice] = []
    for item in slices:
        again = counts[item.content]
        counts[item.content] += 1
        key = short(digest_json([item.content, again])) if again else item.content
        unique_slices.append(replace(item, key=key))
    return unique_slices


def _split_into_slices(
    source: Source, settings: DatasetSettings, token: bool | None
) -> list[tuple[FileSplit, ...]]:
    """The pieces of each slice: one, or several if `preprocess_shards` sets the slice count."""
    pieces = split_source(
        source,
        ds_type=settings.ds_type,
        streaming=settings.streaming,
        token=token,
        split=settings.document_split,
        max_record_bytes=settings.max_record_bytes,
    )
    if settings.preprocess_shards is None:
        return [(piece,) for piece in pieces]
    counts = [count_records(piece, token) for piece in pieces]
    return [
        _select_records(pieces, counts, n, settings.preprocess_shards)
        for n in range(settings.preprocess_shards)
    ]


def _select_records(
    pieces: list[FileSplit], counts: list[int], number: int, of: int
) -> tuple[FileSplit, ...]:
    """Pieces of slice `number` of `of`; record counts of slices differ by at most one."""
    total = sum(counts)
    first, last = total * number // of, total * (number + 1) // of
    run: list[FileSplit] = []
    start = 0
    for piece, count in zip(pieces, counts, strict=True):
        low, high = max(first - start, 0), min(last - start, count)
        if low < high:
            size = piece.num_bytes * (high - low) // count
            run.append(replace(piece, start=low, stop=high, num_bytes=size))
        start += count
    return tuple(run)
