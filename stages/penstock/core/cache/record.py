"""JSON records with a SHA-256 digest, so that damage is detected on read. `digest` is the SHA-256
of the canonical JSON of all other fields."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from penstock.core.errors import ArtifactError
from penstock.core.files import write_json
from penstock.core.os_errors import describe_os_error
from penstock.version import __version__

DIGEST = "digest"

FORMAT = 1  # The newest record format that this version can read

Record = dict[str, Any]


def digest_json(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, as 64 hex digits."""
    # ASCII: a lone surrogate, which JSON can hold, cannot be encoded as UTF-8.
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def with_digest(record: Mapping[str, Any]) -> Record:
    """Return the record with the digest of its other fields."""
    fields = {name: value for name, value in record.items() if name != DIGEST}
    return {**fields, DIGEST: digest_json(fields)}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record with its digest atomically."""
    write_json(path, with_digest(record))


def read_record(path: Path, remedy: str) -> Record:
    """Read the record in `path`; see `parse_record`. Raises FileNotFoundError or NotADirectoryError
    if there is none."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be read: {describe_os_error(error)}.\n  {remedy}"
        ) from error
    return parse_record(content, str(path), remedy)


def read_record_fields(path: Path, remedy: str) -> Record:
    """Read the record in `path` and drop its digest; see `read_record`."""
    record = read_record(path, remedy)
    return {name: value for name, value in record.items() if name != DIGEST}


def parse_record(content: bytes, location: str, remedy: str) -> Record:
    """Parse the record `content` read from `location`.

    Raises ArtifactError, with `remedy` as the recommended action, if the content is not a JSON
    object, does not match its digest or has none, or has an unknown format.
    """
    try:
        value = json.loads(content)
    # json raises RecursionError for brackets that are nested deeper than the stack.
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{location} cannot be read: it is not JSON.\n  {remedy}") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{location} is damaged: it is not a JSON object.\n  {remedy}")
    record = cast(Record, value)
    if "format" in record and record["format"] != FORMAT:
        code = record.get("code")
        writer = cast(Record, code).get("penstock") if isinstance(code, dict) else None
        raise ArtifactError(
            f"{location} has format {record['format']!r}, and penstock {__version__} reads format "
            f"{FORMAT}: it was written by {f'penstock {writer}' if writer else 'another version'}, "
            "or is damaged.\n"
            f"  Install the version that wrote it, or: {remedy[0].lower()}{remedy[1:]}"
        )
    if DIGEST not in record:
        raise ArtifactError(
            f"{location} is damaged: it has no digest, so it was changed after it was written.\n"
            f"  {remedy}"
        )
    if record[DIGEST] != with_digest(record)[DIGEST]:
        raise ArtifactError(
            f"{location} is damaged: its fields do not match its digest, so it was changed after "
            f"it was written.\n  {remedy}"
        )
    return record
