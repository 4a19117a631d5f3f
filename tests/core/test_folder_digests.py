"""Digests of a folder's files: whatever changes in a file is found, by whoever verifies it."""

import json

import pytest

from penstock.core.cache import folder_digests
from penstock.core.cache.folder_digests import (
    DIGESTS,
    DamagedError,
    Digester,
    FileDigest,
    FolderDigests,
    digest_of_file,
)

SIZES = (0, 1, 63, 64, 65, 128, 1000)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(folder_digests, "PART_BYTES", 64)
    monkeypatch.setattr(folder_digests, "BLOCK_BYTES", 24)


def written(folder):
    """Files of many sizes, and their digests, computed as they are written in uneven pieces."""
    files = {}
    for size in SIZES:
        content, digester = bytes(number % 251 for number in range(size)), Digester(64)
        for begin in range(0, size, 37):
            digester.update(content[begin : begin + 37])
        (folder / f"{size}.bin").write_bytes(content)
        files[f"{size}.bin"] = digester.result()
    FolderDigests(files, 64).write(folder)
    return files


def faults(folder, of=1):
    found = FolderDigests.read(folder)
    assert found is not None
    return [fault for share in range(of) for fault in found.find_damage(folder, share=share, of=of)]


def test_digests_are_the_same_in_whatever_pieces_a_file_is_written(tmp_path):
    whole = written(tmp_path)
    for size in SIZES:
        again = Digester(64)
        again.update((tmp_path / f"{size}.bin").read_bytes())
        assert again.result() == whole[f"{size}.bin"]
    assert digest_of_file(tmp_path / "1.bin") == whole["1.bin"]
    assert FolderDigests.read(tmp_path) == FolderDigests(whole, 64)
    assert FolderDigests.read(tmp_path / "elsewhere") is None


@pytest.mark.slow
@pytest.mark.parametrize("of", [1, 3, 50])
def test_every_flipped_byte_is_found_by_exactly_the_reader_of_its_share(tmp_path, of):
    written(tmp_path)
    assert faults(tmp_path, of) == []
    file = tmp_path / "1000.bin"
    good = file.read_bytes()
    for place in range(0, 1000, 13):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        [fault] = faults(tmp_path, of)
        begin = place // 64 * 64
        assert fault == (
            f"1000.bin differs from its digest (in bytes {begin} to {min(begin + 64, 1000)})"
        )


def test_files_that_are_missing_or_have_another_length_are_named_with_it(tmp_path):
    written(tmp_path)
    (tmp_path / "1000.bin").write_bytes(b"short")
    (tmp_path / "0.bin").write_bytes(b"x")
    (tmp_path / "65.bin").unlink()
    assert faults(tmp_path) == [
        "0.bin has 1 bytes instead of 0",
        "1000.bin has 5 bytes instead of 1000",
        "65.bin is missing",
    ]


def test_a_damaged_list_of_digests_is_never_believed(tmp_path):
    written(tmp_path)
    whole = FolderDigests.read(tmp_path)
    file = tmp_path / DIGESTS
    good = file.read_bytes()
    for place in range(0, len(good), 5):
        bit = 1 << place % 8
        file.write_bytes(good[:place] + bytes([good[place] ^ bit]) + good[place + 1 :])
        try:
            # White space may change.
            assert FolderDigests.read(tmp_path) == whole
        except DamagedError:
            continue
    file.write_bytes(good[:-20])
    with pytest.raises(DamagedError, match=f"{DIGESTS} cannot be read"):
        FolderDigests.read(tmp_path)
    FolderDigests({"../key": FileDigest(1, ("a",))}).write(tmp_path)
    with pytest.raises(DamagedError, match=r"\.\./key, outside of its folder"):
        FolderDigests.read(tmp_path)
    record = json.loads(good)
    assert set(record) == {"algorithm", "digest", "files", "part_bytes"}
