import hashlib
import os
import sqlite3
import time
from contextlib import closing

import pytest

from penstock.core.cache import digest_cache
from penstock.core.cache.digest_cache import (
    WrittenDigest,
    cache_written,
    cached_value,
    digest_files,
    digest_written,
    keep_cached_across_links,
)


@pytest.fixture
def file(tmp_path):
    """A file that was written a while ago."""
    path = tmp_path / "a"
    path.write_bytes(b"one")
    time.sleep(1.2 * digest_cache.MIN_AGE_NS / 1e9)
    return path


def sha(content):
    return [hashlib.sha256(content).hexdigest()]


def test_a_file_is_read_once_until_another_program_links_or_renames_it(file, tmp_path, read):
    assert [digest_files([file]) for _ in range(2)] == [sha(b"one")] * 2
    assert read == ["a"]
    moved = file.rename(tmp_path / "c")
    assert digest_files([moved]) == sha(b"one")
    assert read == ["a", "c"]  # Too young to be remembered: a rename sets the change time.


def test_a_file_that_was_written_or_replaced_is_read_again(file, tmp_path, read):
    digest_files([file])
    file.write_bytes(b"two")  # as long, in place, and too young to be remembered
    assert digest_files([file]) == digest_files([file]) == sha(b"two")
    assert read == ["a"] * 3
    other = tmp_path / "other"
    other.write_bytes(b"six")
    os.utime(other, ns=(1, file.stat().st_mtime_ns))
    other.replace(file)  # as long and as old, but another file
    assert digest_files([file]) == sha(b"six")


def remember(file, digest):
    """Cache that digest for a file, as if it had been written just now."""
    cache_written(file, WrittenDigest(digest, digest_written(file).mtime_ns))


def test_what_was_digested_when_it_was_written_is_not_read(file, read):
    remember(file, "f" * 64)
    read.clear()
    assert digest_files([file]) == ["f" * 64]
    assert read == []


def test_a_write_in_the_tick_in_which_a_written_file_was_renamed_is_seen(file, monkeypatch):
    written = digest_written(file)
    renamed = file.rename(file.with_name("b"))
    cache_written(renamed, written)
    stat, real = digest_cache._Stat.of(renamed), digest_cache._Stat.of
    renamed.write_bytes(b"two")
    # As on a kernel whose clock has not ticked since.
    same_tick = classmethod(lambda _, path: real(path)._replace(ctime_ns=stat.ctime_ns))
    monkeypatch.setattr(digest_cache._Stat, "of", same_tick)
    assert digest_files([renamed]) == sha(b"two")
    # Nor is a digest cached of a file that was written after it was digested.
    monkeypatch.setattr(digest_cache._Stat, "of", real)
    written = digest_written(renamed)
    renamed.write_bytes(b"six")
    cache_written(renamed, written)
    assert digest_files([renamed]) == sha(b"six")


def test_what_follows_from_content_is_computed_once_and_without_a_memory_each_time(
    tmp_path, monkeypatch
):
    times = []
    assert [cached_value("k", lambda: times.append(1) or [1, "a"]) for _ in range(3)] == [
        [1, "a"]
    ] * 3
    assert len(times) == 1
    (tmp_path / "file").write_text("where a folder is meant")
    monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path / "file"))
    assert [cached_value("k", lambda: times.append(1) or 5) for _ in range(2)] == [5, 5]
    (tmp_path / "a").write_bytes(b"one")
    assert digest_files([tmp_path / "a"]) == sha(b"one")
    remember(tmp_path / "a", "f" * 64)
    assert digest_files([tmp_path / "a"]) == sha(b"one")


def test_a_file_whose_times_were_set_back_is_read_again(file, read):
    digest_files([file])
    stat = file.stat()
    time.sleep(0.02)
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest_files([file]) == sha(b"two")
    assert read == ["a", "a"]


@pytest.mark.parametrize("kind", ["vfat", "fuse.sshfs", "9p", "squashfs"])
def test_nothing_is_remembered_on_a_file_system_without_a_change_time_of_its_own(
    kind, file, read, monkeypatch
):
    monkeypatch.setattr(digest_cache, "file_system_type", lambda _: kind)
    remember(file, "f" * 64)
    read.clear()
    assert [digest_files([file]) for _ in range(2)] == [sha(b"one")] * 2
    assert read == ["a", "a"]


def test_where_a_server_sets_change_times_a_file_is_remembered_though_its_clock_is_another(
    file, read, monkeypatch
):
    monkeypatch.setattr(digest_cache, "file_system_type", lambda _: "nfs4")
    real = digest_cache._Stat.of

    def with_clock(ahead_ns):
        def of(_, path):
            stat = real(path)
            return stat._replace(ctime_ns=stat.ctime_ns + ahead_ns)

        monkeypatch.setattr(digest_cache._Stat, "of", classmethod(of))

    for number, ahead in enumerate((-3_600_000_000_000, 3_600_000_000_000)):
        with_clock(ahead)
        content = b"%03d" % number
        file.write_bytes(content)  # just now, which only the server's clock could tell
        began = time.monotonic()
        assert digest_files([file]) == sha(content)
        assert time.monotonic() - began >= digest_cache.MIN_AGE_NS / 1e9
        assert digest_files([file]) == sha(content)
    assert read == ["a", "a"]


def test_links_that_are_made_keep_a_file_known_and_others_do_not(file, tmp_path, read):
    digest_files([file])
    with keep_cached_across_links([file]):
        os.link(file, tmp_path / "b")
    assert digest_files([tmp_path / "b"]) == sha(b"one")
    assert read == ["a"]
    os.link(file, tmp_path / "c")
    digest_files([file])
    assert read == ["a", "a"]


def test_a_file_that_is_young_when_it_is_read_is_not_remembered_however_long_that_takes(
    file, read, monkeypatch
):
    clock = [file.stat().st_ctime_ns + 1]
    counted = digest_cache.sha256_file

    def slowly(path):
        clock[0] += 2 * digest_cache.MIN_AGE_NS
        return counted(path)

    monkeypatch.setattr(digest_cache.time, "time_ns", lambda: clock[0])
    monkeypatch.setattr(digest_cache, "sha256_file", slowly)
    # What is written while it is read may bear the times that it bore before.
    assert [digest_files([file]) for _ in range(3)] == [sha(b"one")] * 3
    assert read == ["a", "a"]


@pytest.mark.parametrize("damage", ["[7]", "", "7", None, 5])
def test_a_damaged_row_of_what_follows_from_content_is_computed_again(damage):
    name = f"damaged as {damage!r}"
    assert cached_value(name, lambda: [70]) == [70]
    with closing(sqlite3.connect(digest_cache._database_file())) as memory, memory:
        [(row,)] = memory.execute("SELECT value FROM derived WHERE content=?", (name,))
        for changed in (damage, row.replace("70", "71"), row[:-1]):
            memory.execute("UPDATE derived SET value=? WHERE content=?", (changed, name))
            memory.commit()
            assert cached_value(name, lambda: [70]) == [70]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the database, in a cache home of its own."""
    monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path / "cache"))
    digest_cache._warn_shared.cache_clear()
    return tmp_path / "cache" / f"digests-{os.getuid()}"


def chown(path):
    if os.getuid():
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)


def replace_by_link(folder):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "share",
    [
        lambda folder: folder.chmod(0o770),
        lambda folder: folder.chmod(0o702),
        chown,
        replace_by_link,
    ],
    ids=["group", "others", "owner", "link"],
)
def test_a_database_that_another_user_could_have_written_vouches_for_nothing(
    share, cache, file, read, caplog
):
    remember(file, "f" * 64)
    cached_value("k", lambda: "of before")
    assert digest_files([file]) == ["f" * 64]
    assert cache.stat().st_mode & 0o777 == 0o700
    share(cache)
    read.clear()
    assert [digest_files([file]) for _ in range(2)] == [sha(b"one")] * 2
    assert cached_value("k", lambda: "now") == "now"
    assert read == ["a", "a"]
    assert [record.message.count("set its mode to 0700") for record in caplog.records] == [1]


def test_what_another_user_owns_is_not_remembered_by_the_time_that_they_can_set(
    file, tmp_path, read, monkeypatch
):
    real = digest_cache._Stat.of
    theirs = classmethod(lambda _, path: real(path)._replace(uid=12345))
    digest_files([file])
    monkeypatch.setattr(digest_cache._Stat, "of", theirs)
    assert digest_files([file]) == sha(b"one")
    assert read == ["a"]  # by the change time, which the kernel sets
    with keep_cached_across_links([file]):
        os.link(file, tmp_path / "b")
    digest_files([file])
    assert read == ["a", "a"]
    remember(file, "f" * 64)
    assert digest_files([file]) == sha(b"one")
