"""The media of a source's first records, without running the prepare stage; cached by
its content."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from penstock.core.cache.digest_cache import cached_value
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import Source
from penstock.core.errors import CapabilityError, StageError
from penstock.prepare.dataset_type import NO_CONVERSATION
from penstock.prepare.settings import DatasetSettings

VERSION = 3
"""Increase it if the same records must be found to have other media."""


def find_first_media(
    source: Source, settings: DatasetSettings, columns: Sequence[str] | None, token: bool | None
) -> Mapping[str, list[str]]:
    """The kinds of media in the first records, each with the suffixes of the files that they name,
    such as `.jpg`; empty if the records cannot be read, for which the prepare stage has better
    errors."""
    if settings.type in NO_CONVERSATION:
        return {}
    cache_key = digest_json(
        [
            VERSION,
            "media",
            source.key,
            settings.type,
            settings.ds_type,
            settings.parsed_by,
            list(columns or ()),
        ]
    )

    def find() -> dict[str, list[str]]:
        from penstock.prepare.bad_records import BadRecord  # noqa: PLC0415 - as readers are
        from penstock.prepare.formats.conversation import conversations  # noqa: PLC0415
        from penstock.prepare.formats.registry import parse_record  # noqa: PLC0415
        from penstock.prepare.infer_type import read_first  # noqa: PLC0415

        suffixes_by_kind: dict[str, set[str]] = {}
        for record in read_first(source, settings.ds_type, token, settings.max_record_bytes):
            try:
                parsed = parse_record(settings, record, columns)
            except BadRecord:
                continue
            for kind, ref in (
                ref for conversation in conversations(parsed) for ref in conversation.media
            ):
                suffixes = suffixes_by_kind.setdefault(kind, set())
                suffixes.update(PurePosixPath(path).suffix.lower() for path in ref.paths)
        return {kind: sorted(suffixes) for kind, suffixes in suffixes_by_kind.items()}

    try:
        return cached_value(cache_key, find)
    except (StageError, CapabilityError, FileNotFoundError):
        return {}
