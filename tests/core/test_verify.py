"""Damaged results are found before they are used, and stale ones are built again."""

import json
import os
import random
import re
import time

import pytest

from penstock.core.cache import digest_cache
from penstock.core.cache.input_digests import changed_inputs, digests_of_inputs
from penstock.core.cache.manifest import MANIFEST, content_digest, parse_manifest, read_manifest
from penstock.core.cache.record import parse_record, with_digest
from penstock.core.cache.stage import ATTEMPT
from penstock.core.cache.store import fetch_cached, find_cached, find_local, get_or_build
from penstock.core.errors import ArtifactError, DamagedFileError, StageError
from penstock.core.files import read_json
from tests.core.toy import Letters, LettersSettings, Pack, Prepare, Train, step_of
from tests.corruption import flip


def built(root, **settings):
    """A sealed result whose files are old enough to be remembered."""
    step = step_of(Letters(LettersSettings(**settings)), root)
    get_or_build(step)
    time.sleep(1.2 * digest_cache.MIN_AGE_NS / 1e9)
    return step


def flip_in_secret(path):
    """One other bit, and the modification time of before."""
    time.sleep(0.02)  # longer than a tick of the clock that file systems stamp changes with
    flip(path, random.Random(0))


def test_one_flipped_bit_is_found_though_size_and_modification_time_are_as_they_were(tmp_path):
    step = built(tmp_path)
    assert get_or_build(step).status == "cached"
    flip_in_secret(step.path / "b.txt")
    for use in (get_or_build, fetch_cached):
        with pytest.raises(ArtifactError, match=r"b\.txt: content differs(.|\n)*--force letters"):
            use(step)
    assert get_or_build(step, verify="off").status == "cached"
    assert get_or_build(step, cache="refresh").status == "ran"
    assert get_or_build(step).status == "cached"


def test_what_was_verified_is_not_read_again_unless_always_is_written(tmp_path, read):
    step = built(tmp_path)
    get_or_build(step)
    assert set(read) == {"a.txt", "b.txt", "c.txt", "d.txt"}
    read.clear()
    assert get_or_build(step).status == "cached"
    assert read == []
    (step.path / "c.txt").chmod(0o600)  # any change: what it was is not known
    get_or_build(step)
    assert read == ["c.txt"]
    read.clear()
    get_or_build(step, verify="always")
    assert sorted(read) == ["a.txt", "b.txt", "c.txt", "d.txt"]


@pytest.mark.parametrize("damage", [b"", b"no database", None])
def test_a_damaged_memory_costs_a_read_and_is_begun_again(tmp_path, read, monkeypatch, damage):
    monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path / "cache"))
    step = built(tmp_path / "results")
    get_or_build(step)
    memory = tmp_path / "cache" / f"digests-{os.getuid()}" / "digests.sqlite"
    if damage is None:  # every digest in it, which would condemn or acquit the wrong bytes
        with digest_cache._connect(memory) as open_memory:
            open_memory.execute("UPDATE known SET sha256=?", ("0" * 64,))
        open_memory.close()
    else:
        memory.write_bytes(damage)
    read.clear()
    assert get_or_build(step).status == "cached"
    assert len(read) == 4
    read.clear()
    assert get_or_build(step).status == "cached"
    assert read == []


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path):
    step = built(tmp_path, letters="a")
    path = step.path / MANIFEST
    content, manifest = path.read_bytes(), find_local(step)
    passed = []
    for at in range(len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(damaged)
        try:
            passed += [at] if find_local(step) != manifest else []
        except ArtifactError as error:
            assert MANIFEST in str(error)  # noqa: PT017 - of thousands, each
    assert passed == []


A_FILE = {"path": "a.txt", "bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"digest": None}, "its fields do not match its digest"),
        ({"files": None}, "files is missing or no list"),
        ({"facts": []}, "facts is missing or no dict"),
        ({"key": 7}, "key is missing or no str"),
        ({"inputs": {"read": "alphabet"}}, "input read has no key"),
        ({"created": "yesterday"}, "'yesterday', which is no time"),
        ({"created": "2026-01-01T00:00:00"}, "no time with a zone"),
        ({"files": ["a.txt"]}, "an entry that is not a path, bytes and sha256: 'a.txt'"),
        ({"files": [{**A_FILE, "mode": 7}]}, "an entry that is not a path, bytes and sha256"),
        ({"files": [{**A_FILE, "bytes": -1}]}, "a.txt has -1 bytes"),
        ({"files": [{**A_FILE, "bytes": True}]}, "a.txt has True bytes"),
        ({"files": [{**A_FILE, "bytes": 1.0}]}, "a.txt has 1.0 bytes"),
        ({"files": [{**A_FILE, "sha256": None}]}, "a.txt has the SHA-256 None"),
        ({"files": [{**A_FILE, "sha256": "0" * 63}]}, "a.txt has the SHA-256 '000"),
        ({"files": [A_FILE, A_FILE]}, "files lists a.txt twice"),
        *(
            ({"files": [{**A_FILE, "path": path}]}, re.escape(f"names {path!r}, which is no file"))
            for path in ("/etc/passwd", "../a.txt", "b/../../a.txt", "./a.txt", "b//a.txt", "", ".")
        ),
        ({"files": [{**A_FILE, "path": MANIFEST}]}, "names 'manifest.json', which is no file"),
        ({"files": [{**A_FILE, "path": None}]}, "names None, which is no file"),
        ({"files": [{**A_FILE, "path": "a\0b"}]}, "which is no file"),
    ],
)
def test_a_manifest_that_no_stage_writes_is_an_error_that_names_the_field(tmp_path, change, said):
    step = built(tmp_path)
    manifest = with_digest({**read_json(step.path / MANIFEST), **change})
    if change == {"digest": None}:
        manifest["digest"] = None
    (step.path / MANIFEST).write_text(json.dumps(manifest))
    for use in (get_or_build, find_cached, fetch_cached):
        with pytest.raises(ArtifactError, match=rf"manifest\.json is damaged: .*{said}"):
            use(step)
    content = (step.path / MANIFEST).read_bytes()
    with pytest.raises(ArtifactError, match=said):  # as a store answers it
        parse_manifest(content, "s3://b/manifest.json", "Delete it.")


def test_a_manifest_without_a_digest_is_refused(tmp_path):
    step = built(tmp_path)
    manifest = read_json(step.path / MANIFEST)
    del manifest["digest"]
    (step.path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"manifest\.json is damaged: it has no digest"):
        get_or_build(step)


@pytest.mark.slow
def test_a_format_of_the_future_is_refused_with_who_wrote_it(tmp_path):
    step = built(tmp_path)
    future = {**read_json(step.path / MANIFEST), "format": 2, "code": {"penstock": "9.1"}}
    (step.path / MANIFEST).write_text(json.dumps(with_digest(future)))
    with pytest.raises(ArtifactError, match=r"format 2(.|\n)*written by penstock 9\.1(.|\n)*Insta"):
        get_or_build(step)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1, "b": 2}', "no digest"),
        (b'{"a": 1, "digest": "0"}', "its digest"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_what_is_no_record_is_named_with_the_next_step(content, said):
    with pytest.raises(ArtifactError, match=rf"the/file (.|\n)*{said}(.|\n)*Do this\."):
        parse_record(content, "the/file", "Do this.")
    content = json.dumps(with_digest({"a": 1})).encode()
    assert parse_record(content, "the/file", "Do this.")["a"] == 1


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"a": 1'])
def test_json_that_cannot_be_read_is_named(tmp_path, content):
    (tmp_path / "some.json").write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"some\.json cannot be read(.|\n)*Restore"):
        read_json(tmp_path / "some.json")


def chain(root, content="a"):
    """prepare -> pack -> train; what prepare writes is no part of its key here."""

    def write(letter, out):
        (out / f"{letter}.txt").write_text(content)

    prepare = step_of(Prepare(LettersSettings(letters="a"), before=write), root)
    pack = step_of(Pack(LettersSettings(letters="b"), read=prepare.artifact), root)
    train = step_of(Train(LettersSettings(letters="c"), read=pack.artifact), root)
    return prepare, pack, train


class Other(Prepare):
    """The same key, and other bytes."""

    def run(self, out):
        facts = super().run(out)
        (out / "a.txt").write_text("other")
        return facts


def test_a_result_is_stale_when_its_input_was_built_again_with_other_bytes(tmp_path):
    prepare, pack, train = chain(tmp_path)
    for step in (prepare, pack, train):
        get_or_build(step)
    first = read_manifest(pack.path)
    assert first
    assert first["inputs"]["read"]["digest"] == content_digest(read_manifest(prepare.path) or {})

    get_or_build(prepare, cache="refresh")  # the same bytes: nothing is stale
    assert [get_or_build(step).status for step in (pack, train)] == ["cached", "cached"]

    other = step_of(Other(LettersSettings(letters="a")), tmp_path)
    assert other.path == prepare.path
    get_or_build(other, cache="refresh")
    assert find_cached(pack) is None
    said = []
    assert get_or_build(pack, notify=said.append).status == "ran"
    assert len(said) == 1
    assert "pack is stale and is built again: read (prepare" in said[0]
    # It came out with the same bytes, so what was made from it is not stale.
    assert get_or_build(train).status == "cached"


def test_a_stale_result_that_fails_to_be_built_again_keeps_what_was_built(tmp_path):
    prepare, _, _ = chain(tmp_path)
    settings = LettersSettings(letters="ab")
    get_or_build(prepare)
    get_or_build(step_of(Pack(settings, read=prepare.artifact), tmp_path))
    get_or_build(step_of(Other(LettersSettings(letters="a")), tmp_path), cache="refresh")

    def fail(letter, _out):
        if letter == "b":
            raise RuntimeError

    broken = step_of(Pack(settings, read=prepare.artifact, before=fail), tmp_path)
    with pytest.raises(StageError, match="run it again to resume"):
        get_or_build(broken)
    assert (broken.path / "a.txt").is_file()
    journal = tmp_path / "journal"
    whole = step_of(Pack(settings, read=prepare.artifact, journal=journal), tmp_path)
    assert get_or_build(whole).status == "resumed"
    assert journal.read_text() == "b"
    assert [path.name for path in whole.path.parent.glob("[!.]*")] == [whole.path.name]


def test_an_attempt_that_read_other_input_is_moved_aside_and_told(tmp_path):
    prepare, _, _ = chain(tmp_path)
    get_or_build(prepare)

    def fail(letter, _out):
        if letter == "b":
            raise RuntimeError

    settings = LettersSettings(letters="ab")
    with pytest.raises(Exception, match="run it again to resume"):
        get_or_build(step_of(Pack(settings, read=prepare.artifact, before=fail), tmp_path))
    get_or_build(step_of(Other(LettersSettings(letters="a")), tmp_path), cache="refresh")
    step, said = step_of(Pack(settings, read=prepare.artifact), tmp_path), []
    assert (step.path / ATTEMPT).is_file()
    assert get_or_build(step, notify=said.append).status == "ran"
    aside = step.path.with_name(f"{step.path.name}.old-1")
    assert str(aside) in said[0]
    assert (aside / "a.txt").is_file()
    assert changed_inputs(step.stage, find_local(step) or {}, digests_of_inputs(step.stage)) == []


@pytest.mark.parametrize("change", ["a bit", "another result"])
def test_an_input_that_changes_while_it_is_read_enters_no_result(tmp_path, change):
    prepare, _, _ = chain(tmp_path)
    get_or_build(prepare)

    def change_input(_letter, _out):
        if change == "a bit":
            flip(prepare.path / "a.txt", random.Random(0))
        else:
            other = step_of(Other(LettersSettings(letters="a")), tmp_path)
            get_or_build(other, cache="refresh")

    reading = Pack(LettersSettings(letters="b"), read=prepare.artifact, before=change_input)
    with pytest.raises((ArtifactError, StageError), match=re.escape(str(prepare.path))):
        get_or_build(step_of(reading, tmp_path))
    assert find_local(step_of(reading, tmp_path)) is None
