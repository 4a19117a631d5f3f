"""Whether the first records of a source have images, without running the prepare stage; cached by
its content."""

from collections.abc import Sequence

from penstock.core.cache.digests import cached_value
from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import Source
from penstock.core.errors import CapabilityError, StageError
from penstock.prepare.dataset_type import NO_CONVERSATION
from penstock.prepare.settings import DatasetSettings

VERSION = 1
"""Increase it if the same records must be found to have images, or none."""


def first_records_have_images(
    source: Source, its: DatasetSettings, columns: Sequence[str] | None, token: bool | None
) -> bool:
    """Whether one of the first records has an image; false if they cannot be read, for which the
    prepare stage has better errors."""
    if its.type in NO_CONVERSATION:
        return False
    fields = {name: value for name, value in its.model_dump(mode="json").items() if "field" in name}
    asked = digest_json(
        [VERSION, "images", source.key, its.type, its.ds_type, fields, list(columns or ())]
    )

    def find() -> bool:
        from penstock.prepare.bad_records import BadRecord  # noqa: PLC0415 - as readers are
        from penstock.prepare.formats.conversation import conversations  # noqa: PLC0415
        from penstock.prepare.formats.registry import parse_record  # noqa: PLC0415
        from penstock.prepare.infer_type import read_first  # noqa: PLC0415

        for record in read_first(source, its.ds_type, token):
            try:
                said = parse_record(its, record, columns)
            except BadRecord:
                continue
            if any(kind == "image" for each in conversations(said) for kind, _ in each.media):
                return True
        return False

    try:
        return bool(cached_value(asked, find))
    except (StageError, CapabilityError, FileNotFoundError):
        return False
