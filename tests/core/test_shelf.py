"""Numbered folders and their pointer: whole or absent, each number once, here and behind a URL."""

import hashlib
import multiprocessing
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.core.cache.manifest import MANIFEST
from penstock.core.errors import ArtifactError
from penstock.core.files import read_json
from penstock.core.releases.local import LocalReleaseStore
from penstock.core.releases.remote import open_release_store
from penstock.core.remote.local_mirror import local_cache_dir
from penstock.core.remote.path import RemotePath
from penstock.pipeline.releasing import prunable, roll_back
from tests.manifests import FIELDS


@pytest.fixture(params=["folder", "URL"])
def location(request, tmp_path):
    return str(tmp_path / "shelf") if request.param == "folder" else f"memory://{time.time_ns()}/b"


def quiet(_line):
    pass


def put(shelf, folder, text):
    """Stand a file of that text on the shelf, and return its number."""
    source = folder / f"{text}.txt"
    source.write_text(text)

    def manifest_of(number):
        size = len(text)
        listed = [{"path": "sub/a.txt", "bytes": size, "sha256": digest(text)}]
        return {**FIELDS, "files": listed, "facts": {"text": text, "number": number}}

    with shelf.writing(quiet):
        return shelf.add(manifest_of, {"sub/a.txt": source}, None)


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_what_stands_there_is_what_was_put_there_and_is_pointed_to_when_that_is_said(
    location, tmp_path
):
    shelf = open_release_store(location)
    assert (shelf.numbers(), shelf.latest(), shelf.decisions()) == ([], None, [])
    assert [put(shelf, tmp_path, text) for text in ("one", "two")] == [1, 2]
    assert shelf.latest() is None
    with shelf.writing(quiet):
        shelf.set_latest(2, ())
    shelf.append_decision({"line": "first"})
    shelf.append_decision({"line": "second"})
    (tmp_path / "two.txt").unlink()  # what it was made of may go
    again = open_release_store(location)
    assert (again.numbers(), again.latest()) == ([1, 2], 2)
    assert [again.manifest(n)["facts"]["number"] for n in (1, 2)] == [1, 2]
    assert (again.folder(2) / "sub/a.txt").read_text() == "two"
    assert [each["line"] for each in again.decisions()] == ["first", "second"]
    with pytest.raises(ArtifactError, match="no readable release 0003"):
        again.manifest(3)


def test_rolling_back_withdraws_what_lies_above_and_rolling_forward_takes_that_back(
    location, tmp_path
):
    shelf = open_release_store(location)
    for text in ("one", "two", "three", "four"):
        number = put(shelf, tmp_path, text)
        with shelf.writing(quiet):
            shelf.set_latest(number, ())
    assert roll_back(shelf, None, quiet) == (4, 3)
    assert roll_back(shelf, 1, quiet) == (3, 1)
    assert (shelf.latest(), shelf.withdrawn) == (1, {2, 3, 4})
    assert roll_back(shelf, 3, quiet) == (1, 3)
    assert (shelf.latest(), shelf.withdrawn) == (3, {2, 4})
    assert prunable(shelf, keep_last=1) == [2]  # 1 is where a rollback would lead
    with pytest.raises(ValueError, match="no release 0009; there are 0001, 0002, 0003, 0004"):
        roll_back(shelf, 9, quiet)
    with shelf.writing(quiet):
        shelf.delete(2)
    assert shelf.numbers() == [1, 3, 4]


def stand(folder, gate, text):
    while not gate.exists():
        time.sleep(0.001)
    put(LocalReleaseStore(folder / "shelf"), folder, text)


def test_of_many_at_once_each_gets_a_number_of_its_own(tmp_path):
    context = multiprocessing.get_context("fork")
    texts = [f"text-{number}" for number in range(8)]
    gate = tmp_path / "go"
    several = [context.Process(target=stand, args=(tmp_path, gate, text)) for text in texts]
    for process in several:
        process.start()
    gate.touch()
    for process in several:
        process.join()
    shelf = LocalReleaseStore(tmp_path / "shelf")
    assert shelf.numbers() == [*range(1, 9)]
    found = {(shelf.folder(n) / "sub/a.txt").read_text() for n in shelf.numbers()}
    assert found == set(texts)
    assert {shelf.manifest(n)["facts"]["text"] for n in shelf.numbers()} == set(texts)


@pytest.mark.slow
def test_behind_a_url_two_at_once_get_two_numbers(tmp_path):
    url = f"memory://{time.time_ns()}/b"
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(put, open_release_store(url), tmp_path, text) for text in ("one", "two")
        ]
        assert sorted(job.result() for job in jobs) == [1, 2]
    shelf = open_release_store(url)
    assert {shelf.manifest(n)["facts"]["text"] for n in (1, 2)} == {"one", "two"}
    assert {(shelf.folder(n) / "sub/a.txt").read_text() for n in (1, 2)} == {"one", "two"}


def test_what_a_dead_process_left_half_done_is_no_number_and_is_swept(tmp_path):
    shelf = LocalReleaseStore(tmp_path / "shelf")
    put(shelf, tmp_path, "one")
    half = tmp_path / "shelf" / ".half.part"
    half.mkdir()
    (half / "a.txt").write_text("half")
    assert shelf.numbers() == [1]
    assert put(shelf, tmp_path, "two") == 2
    assert not half.exists()

    url = f"memory://{time.time_ns()}/b"
    (RemotePath.from_url(url) / "0001" / "stray.txt").write(b"half")
    there = open_release_store(url)
    assert there.numbers() == []
    assert put(there, tmp_path, "one") == 1
    assert set((RemotePath.from_url(url) / "0001").files()) == {"sub/a.txt", MANIFEST}


def test_a_pointer_that_leads_nowhere_is_told_and_mended_by_rolling_back(tmp_path):
    shelf = LocalReleaseStore(tmp_path / "shelf")
    put(shelf, tmp_path, "one")
    for target in ("0007", "../elsewhere"):
        pointer = tmp_path / "shelf" / "latest"
        pointer.unlink(missing_ok=True)
        pointer.symlink_to(target)
        with pytest.raises(ArtifactError, match=target):
            shelf.latest()
        assert roll_back(shelf, 1, quiet) == (None, 1)
        assert os.readlink(pointer) == "0001"  # noqa: PTH115 - as text


def test_a_copy_here_is_fetched_again_where_it_is_not_what_lies_behind_the_url(tmp_path):
    url = f"memory://{time.time_ns()}/b"
    shelf = open_release_store(url)
    put(shelf, tmp_path, "one")
    shutil.rmtree(shelf.folder(1) / "sub")
    (local_cache_dir(url) / "0001" / MANIFEST).unlink()
    assert (shelf.folder(1) / "sub/a.txt").read_text() == "one"
    assert read_json(shelf.folder(1) / MANIFEST) == shelf.manifest(1)


def test_a_torn_line_of_decisions_stays_by_itself_and_a_damaged_one_is_named(tmp_path, caplog):
    shelf = open_release_store(str(tmp_path))
    file = tmp_path / "decisions.jsonl"
    for number in range(2):
        shelf.append_decision({"line": number})
    file.write_bytes(file.read_bytes()[:-4])
    assert shelf.decisions() == [{"line": 0}]
    shelf.append_decision({"line": 2})
    caplog.clear()
    assert shelf.decisions() == [{"line": 0}, {"line": 2}]
    [warning] = caplog.messages
    assert f"{file}, line 2 is damaged" in warning
