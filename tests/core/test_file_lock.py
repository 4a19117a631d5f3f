"""File systems without locks are refused by name, before work where a run asks."""

import errno
import fcntl
import os
import re

import pytest
from filelock import Timeout

from penstock.core.cache.in_use import block_new_pins
from penstock.core.cache.noted_files import get_or_write
from penstock.core.cache.store import get_or_build
from penstock.core.errors import StageError
from penstock.core.file_lock import acquire_lock
from penstock.core.releases.local import LocalReleaseStore
from penstock.core.remote.local_mirror import mirror_holder
from penstock.core.writable import refusal_to_write
from tests.core.toy import Letters, step_of


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP], ids=["ENOLCK", "EOPNOTSUPP"])
def without_locks(request, monkeypatch):
    """flock as NFS without its lock service answers it."""

    def flock(_descriptor, _operation):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("without_locks")
def test_a_folder_without_locks_is_refused_with_the_reason_and_the_remedy(tmp_path):
    reason = refusal_to_write(tmp_path / "not" / "yet") or ""
    assert re.search(r"has no locks \(flock\); name a folder on a local disk", reason)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize(
    "use",
    [
        lambda folder: get_or_build(step_of(Letters(), folder)),
        lambda folder: get_or_write(folder / "a.arrow", lambda _: {}, "wait"),
        lambda folder: get_or_write(folder / "a.arrow", lambda _: {}, "skip"),
        lambda folder: block_new_pins(folder).__enter__(),
        lambda folder: LocalReleaseStore(folder).writing(print).__enter__(),
        lambda _: mirror_holder(),
    ],
    ids=["stage", "shared file", "shared file, busy", "prune", "release", "mirror"],
)
def test_each_user_of_locks_names_the_folder_that_has_none(use, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path))
    with pytest.raises(StageError, match=rf"{tmp_path}.* cannot be locked: its file system has no"):
        use(tmp_path)


def test_a_lock_is_held_for_its_block_alone(tmp_path):
    with acquire_lock(tmp_path / "lock"), pytest.raises(Timeout):
        acquire_lock(tmp_path / "lock", timeout=0)
    with acquire_lock(tmp_path / "lock", timeout=0):
        pass
