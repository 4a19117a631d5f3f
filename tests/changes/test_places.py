"""Changes behind URLs and in caches of what was downloaded are noticed, or are the same content."""

import random
from hashlib import sha1, sha256
from pathlib import Path

import boto3
import pyarrow as pa
import pytest

from penstock.config.loading.cli_overrides import Override
from penstock.config.loading.load import load
from penstock.core.cache.store import PlannedStage, get_or_build
from penstock.core.errors import PenstockError
from penstock.core.remote.path import RemotePath
from penstock.core.sources.pin import pin_model, pin_tokenizer
from penstock.pipeline.plan import plan
from penstock.push.copy import CopyTarget
from penstock.push.stage import Push, PushSettings
from penstock.rows.tokenizer import byte_tokenizer
from tests.changes.kinds import CHANGES, NEUTRAL, undone, without_override
from tests.changes.worlds import SEED
from tests.core.servers import web  # noqa: F401
from tests.core.toy import Letters, step_of
from tests.pipeline.runs import write_run
from tests.stages.exports import sealed_export

LINES = b"".join(b'{"text": "line %d and on"}\n' % number for number in range(6))
OTHER = LINES.replace(b"line 3", b"Line 3")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def steps(config: Path, *overrides: tuple[str, str]) -> tuple[PlannedStage, ...]:
    return plan(load(config, [Override(*each) for each in overrides]), ("pack",)).steps


def bring(config: Path) -> list[str]:
    return [get_or_build(step).status for step in steps(config)]


def texts(config: Path) -> str:
    """All that was prepared."""
    step = steps(config)[0]
    files = sorted((step.path / "data").rglob("*.arrow"))
    rows = [row for file in files for row in pa.ipc.open_file(file).read_all()["input_ids"]]
    return "".join(sorted(bytes(i for i in row.as_py() if i < 256).decode() for row in rows))


def remote_run(folder: Path, url: str, **data: object) -> Path:
    named = {"datasets": [{"path": url, "type": "text"}], "val_set_size": 0, **data}
    return write_run(folder, data=named)


@pytest.fixture
def store(bucket, s3_server):
    """A bucket, and a client for it."""
    return boto3.client("s3", endpoint_url=s3_server), bucket


@pytest.mark.slow
@pytest.mark.parametrize("versions", ["Enabled", "Suspended"])
def test_an_object_that_is_replaced_is_read_again_and_one_that_is_put_again_is_not(
    store, tmp_path, versions
):
    client, bucket = store
    name = bucket.removeprefix("s3://")
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": versions})
    client.put_object(Bucket=name, Key="data/a.jsonl", Body=LINES)
    client.put_object(Bucket=name, Key="data/b.jsonl", Body=LINES.replace(b"line", b"next"))
    config = remote_run(tmp_path, f"{bucket}/data")
    assert bring(config) == ["ran", "ran"]
    client.put_object(Bucket=name, Key="data/a.jsonl", Body=LINES)
    assert bring(config) == ["cached", "cached"]
    client.put_object(Bucket=name, Key="data/a.jsonl", Body=OTHER)  # of the same size
    assert bring(config) == ["ran", "ran"]
    assert "Line 3" in texts(config)
    planned = steps(config, ("data.dataset_prepared_path", str(tmp_path / "anew")))
    client.put_object(Bucket=name, Key="data/a.jsonl", Body=LINES)
    with pytest.raises(PenstockError, match=r"a\.jsonl has changed since this run was planned"):
        get_or_build(planned[0])
    for change in ("more", "swapped", "gone"):
        if change == "more":
            client.put_object(Bucket=name, Key="data/c.jsonl", Body=LINES.replace(b"line", b"more"))
        elif change == "swapped":
            client.put_object(Bucket=name, Key="data/a.jsonl", Body=LINES.replace(b"line", b"next"))
            client.put_object(Bucket=name, Key="data/b.jsonl", Body=LINES)
        else:
            client.delete_object(Bucket=name, Key="data/b.jsonl")
        assert bring(config) == ["ran", "ran"], change


@pytest.mark.slow
def test_an_object_of_a_result_that_is_changed_is_named_by_whoever_fetches_it(
    store, tmp_path, monkeypatch
):
    client, bucket = store
    name = bucket.removeprefix("s3://")
    client.put_object(Bucket=name, Key="a.jsonl", Body=LINES)
    config = remote_run(tmp_path, f"{bucket}/a.jsonl", dataset_prepared_path=f"{bucket}/prepared")
    monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path / "first"))
    assert bring(config) == ["ran", "ran"]
    rng = random.Random(SEED)
    listed = client.list_objects_v2(Bucket=name, Prefix="prepared/")["Contents"]
    keys = [each["Key"] for each in listed if each["Size"]]
    read = [key for key in keys if "/slices/" not in key and "/.locks" not in key]
    assert len(read) >= 4
    for number, key in enumerate(read):
        monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path / f"machine-{number}"))
        content = client.get_object(Bucket=name, Key=key)["Body"].read()
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1
        for body in (bytes(damaged), content[:-3]):
            client.put_object(Bucket=name, Key=key, Body=body)
            with pytest.raises(PenstockError, match=Path(key).name):
                bring(config)
        client.put_object(Bucket=name, Key=key, Body=content)
        assert bring(config) == ["cached", "cached"], key


def test_a_push_to_a_store_whose_objects_were_replaced_sends_them_again(store, tmp_path):
    client, bucket = store
    export = sealed_export(tmp_path / "export", {"hf/config.json": b"{}", "hf/a.bin": b"abc"})
    stage = Push(settings=PushSettings(url=f"{bucket}/pushed"), exported=export)
    step = PlannedStage.in_root(stage, str(tmp_path / "artifacts"))
    assert [get_or_build(step).status for _ in range(2)] == ["ran", "cached"]
    name = bucket.removeprefix("s3://")
    client.put_object(Bucket=name, Key="pushed/a.bin", Body=b"abd")
    assert [get_or_build(step).status for _ in range(2)] == ["ran", "cached"]
    assert client.get_object(Bucket=name, Key="pushed/a.bin")["Body"].read() == b"abc"
    target = CopyTarget.open(f"{bucket}/pushed")
    assert target.difference([]) == ([], [])


DATES = ["Mon, 01 Jan 2024 00:00:00 GMT", "Mon, 01 Jan 2024 00:00:01 GMT"]
MANNERS = {
    "other tag": ({"ETag": '"1"'}, {"ETag": '"2"'}, True),
    "other weak tag": ({"ETag": 'W/"1"'}, {"ETag": 'W/"2"'}, True),
    "other date": ({"Last-Modified": DATES[0]}, {"Last-Modified": DATES[1]}, True),
    "no version": ({}, {}, True),
    "tag is gone": ({"ETag": '"1"'}, {}, True),
    # Nothing that the server says of it differs: it is the same file, as far as anyone can tell.
    "same tag": ({"ETag": '"1"'}, {"ETag": '"1"'}, False),
    "same date": ({"Last-Modified": DATES[0]}, {"Last-Modified": DATES[0]}, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("manners", MANNERS.values(), ids=MANNERS.keys())
@pytest.mark.parametrize("size", ["same size", "other size"])
def test_a_file_of_a_web_server_is_read_again_if_anything_says_that_it_is_another(
    web,  # noqa: F811
    tmp_path,
    manners,
    size,
):
    before, after, shows = manners
    web.files["/a.jsonl"], web.manners = LINES, dict(before)
    config = remote_run(tmp_path, f"{web.url}/a.jsonl")
    assert bring(config) == ["ran", "ran"]
    assert bring(config) == ["cached", "cached"]
    planned = steps(config, ("data.dataset_prepared_path", str(tmp_path / "anew")))
    is_longer = size == "other size"
    web.files["/a.jsonl"] = OTHER + b'{"text": "more"}\n' if is_longer else OTHER
    web.manners = dict(after)
    if before and (shows or is_longer):  # without a version, the pinned content is held
        with pytest.raises(PenstockError, match=r"a\.jsonl"):
            get_or_build(planned[0])
    if shows or is_longer:
        assert bring(config) == ["ran", "ran"]
        assert "Line 3" in texts(config)
    else:
        assert bring(config) == ["cached", "cached"]
        assert "Line 3" not in texts(config)


def write_tokenizer(folder: Path) -> Path:
    byte_tokenizer().save_pretrained(folder)
    return folder


def with_tokenizer(folder: Path, path: str) -> Path:
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(LINES)
    named = {"datasets": [{"path": str(folder / "a.jsonl"), "type": "text"}], "val_set_size": 0}
    model = {"config_path": "builtin:tiny-qwen3", "tokenizer_path": path}
    return write_run(folder, model=model, data=named)


@pytest.mark.slow
def test_a_downloaded_file_that_was_changed_is_downloaded_again(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path / "cache"))
    for file in write_tokenizer(tmp_path / "tokenizer").iterdir():
        (RemotePath.from_url(f"{bucket}/tokenizer") / file.name).put(file)
    config = with_tokenizer(tmp_path / "run", f"{bucket}/tokenizer")
    assert bring(config) == ["ran", "ran"]
    key = pin_tokenizer(f"{bucket}/tokenizer").key
    [folder] = [path for path in (tmp_path / "cache" / "fetched").iterdir() if path.is_dir()]
    file = folder / "tokenizer.json"
    content = file.read_bytes()
    for kind, change in {**CHANGES, **NEUTRAL}.items():
        change(file, random.Random(f"{SEED} {kind}"))
        assert pin_tokenizer(f"{bucket}/tokenizer").key == key, kind
        assert file.read_bytes() == content, kind
        assert bring(config) == ["cached", "cached"], kind


@pytest.mark.slow
def test_a_changed_file_of_the_hubs_cache_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / COMMIT
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for name, content in (("config.json", b'{"a": 1}'), ("model.safetensors", b"weights")):
        digest = sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if name == "model.safetensors":  # as large files are
            digest = sha256(content).hexdigest()
        (repo / "blobs" / digest).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    for name in ("config.json", "model.safetensors"):
        blob = (snapshot / name).resolve()
        for kind in CHANGES.keys() - {"remove"}:  # fetched again
            step = step_of(Letters(read=pin_model("org/tiny")), tmp_path / f"{name} {kind}")
            with undone(blob), without_override():
                CHANGES[kind](blob, random.Random(SEED))
                with pytest.raises(PenstockError, match=name):
                    get_or_build(step)
            assert get_or_build(step).status in ("ran", "resumed")
