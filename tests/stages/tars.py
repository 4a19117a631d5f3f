"""Archives of records."""

import io
import json
import tarfile
from collections.abc import Iterable
from typing import Any


def tar_of(records: Iterable[object], prefix: str = "", **options: Any) -> bytes:
    """Each in a file of its own, whose name begins with `prefix`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as tar:
        for i, record in enumerate(records):
            content = json.dumps(record).encode()
            member = tarfile.TarInfo(f"{prefix}{i:04d}.json")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()
