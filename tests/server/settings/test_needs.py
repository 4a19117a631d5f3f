"""What the server needs besides what everybody installs."""

import pytest

from penstock.core.errors import CapabilityError
from penstock.server.launch.prepare import PACKAGES, require_packages


def test_packages_that_lack_are_named_with_what_installs_them(monkeypatch):
    require_packages()
    monkeypatch.setitem(PACKAGES, "no_such_module.part", "no-such-package")
    with pytest.raises(CapabilityError, match="no-such-package, which is not installed") as caught:
        require_packages()
    assert "pip install 'penstock[server]'" in str(caught.value)
