"""Small sealed exports for tests of what comes after the export stage."""

import hashlib
from pathlib import Path

from penstock.core.cache.record import digest_json
from penstock.core.cache.stage import Artifact
from tests.manifests import write_manifest


def sealed_export(
    path: Path, files: dict[str, bytes], *, folders: dict[str, str] | None = None
) -> Artifact:
    """An artifact with these files, listed in its manifest."""
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    listed = [
        {"path": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in sorted(files.items())
    ]
    facts = {"folders": {"hf": "hf"} if folders is None else folders}
    key = digest_json(listed)
    write_manifest(path, key=key, files=listed, facts=facts)
    return Artifact("export", key, path)
