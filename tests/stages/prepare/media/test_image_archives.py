"""Images in tar files of WebDataset, and in folders with metadata."""

import io
import json
import tarfile
from typing import Literal

import fsspec
import pytest

from penstock.core.errors import ConfigError, StageError
from penstock.core.remote.path import RemotePath
from penstock.core.sources.pin import pin_data
from penstock.media.reference import image_digest
from penstock.prepare.locate_record import build_image_reader
from tests.media.pictures import picture
from tests.media.tiny_processors import write_processor
from tests.stages.prepared import prepare, run, table_of, write_lines

CHAT = {"type": "chat"}
ONE, TWO = picture(1, 60, 40, "JPEG"), picture(2, 31, 90)
ASKED = "<image>\nWhat is it?"


def messages(text=ASKED):
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "A cat."}]


def archive(path, members, mode: Literal["w", "w:gz"] = "w"):
    with tarfile.open(path, mode) as out:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                out.addfile(content)
                continue
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return path


def images_of(stage, out):
    """The images of each sample, and what was left out."""
    artifact, facts = run(stage, out)
    return [row["images"] for row in table_of(artifact.path).to_pylist()], facts


SHARD = {
    "a/000.jpg": ONE,
    "a/000.json": {"messages": messages()},
    "a/001.second.png": TWO,
    "a/001.first.jpg": ONE,
    "a/001.json": {
        "messages": messages("<image><image>Which?"),
        "images": ["001.first.jpg", "a/001.second.png"],
    },
    "a/002.json": {"messages": messages("No image.")},
    "a/003.jpg": ONE,
    "a/003.meta.json": {"license": "none"},
    "a/003.json": {
        "messages": [{"role": "user", "content": [{"type": "image"}]}, messages()[1]],
        "image": "coco/elsewhere.jpg",
    },
}
WANTED = [[ONE], [ONE, TWO], [], [ONE]]


@pytest.mark.parametrize("name", ["shard.tar", "shard.tar.gz", "memory://webdataset/shard.tar"])
def test_records_of_a_tar_file_have_its_images(tmp_path, name):
    model = str(write_processor("qwen3_vl", tmp_path / "model"))
    path = archive(tmp_path / "made", SHARD, "w:gz" if name.endswith("gz") else "w")
    if "://" in name:
        fsspec.filesystem("memory").pipe(name, path.read_bytes())
    else:
        name = path.rename(tmp_path / name)
    found, facts = images_of(prepare((name, CHAT), tokenizer=model), tmp_path / "out")
    assert facts["dropped"] == {}
    assert found == [[image_digest(each) for each in images] for images in WANTED]


def link_out(target):
    info = tarfile.TarInfo()
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info


BAD = {
    "no such member": ({"0.json": {"messages": messages(), "image": "9.jpg"}}, "has no such file"),
    "a path out of it": (
        {"0.json": {"messages": messages(), "image": "../secret.jpg"}},
        "set image_folder",
    ),
    "a link out of it": (
        {"0.jpg": link_out("../secret.jpg"), "0.json": {"messages": messages(), "image": "a.jpg"}},
        "0.jpg is a link or a device",
    ),
    "two of a name": ({"0.JSON": {"messages": messages()}, "0.json": {}}, "are both its json"),
    "a damaged image": (
        {"0.jpg": picture(7, 99, 99, "JPEG")[:900], "0.json": {"messages": messages()}},
        "image file is truncated",
    ),
    "no JSON": ({"0.json": b"{", "0.jpg": ONE}, "0.json: not JSON"),
    "sound": ({"0.json": {"messages": messages()}, "0.m4a": b"x"}, "it has 0.m4a, which is not"),
    "no place": ({"0.json": {"messages": messages("What?")}, "0.png": TWO}, "no <image> in its"),
}


def test_bad_records_of_a_tar_file_say_why_and_the_others_are_kept(tmp_path):
    (tmp_path / "secret.jpg").write_bytes(ONE)
    (tmp_path / "data").mkdir()
    members = {}
    for number, (bad, _) in enumerate(BAD.values()):
        members |= {name.replace("0.", f"{number}.", 1): content for name, content in bad.items()}
    good = {"z.jpg": TWO, "z.json": {"messages": messages()}}
    path = archive(tmp_path / "data" / "shard.tar", {**members, **good})
    model = str(write_processor("qwen3_vl", tmp_path / "model"))
    stage = prepare((path, CHAT), tokenizer=model, bad_rows_allowed=0.9)
    found, facts = images_of(stage, tmp_path / "out")
    assert found == [[image_digest(TWO)]]
    assert facts["records"] == len(BAD) + 1
    shown = facts["dropped_samples"]
    assert [(each["file"], each["line"]) for each in shown] == [
        ("shard.tar", number) for number in range(1, len(BAD) + 1)
    ]
    for (bad, why), number, each in zip(BAD.values(), range(len(BAD)), shown, strict=True):
        assert bad
        assert why.replace("0.", f"{number}.", 1) in each["why"]


def test_a_truncated_tar_file_is_named(tmp_path):
    path = archive(tmp_path / "shard.tar", SHARD)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(
        StageError, match=r"shard.tar cannot be read as tar: member 2: unexpected end"
    ):
        run(prepare((path, CHAT)), tmp_path / "out")


def test_beside_other_data_tar_files_are_no_data(tmp_path):
    write_lines(tmp_path / "data.jsonl", [{"messages": messages("What?")}])
    archive(tmp_path / "images.tar", {"0.jpg": ONE})
    assert [each["name"] for each in pin_data(str(tmp_path)).pin["files"]] == ["data.jsonl"]
    named = pin_data(str(tmp_path), ds_type="tar").pin["files"]
    assert [each["name"] for each in named] == ["images.tar"]
    with pytest.raises(ConfigError, match=r"Rename it to .tar.gz"):
        pin_data(str(archive(tmp_path / "images.tgz", {"0.jpg": ONE}, "w:gz")))


METADATA = {
    "metadata.jsonl": '{"file_name": "train/1.jpg", "messages": %s}\n',
    "metadata.csv": 'file_name,messages\ntrain/1.jpg,"%s"\n',
}


@pytest.mark.parametrize("name", METADATA)
def test_the_metadata_of_an_image_folder_names_its_images(tmp_path, name):
    folder = tmp_path / "folder"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "1.jpg").write_bytes(ONE)
    said = json.dumps(messages())
    said = said if name.endswith("jsonl") else said.replace('"', '""')
    (folder / name).write_text(METADATA[name] % said)
    model = str(write_processor("qwen3_vl", tmp_path / "model"))
    key = prepare((folder, CHAT), tokenizer=model).slices()[0].key
    found, _ = images_of(prepare((folder, CHAT), tokenizer=model), tmp_path / "out")
    assert found == [[image_digest(ONE)]]
    (folder / "train" / "1.jpg").write_bytes(TWO)
    assert prepare((folder, CHAT), tokenizer=model).slices()[0].key != key


@pytest.mark.slow
def test_an_image_folder_in_a_bucket_is_pinned_by_its_images_and_fetched_once(
    tmp_path, bucket, monkeypatch
):
    store = RemotePath.from_url(f"{bucket}/folder")
    names = ("train/1.jpg", "2.png", "../out.jpg", "missing.jpg")
    lines = [json.dumps({"file_name": name, "messages": messages()}) for name in names]
    (store / "metadata.jsonl").write("\n".join(lines).encode())
    (store / "train/1.jpg").write(ONE)
    (store / "2.png").write(TWO)
    model = str(write_processor("qwen3_vl", tmp_path / "model"))

    def stage(**its):
        settings = {"slices": tmp_path / "slices", "bad_rows_allowed": 0.9}
        return prepare((store.url, {**CHAT, **its}), tokenizer=model, **settings)

    first = stage()
    found, facts = images_of(first, tmp_path / "out")
    assert found == [[image_digest(ONE)], [image_digest(TWO)]]
    said = [example["why"] for example in facts["dropped_samples"]]
    assert f"../out.jpg is outside of {store.url}" in said[0]
    assert f"there is no {store.url}/missing.jpg" in said[1]
    place = next((tmp_path / "out").rglob("plan.json")).parent
    read = build_image_reader(first, place)
    [key] = [item.key for item in first.slices()]
    assert read(key, 1)[image_digest(TWO)] == TWO
    monkeypatch.setattr(RemotePath, "read", lambda _: pytest.fail("it is fetched again"))
    again, _ = images_of(stage(max_seq_len=400), tmp_path / "again")
    assert again == found
    (store / "train/1.jpg").write(TWO)
    assert [item.key for item in stage().slices()] != [key]


def test_a_folder_of_images_alone_says_what_it_lacks(tmp_path, bucket):
    (tmp_path / "0.JPG").write_bytes(ONE)
    RemotePath.from_url(f"{bucket}/folder/0.JPG").put(tmp_path / "0.JPG")
    for folder in (str(tmp_path), f"{bucket}/folder"):
        with pytest.raises(ConfigError, match=r"It holds 0.JPG; write a metadata.jsonl beside"):
            pin_data(folder)
