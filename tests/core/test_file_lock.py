"""File systems without locks, and files of other users, are refused by name, before work where a
run asks."""

import errno
import fcntl
import os
import re
import tempfile

import pytest
from filelock import FileLock, Timeout

from penstock.core.cache import noted_files
from penstock.core.cache.in_use import block_new_pins
from penstock.core.cache.noted_files import get_or_write
from penstock.core.cache.store import get_or_build
from penstock.core.errors import StageError
from penstock.core.file_lock import acquire_lock, refusal_to_write
from penstock.core.process.scratch_dir import scratch_folder
from penstock.core.releases.local import LocalReleaseStore
from penstock.core.remote.local_mirror import mirror_holder
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


def test_a_lock_of_another_user_is_named_with_the_reason(tmp_path, monkeypatch):
    def acquire(lock, **_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), lock.lock_file)

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with pytest.raises(StageError, match=rf"{tmp_path}.* cannot be locked: permission denied"):
        block_new_pins(tmp_path).__enter__()


@pytest.mark.usefixtures("without_locks")
def test_a_scratch_folder_needs_no_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder("test") as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_a_note_whose_file_cannot_be_read_is_left_out_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path / "cache"))
    paths = [tmp_path / name for name in ("a.arrow", "b.arrow", "c.arrow")]
    for path in paths:
        get_or_write(path, lambda part: {"bytes": part.write_bytes(b"content")}, "wait")
    unreadable, *others = paths
    digest_files = noted_files.digest_files

    def digest(notes):
        if unreadable in notes:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(unreadable))
        return digest_files(notes)

    monkeypatch.setattr(noted_files, "digest_files", digest)
    others[1].write_bytes(b"changed")
    assert [*noted_files.read_notes(paths)] == others[:1]


def test_a_lock_is_held_for_its_block_alone(tmp_path):
    with acquire_lock(tmp_path / "lock"), pytest.raises(Timeout):
        acquire_lock(tmp_path / "lock", timeout=0)
    with acquire_lock(tmp_path / "lock", timeout=0):
        pass
