"""Manifests of results that no stage has built."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.cache.manifest import MANIFEST
from penstock.core.cache.record import write_record

FIELDS: Mapping[str, Any] = {
    **{"stage": "export", "key": "0", "version": 1, "created": "2026-01-01T00:00:00+00:00"},
    **{"settings": {}, "inputs": {}, "facts": {}, "files": []},
}


def write_manifest(folder: Path, **fields: Any) -> None:
    write_record(folder / MANIFEST, {**FIELDS, **fields})
