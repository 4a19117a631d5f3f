"""Encode the first records of a source without running the prepare stage, for `penstock check`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from penstock.config.schema.run import RunConfig
from penstock.core.cache.stage import Source
from penstock.core.errors import ConfigError
from penstock.core.sources.pin import pin_tokenizer
from penstock.core.sources.pin_remote import resolve_folder
from penstock.media.cache import MediaCache
from penstock.media.load import load_processor
from penstock.media.reference import Folder
from penstock.prepare.bad_records import DROP_REASONS, BadRecord, locate
from penstock.prepare.chat_templates.suggest import suggest_chat_template
from penstock.prepare.dataset_type import INFER_RECORDS
from penstock.prepare.encode.encoder import EncodedBatch, Encoder, NoTemplateError
from penstock.prepare.encode.images import ImagesFound
from penstock.prepare.encode.render_chat import NO_TEMPLATE
from penstock.prepare.infer_type import infer_format
from penstock.prepare.notices import token_warnings
from penstock.prepare.readers.image_pins import image_root, source_pieces
from penstock.prepare.readers.records import Batch, Value
from penstock.prepare.settings import DatasetSettings
from penstock.prepare.slice_images import load_slice_images
from penstock.prepare.unread_columns import count_unread, unread_columns
from penstock.rows.tokenizer import load_stop_token_ids

LARGEST_TOKENS = 5
"""How many of the largest token ids are returned."""


@dataclass(frozen=True)
class ImageSource:
    """Where the images of records are, and what processes them."""

    tokenizer: tuple[str, str | None]
    """Path or hub id, and commit."""
    folder: Folder | None
    """The folder to which paths are relative."""


@dataclass(frozen=True)
class FirstSamples:
    """Counts of the first records and their samples."""

    records: int
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    lengths: tuple[int, ...] = ()
    """Tokens of each sample; for pairs, of the longer side."""
    largest_tokens: tuple[int, ...] = ()
    """The largest token ids, in descending order, without duplicates."""
    bad: int = 0
    """Unusable records; the prepare stage fails unless `data.bad_rows_allowed` allows them."""
    dropped: int = 0
    """Records without a sample, the unusable ones included."""
    faults: tuple[str, ...] = ()
    """Why records have no sample, without duplicates."""
    unread: tuple[str, ...] = ()
    """What the records hold and nothing reads, a sentence each."""
    warnings: tuple[str, ...] = ()
    """As `data_warnings` has them for all records."""
    template: str | None = None
    """An included chat template that renders the records, if the tokenizer's own does not."""
    hint: str = ""
    """What to write instead, where records have no sample."""


def image_source(run: RunConfig, source: Source, settings: DatasetSettings) -> ImageSource:
    """Where the images of a source's records are."""
    folder = None
    if source.pin["kind"] == "files":
        pieces = source_pieces(source, settings, run.data.hf_use_auth_token)
        folder = image_root(pieces[0], settings)
    pinned = pin_tokenizer(run.model.tokenizer_source)
    path = resolve_folder(run.model.tokenizer_source, pinned)
    return ImageSource((path, pinned.pin.get("commit")), folder)


def first_samples(
    records: list[dict[str, Any]],
    settings: DatasetSettings,
    tokenizer: PreTrainedTokenizerBase,
    columns: tuple[str, ...] | None = None,
    images: ImageSource | None = None,
) -> FirstSamples:
    """Encode records as the prepare stage does; without `images`, records with images give no
    samples. Raises as `Encoder` and `load_processor`."""
    values: list[Value] = list(records)
    stops = load_stop_token_ids(*images.tokenizer) if images else ()
    try:
        encode = Encoder(settings, tokenizer, columns, stop_token_ids=stops)
    except NoTemplateError:
        template = suggest_chat_template(records[:INFER_RECORDS], settings, tokenizer)
        return FirstSamples(
            len(records),
            bad=len(records),
            dropped=len(records),
            faults=(NO_TEMPLATE,),
            template=template,
            hint=_template_hint(template),
        )
    try:
        samples = encode(values)
    except ImagesFound:
        samples = _with_images(encode, values, images, settings)
    faults = list(samples.faults.values())
    ids = np.concatenate([np.unique(side.ids) for side in samples.sides])
    template = None
    if any(fault.reason == "template" for fault in faults):
        template = suggest_chat_template(records[:INFER_RECORDS], settings, tokenizer)
    unread = [count_unread(values, settings, columns), samples.unread_keys]
    counts, unread_counts = samples.counts, unread[0].counts + unread[1].counts
    examples = {
        name: {**locate("", 0, record_index + 1), "value": value}
        for unread_columns in unread
        for name, (record_index, value) in unread_columns.examples.items()
    }
    return FirstSamples(
        records=len(records),
        samples=len(samples.records),
        tokens=int(sum(side.lengths.sum() for side in samples.sides)),
        trained_tokens=int(sum(side.count_trained().sum() for side in samples.sides)),
        lengths=tuple(np.max([side.lengths for side in samples.sides], axis=0).tolist()),
        largest_tokens=tuple(sorted(map(int, set(ids.tolist())), reverse=True)[:LARGEST_TOKENS]),
        bad=sum(fault.reason not in DROP_REASONS for fault in faults),
        dropped=len(faults),
        faults=tuple(dict.fromkeys(fault.why for fault in faults)),
        unread=tuple(unread_columns(unread_counts, len(records), settings.type, examples)),
        warnings=tuple(
            token_warnings(counts["without_end"], counts["repeated_bos"], records=len(records))
        ),
        template=template,
        hint=_hint(records, settings, faults, template) if faults else "",
    )


def _with_images(
    encode: Encoder, values: list[Value], images: ImageSource | None, settings: DatasetSettings
) -> EncodedBatch:
    if images is None:
        return encode.with_images("refused")(values)
    path, revision = images.tokenizer
    batch = Batch("", values, range(len(values)), lambda: 0, folder=images.folder)
    with TemporaryDirectory() as temporary:

        def open_cache(kind: str) -> MediaCache | None:
            processor = load_processor(
                kind, path, revision, encode.tokenizer, settings.media_bounds
            )
            return MediaCache(Path(temporary), processor) if processor else None

        slice_images, _ = load_slice_images(
            encode, lambda: [batch], open_cache, allow_private=settings.allow_private_urls
        )
        return encode.with_images(slice_images or "refused")(values, images.folder)


def _hint(
    records: list[dict[str, Any]],
    settings: DatasetSettings,
    faults: Sequence[BadRecord],
    template: str | None,
) -> str:
    if any(fault.reason == "template" for fault in faults):
        return _template_hint(template)
    try:
        looks = infer_format(records, {}, objective="", location="")
    except ConfigError:
        return ""
    return "" if looks.type == settings.type else f".\n  They look like {looks}"


def _template_hint(template: str | None) -> str:
    if template is None:
        return (
            ".\n  Use a model whose chat template has it, or name another template "
            "(data.chat_template: a file or its text)"
        )
    return (
        f".\n  Write data.chat_template: {template}, an included template that renders them with "
        "this tokenizer (the model learns it in training), or name another: a file or its text"
    )
