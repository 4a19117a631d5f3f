"""Google Cloud Storage and Azure: what is read is of one version, and results are kept there."""

import gzip
import random

import pytest

from penstock.core.cache.manifest import MANIFEST
from penstock.core.cache.stage import ATTEMPT
from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.core.errors import CapabilityError, ConfigError, StageError
from penstock.core.process import retry
from penstock.core.remote.artifact_sync import RemoteArtifact
from penstock.core.remote.local_mirror import local_cache_dir
from penstock.core.remote.open import open_file
from penstock.core.remote.path import RemotePath
from penstock.core.remote.urls import redact
from penstock.core.sources.pin import pin_data
from tests.clouds import cloud  # noqa: F401
from tests.core.toy import Letters

SIZE = 3_000_001
VERSIONS = [random.Random(seed).randbytes(SIZE) for seed in range(2)]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(retry, "LONGEST_PAUSE", 0.01)


@pytest.fixture
def file(cloud):  # noqa: F811
    cloud.write("set/data.bin", VERSIONS[0])
    return f"{cloud.url}/set/data.bin"


def test_an_object_is_read_whole_and_each_range_names_the_version_that_it_wants(cloud, file):  # noqa: F811
    with open_file(file) as stream:
        assert stream.read() == VERSIONS[0]
        stream.seek(-7, 2)
        assert stream.read() == VERSIONS[0][-7:]
    conditions = {read["condition"] for read in cloud.server.reads}
    assert len(cloud.server.reads) > 2
    assert len(conditions) == 1
    assert "" not in conditions


def test_a_folder_is_listed_whole_and_its_files_can_be_read_as_they_were_pinned(cloud):  # noqa: F811
    names = [f"part {number}.jsonl" for number in range(7)]
    for name in (*names, "README.md", "deep/README.md"):
        cloud.write(f"set/{name}", name.encode())
    cloud.write("set/", b"")
    cloud.write("settings.jsonl", b"")
    source = pin_data(f"{cloud.url}/set")
    assert [file["name"] for file in source.pin["files"]] == names
    for url, pinned in zip(source.urls, source.pin["files"], strict=True):
        with open_file(url, pinned) as stream:
            assert stream.read().decode() == pinned["name"]
    source = pin_data(f"{cloud.url}/set/*[45].jsonl")
    assert [file["name"] for file in source.pin["files"]] == names[4:6]
    folder = RemotePath.from_url(f"{cloud.url}/set")
    assert set(folder.files()) == {*names, "README.md", "deep/README.md"}
    assert folder.names() == {*names, "README.md", "deep"}
    assert (folder / "README.md").files() == {}


@pytest.mark.parametrize("manners", [{}, {"no md5": True}], ids=["digest", "no digest"])
def test_a_changed_object_has_another_key_and_one_that_was_planned_is_refused(
    cloud,  # noqa: F811
    file,
    manners,
):
    cloud.server.manners |= manners
    sources = [
        pin_data(file, ds_type="text"),
        pin_data(f"{cloud.url}/set", data_files="*.bin", ds_type="text"),
    ]
    for source in sources:
        assert pin_data(file, ds_type="text").pin["files"] == source.pin["files"]
    cloud.write("set/data.bin", VERSIONS[1])
    assert pin_data(file, ds_type="text").key != sources[0].key
    for source in sources:
        with pytest.raises(StageError, match=r"data\.bin has changed since this run was planned"):
            open_file(source.urls[0], source.pin["files"][0])
    cloud.delete("set/data.bin")
    with pytest.raises(StageError, match=r"data\.bin no longer exists"):
        open_file(sources[0].urls[0], sources[0].pin["files"][0])
    with pytest.raises(ConfigError, match=r"data\.bin does not exist"):
        pin_data(file, ds_type="text")


@pytest.mark.parametrize(
    "change",
    ["replaced", "replaced, unconditional", "written again", "deleted", "changed and back"],
)
def test_an_object_that_changes_between_two_ranges_is_an_error_and_nothing_else_of_it_is_read(
    cloud,  # noqa: F811
    file,
    change,
):
    def before(number):
        if number != 2:
            return
        if change == "deleted":
            cloud.delete("set/data.bin")
        if change.startswith("replaced") or change == "changed and back":
            cloud.write("set/data.bin", VERSIONS[1])
        if change in ("written again", "changed and back"):
            cloud.write("set/data.bin", VERSIONS[0])

    cloud.server.before_read = before
    cloud.server.manners["ignores conditions"] = "unconditional" in change
    says = "no longer exists" if change == "deleted" else "was changed while it was being read"
    blocks = []
    with open_file(file) as stream, pytest.raises(StageError, match=rf"set/data\.bin {says}"):
        blocks.extend(iter(lambda: stream.read(50_000), b""))
    assert blocks
    assert VERSIONS[0].startswith(b"".join(blocks))


@pytest.mark.parametrize(
    ("manners", "says"),
    [
        ({"shift": 7}, r"asked for bytes \d+-\d+ and answered bytes \d+-\d+/3000001"),
        ({"cut to": 1000}, ""),
    ],
    ids=["another range", "truncated"],
)
def test_another_range_and_a_truncated_body_are_errors_that_name_the_object(
    cloud,  # noqa: F811
    file,
    manners,
    says,
):
    with open_file(file) as stream:
        assert stream.read(10) == VERSIONS[0][:10]
        cloud.server.manners |= manners
        with pytest.raises(StageError, match=rf"set/data\.bin could not be read: .*{says}"):
            stream.read()


def test_a_body_that_is_cut_now_and_then_is_read_whole(cloud, file):  # noqa: F811
    def before(number):
        cloud.server.manners["cut to"] = 10_000 if number % 2 else SIZE

    cloud.server.before_read = before
    with open_file(file) as stream:
        assert stream.read() == VERSIONS[0]


def test_what_is_stored_with_an_encoding_is_read_as_it_is_stored(cloud):  # noqa: F811
    stored = gzip.compress(VERSIONS[0])
    cloud.write("data.bin.gz", stored, encoding="gzip")
    with open_file(f"{cloud.url}/data.bin.gz") as stream:
        assert stream.read() == stored


@pytest.mark.parametrize("status", [401, 403])
def test_a_store_that_refuses_says_what_to_set(cloud, file, status):  # noqa: F811
    cloud.server.manners["refuses"] = status
    variable = "GOOGLE_APPLICATION_CREDENTIALS" if file.startswith("gs") else "AZURE_STORAGE"
    with pytest.raises(CapabilityError, match=rf"access denied \({status}\)(.|\n)*{variable}"):
        pin_data(file, ds_type="text")


def test_without_an_account_of_azure_the_error_says_so(monkeypatch, tmp_path):
    adlfs = pytest.importorskip("adlfs")
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    adlfs.AzureBlobFileSystem.clear_instance_cache()
    with pytest.raises(CapabilityError, match=r"no credentials(.|\n)*AZURE_STORAGE_ACCOUNT_NAME"):
        pin_data("az://container/data.jsonl")


def test_containers_of_one_account_of_azure_have_folders_of_their_own_here():
    urls = [
        f"{scheme}://{container}@account.dfs.core.windows.net/results"
        for scheme in ("abfs", "abfss", "az")
        for container in ("one", "two")
    ]
    assert [redact(url) for url in urls] == urls
    assert len({local_cache_dir(url) for url in urls}) == len(urls)
    assert "secret" not in redact("az://user:secret@host/results")


def test_a_file_is_created_by_one_writer_also_when_its_answer_is_lost(cloud):  # noqa: F811
    place = RemotePath.from_url(f"{cloud.url}/lease")
    cloud.server.manners["loses an answer"] = True
    assert place.create(b"mine")
    assert not place.create(b"another's")
    assert place.read() == b"mine"


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")  # of SDKs
def test_a_large_file_is_uploaded_whole(cloud, tmp_path):  # noqa: F811
    content = VERSIONS[0] * 3
    (tmp_path / "large").write_bytes(content)
    place = RemotePath.from_url(f"{cloud.url}/large")
    place.put(tmp_path / "large")
    with open_file(place.url) as stream:
        assert stream.read() == content


def test_what_one_machine_built_another_fetches_and_it_can_be_moved_aside(
    cloud,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    def on(name):
        monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path / name))
        return PlannedStage(Letters(), tmp_path / name / "mirror", f"{cloud.url}/results/letters")

    here = on("here")
    assert get_or_build(here).status == "ran"
    place = RemotePath.from_url(here.remote or "")
    names = {"a.txt", "b.txt", "c.txt", "d.txt", MANIFEST}
    assert set(place.files()) == names
    there = on("there")
    assert get_or_build(there).status == "cached"
    assert (there.path / "a.txt").read_text() == "a"
    assert not (there.path / ATTEMPT).exists()
    RemoteArtifact(here.remote or "", here.path).move_to_backup()
    assert not place.files()
    aside = RemotePath.from_url(f"{cloud.url}/results/letters.old-1")
    assert {name: (aside / name).read() for name in names - {MANIFEST}} == {
        f"{letter}.txt": letter.encode() for letter in "abcd"
    }
