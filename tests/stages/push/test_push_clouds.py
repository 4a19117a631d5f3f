"""Pushing to Google Cloud Storage and Azure."""

import json

import pytest

from penstock.core.errors import CapabilityError
from penstock.push.copy import INDEX
from penstock.push.stage import Push, PushSettings
from tests.clouds import BUCKET, cloud  # noqa: F401
from tests.stages.exports import sealed_export

MODEL = {"hf/config.json": b"{}\n", "hf/model.safetensors": bytes(999), "hf/sub/chat.jinja": b"x"}


@pytest.fixture
def push(cloud, tmp_path):  # noqa: F811
    exported = sealed_export(tmp_path / "export", MODEL)
    return Push(settings=PushSettings(url=f"{cloud.url}/target"), exported=exported)


def test_files_are_sent_once_and_one_that_was_changed_at_the_store_again(cloud, push, tmp_path):  # noqa: F811
    first = push.run(tmp_path / "first")
    objects = cloud.server.objects
    sent = {name: objects[BUCKET, f"target/{name[3:]}"].content for name in MODEL}
    assert sent == MODEL
    index = json.loads(objects[BUCKET, f"target/{INDEX}"].content)["files"]
    assert [{**file, "version": None} for file in first["files"]] == [
        {**entry, "version": None} for entry in index
    ]
    assert all(entry["version"] for entry in index)
    assert push.run(tmp_path / "second")["sent"] == []
    cloud.write("target/model.safetensors", bytes(998) + b"x")
    assert push.run(tmp_path / "third")["sent"] == ["model.safetensors"]
    assert objects[BUCKET, "target/model.safetensors"].content == MODEL["hf/model.safetensors"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_store_that_refuses_is_not_writable(cloud, push, tmp_path, status):  # noqa: F811
    cloud.server.manners["refuses"] = status
    with pytest.raises(CapabilityError, match="target is not writable"):
        push.run(tmp_path / "first")
