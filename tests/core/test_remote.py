"""Reading behind URLs: whole, in order, and with errors a user can act on."""

import io
import random
import sys
import time
import traceback

import pytest
import requests
from fsspec.registry import _registry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.errors import CapabilityError, ConfigError, StageError
from penstock.core.remote.open import open_file
from penstock.core.remote.path import RemotePath
from penstock.core.sources.hub import local_folder
from penstock.core.sources.pin import pin_checkpoint, pin_config, pin_data, pin_model, pin_tokenizer
from tests.core.servers import Chaos, web  # noqa: F401

CONTENT = random.Random(0).randbytes(3_000_000)


@pytest.fixture
def file(bucket):
    place = RemotePath.from_url(f"{bucket}/data.bin")
    place.write(CONTENT)
    return place


def test_a_stream_from_s3_is_the_file(file):
    with open_file(file.url) as stream:
        assert stream.read() == CONTENT
        assert stream.read(1) == b""


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([io.SEEK_SET, io.SEEK_CUR, io.SEEK_END]),
            st.integers(-700_000, 3_100_000),
            st.integers(0, 900_000),
        ),
        max_size=6,
    )
)
def test_seeking_and_reading_do_what_they_do_on_a_local_file(file, moves):
    local = io.BytesIO(CONTENT)
    with open_file(file.url) as stream:
        for whence, offset, length in moves:
            base = {0: 0, 1: local.tell(), 2: len(CONTENT)}[whence]
            if base + offset < 0:
                continue
            assert stream.seek(offset, whence) == local.seek(offset, whence)
            assert stream.read(length) == local.read(length)
            assert stream.tell() == local.tell()


def test_dropped_connections_lose_and_repeat_nothing(file, s3_server, monkeypatch):
    chaos = Chaos(s3_server, seed=1, least=20_000, most=60_000)
    monkeypatch.setenv("AWS_ENDPOINT_URL", chaos.url)
    file.write(CONTENT[:1_500_000])
    with open_file(file.url) as stream:
        assert b"".join(iter(lambda: stream.read(77_777), b"")) == CONTENT[:1_500_000]
    chaos.close()
    assert chaos.dropped > 20


def test_a_file_that_was_replaced_since_it_was_pinned_is_refused(file):
    source = pin_data(file.url, ds_type="text")
    file.write(CONTENT[:-1] + b"x")
    with pytest.raises(StageError, match=r"data\.bin has changed since this run was planned"):
        open_file(source.urls[0], source.pin["files"][0])
    file.delete()
    with pytest.raises(StageError, match=r"data\.bin no longer exists"):
        open_file(source.urls[0], source.pin["files"][0])


def test_a_file_that_is_replaced_while_it_is_read_is_not_mixed(file):
    with open_file(file.url) as stream:
        assert stream.read(10) == CONTENT[:10]
        file.write(bytes(len(CONTENT)))
        with pytest.raises(StageError, match="was changed while it was being read"):
            stream.read()


@pytest.fixture
def data(bucket):
    for name in ("train-0.jsonl", "train-1.jsonl.gz", "test.jsonl", "README.md", "deep/a.parquet"):
        (RemotePath.from_url(bucket) / "set" / name).write(name.encode())
    return f"{bucket}/set"


@pytest.mark.parametrize(
    ("below", "options", "names"),
    [
        ("", {}, ["train-0.jsonl", "train-1.jsonl.gz"]),
        ("/", {}, ["train-0.jsonl", "train-1.jsonl.gz"]),
        ("", {"split": "test"}, ["test.jsonl"]),
        ("/deep", {}, ["a.parquet"]),
        ("/t*.jsonl", {}, ["test.jsonl", "train-0.jsonl"]),
        ("/**/*.parquet", {}, ["deep/a.parquet"]),
        ("/train-0.jsonl", {}, ["train-0.jsonl"]),
        (
            "",
            {"data_files": ["test.jsonl", "train*"]},
            ["test.jsonl", "train-0.jsonl", "train-1.jsonl.gz"],
        ),
    ],
)
def test_a_url_names_the_files_that_the_same_local_path_would(data, below, options, names):
    source = pin_data(data + below, **options)
    assert [file["name"] for file in source.pin["files"]] == names
    assert [url.endswith(name) for url, name in zip(source.urls, names, strict=True)] == [
        True
    ] * len(names)


def test_the_key_of_remote_data_is_its_content_wherever_it_lies(data, bucket):
    before = pin_data(data)
    (RemotePath.from_url(data) / "train-0.jsonl").write(b"train-0.jsonl")
    assert pin_data(data).key == before.key
    for name in ("train-0.jsonl", "train-1.jsonl.gz"):
        (RemotePath.from_url(f"{bucket}/elsewhere/set") / name).write(name.encode())
    assert pin_data(f"{bucket}/elsewhere/set").key == before.key
    assert bucket.removeprefix("s3://") not in str(before.pin)
    (RemotePath.from_url(data) / "train-0.jsonl").write(b"TRAIN-0.jsonl")
    assert pin_data(data).key != before.key


@pytest.mark.parametrize(
    ("below", "options", "says"),
    [
        ("/train-2.jsonl", {}, r"set/train-2.jsonl does not exist.\n.*did you mean train-\d.jsonl"),
        ("/no/x.jsonl", {}, "There is nothing in .*set/no either"),
        ("", {"data_files": "tset.jsonl"}, r"did you mean test\.jsonl"),
        ("/*.csv", {}, r"matches no file.\n.*holds README\.md, deep"),
        ("", {"split": "validation"}, r"no file for the split 'validation'"),
        ("", {"revision": "main"}, "Leave revision out"),
        ("/README.md", {}, "Write ds_type"),
    ],
)
def test_what_is_absent_is_told_with_what_is_near_it(data, below, options, says):
    with pytest.raises(ConfigError, match=says):
        pin_data(data + below, **options)


def test_a_store_that_refuses_says_which_credentials_were_used_but_not_what_they_are(
    file, s3_server
):
    with requests.post(f"{s3_server}/moto-api/reset-auth", data="0", timeout=5):
        pass
    try:
        with pytest.raises(CapabilityError) as refused:
            pin_data(file.url, ds_type="text")
    finally:
        with requests.post(f"{s3_server}/moto-api/reset-auth", data="inf", timeout=5):
            pass
    text = str(refused.value)
    assert (
        f"{file.url} cannot be read: access denied (403); the credentials of "
        "AWS_ACCESS_KEY_ID were used" in text
    )
    assert "AWS_PROFILE" in text
    assert "AWS_ENDPOINT_URL" in text
    assert "its-secret" not in text
    assert "an-account-of-tests" not in text


def test_without_credentials_the_error_says_so_and_what_to_set(file, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    file.system.clear_instance_cache()
    with pytest.raises(
        CapabilityError, match=r"no credentials were found.\n  Set AWS_ACCESS_KEY_ID"
    ):
        pin_data(file.url, ds_type="text")
    file.system.clear_instance_cache()  # for the next test has credentials


@pytest.mark.slow
def test_a_large_file_is_sent_in_parts_and_arrives_whole(bucket, tmp_path):
    (tmp_path / "large").write_bytes(CONTENT * 12)
    place = RemotePath.from_url(f"{bucket}/large")
    place.put(tmp_path / "large")
    info = place.info()
    assert info
    assert info["ETag"].strip('"').endswith("-3"), "three parts of 16 MiB"
    with open_file(place.url) as stream:
        assert stream.read() == CONTENT * 12


def test_a_checkpoint_is_pinned_whole_or_refused(bucket):
    folder = RemotePath.from_url(f"{bucket}/global_step_5")
    (folder / "state.json").write(b"{}")
    with pytest.raises(ConfigError, match=r"global_step_5 is not a complete checkpoint"):
        pin_checkpoint(folder.url)
    (folder / "COMPLETE").write(b"")
    source = pin_checkpoint(folder.url)
    assert (local_folder(folder.url, source) / "state.json").read_bytes() == b"{}"
    (folder / "state.json").write(b"[]")
    assert pin_checkpoint(folder.url).key != source.key


@pytest.mark.slow
def test_a_server_that_is_not_there_is_told_before_any_work(monkeypatch, bucket):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(
        CapabilityError, match=r"cannot be reached.*\n.*AWS_ENDPOINT_URL \(http://127"
    ):
        pin_data(f"{bucket}/x.jsonl")


@pytest.mark.parametrize("url", ["ftp://host/a.jsonl", "simplecache::s3://b/a.jsonl", "s4://b/a"])
def test_schemes_that_cannot_be_read_are_refused_by_name(url):
    with pytest.raises(ConfigError, match=r"Those that can start with s3://"):
        pin_data(url)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(_registry, "gs", raising=False)
    with pytest.raises(CapabilityError, match=r"pip install 'penstock\[gcs\]'"):
        pin_data("gs://bucket/a.jsonl")


@pytest.mark.parametrize("manners", [{}, {"ranges": False}], ids=["ranges", "no ranges"])
def test_a_web_server_need_not_know_ranges(web, manners):  # noqa: F811
    web.manners.update(manners)
    web.files["/a.txt"] = CONTENT
    with open_file(f"{web.url}/a.txt") as stream:
        stream.seek(-5, io.SEEK_END)
        assert stream.read() == CONTENT[-5:]
        stream.seek(1_000_000)
        assert stream.read(1_500_000) == CONTENT[1_000_000:2_500_000]


def test_what_a_web_server_says_of_the_content_is_its_identity(web):  # noqa: F811
    web.files["/a.txt"] = b"one"
    first = pin_data(f"{web.url}/a.txt")
    assert first.pin["files"][0]["etag"] == "1"
    web.manners["ETag"] = '"2"'
    assert pin_data(f"{web.url}/a.txt").key != first.key
    web.manners = {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
    dated = pin_data(f"{web.url}/a.txt")
    assert pin_data(f"{web.url}/a.txt").key == dated.key
    web.manners = {}
    silent = pin_data(f"{web.url}/a.txt")
    assert silent.pin["files"][0]["sha256"]
    assert silent.paths[0].read_bytes() == b"one"
    web.files["/a.txt"] = b"two"
    assert pin_data(f"{web.url}/a.txt").key != silent.key


def test_a_signed_url_is_read_with_its_signature_which_is_said_nowhere(web, capfd):  # noqa: F811
    before, after = (f"{word}-signature-{number}" for number, word in enumerate(("old", "new")))
    web.manners["signature"] = before
    web.files["/a.txt"] = b"content"
    secret = f"pass-{web.server_port}-word"
    url = web.url.replace("://", f"://user:{secret}@") + "/a.txt?signature="
    source = pin_data(url + before)
    with open_file(source.urls[0], source.pin["files"][0]) as stream:
        assert stream.read() == b"content"
    web.manners["signature"] = after
    assert pin_data(url + after).key == source.key
    with pytest.raises(CapabilityError, match=r"a\.txt cannot be read.*403") as refused:
        pin_data(url + before)
    with pytest.raises(CapabilityError) as broken:
        open_file(source.urls[0], source.pin["files"][0])
    told = [str(source.pin), repr(source), *map(str, (refused.value, broken.value))]
    told += traceback.format_exception(refused.value) + traceback.format_exception(broken.value)
    for text in (*told, *capfd.readouterr()):
        assert before not in text
        assert after not in text
        assert secret not in text
    with pytest.raises(ConfigError, match=r"b\.txt does not exist"):
        pin_data(f"{web.url}/b.txt?signature={after}")


def test_tokenizers_configs_and_weights_are_fetched_to_a_folder_named_by_their_content(
    bucket, tmp_path
):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"):
        (RemotePath.from_url(bucket) / "model" / name).write(b"{}")
        (tmp_path / name).write_bytes(b"{}")
    url = f"{bucket}/model"
    assert pin_config(url).key == pin_config(str(tmp_path)).key
    assert pin_tokenizer(url).key == pin_tokenizer(str(tmp_path)).key
    tokenizer = local_folder(url, pin_tokenizer(url))
    assert (tokenizer / "tokenizer.json").read_bytes() == b"{}"
    model = pin_model(url)
    assert {path.name for path in local_folder(url, model).iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    weights = local_folder(url, model) / "model.safetensors"
    time.sleep(0.02)  # a tick of the clock that changes are stamped with
    weights.write_bytes(b"[]")
    assert (local_folder(url, model) / "model.safetensors").read_bytes() == b"{}"
    (RemotePath.from_url(url) / "model.safetensors").write(b"other")
    assert pin_model(url).key != model.key
    assert local_folder(url, pin_model(url)) != local_folder(url, model)
    with pytest.raises(ConfigError, match=r"holds neither config\.json nor"):
        pin_model(f"{bucket}/model/tokenizer.json")
