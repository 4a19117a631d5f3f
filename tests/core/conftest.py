"""What tests of results share."""

import pytest

from penstock.core.cache import digests


@pytest.fixture
def read(monkeypatch):
    """The names of the files that are read."""
    names = []
    real = digests.sha256_file
    monkeypatch.setattr(digests, "sha256_file", lambda path: names.append(path.name) or real(path))
    return names
