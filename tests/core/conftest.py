"""What tests of results share."""

import pytest

from penstock.core.cache import digest_cache


@pytest.fixture
def read(monkeypatch):
    """The names of the files that are read."""
    names = []
    real = digest_cache.sha256_file
    monkeypatch.setattr(
        digest_cache, "sha256_file", lambda path: names.append(path.name) or real(path)
    )
    return names
