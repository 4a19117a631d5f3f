"""References to images, and where they lead."""

import base64
import os
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from penstock.media.decode import BadImage
from penstock.media.kinds import IMAGE
from penstock.media.originals import Originals, prunable_originals
from penstock.media.reference import ImageRef, image_digest, name_below, read_image
from tests.media.pictures import picture


@pytest.fixture
def store(tmp_path):
    return Originals(tmp_path / "store")


def test_paths_uris_and_bytes_lead_to_the_same_image(tmp_path, store):
    content = picture(1)
    folder = tmp_path / "data"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "b.png").write_bytes(content)
    text = base64.b64encode(content).decode()
    refs = [
        ImageRef("a/b.png"),
        ImageRef("a/../a/b.png"),
        ImageRef(str(folder / "a/b.png")),
        ImageRef(f"file://{folder}/a/b.png"),
        ImageRef(f"data:image/png;base64,{text}"),
        ImageRef(content=content),
    ]
    assert {read_image(ref, folder, store) for ref in refs} == {content}
    assert {store.add(content) for _ in range(3)} == {store.add(content)}
    assert len([p for p in store.folder.rglob("*") if p.is_file()]) == 1


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("missing.png", "there is no .*missing.png"),
        ("../outside.png", "outside of .*image_folder"),
        ("a/../../outside.png", "outside of"),
        ("/etc/hostname", "outside of"),
        ("file:///etc/hostname", "outside of"),
        ("ftp://host/a.png", "only http, https and file URLs"),
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64,a", "not base64"),
        (".", "cannot be read: Is a directory"),
        ("pipe.png", "cannot be read: It is a device, a pipe or a socket"),
        ("a\0b", "outside of"),
    ],
)
def test_a_reference_that_leads_nowhere_says_why(tmp_path, store, location, why):
    (tmp_path / "outside.png").write_bytes(b"secret")
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data/pipe.png")
    with pytest.raises(BadImage, match=why):
        read_image(ImageRef(location), tmp_path / "data", store)


def test_an_image_of_the_web_is_refused_offline_and_fetched_once(tmp_path, store, monkeypatch):
    ref = ImageRef("https://example.invalid/a.png?token=secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadImage, match="HF_HUB_OFFLINE is set") as refused:
        read_image(ref, tmp_path, store)
    assert "secret" not in str(refused.value)
    store.remember(ref.location, picture(1))
    assert read_image(ref, tmp_path, store) == picture(1)


def test_images_of_the_web_are_kept_while_they_are_used(store):
    store.remember("https://example.invalid/a.png", picture(1))
    store.remember("https://example.invalid/again.png", picture(1))
    own = store.path(store.add(picture(2)))
    used = image_digest(picture(1))
    assert not [*prunable_originals(store.folder, {used}, 0)]  # they are of today
    for path in store.folder.rglob("*"):
        os.utime(path, (1, 1))
    assert [*prunable_originals(store.folder, {used}, 0)] == [[own]]
    files = {path for path in store.folder.rglob("*") if path.is_file()}
    found = [{*its} for its in prunable_originals(store.folder, {image_digest(picture(2))}, 0)]
    assert len(found) == 2
    assert found[0] | found[1] == files


def test_a_damaged_original_is_not_used(store):
    digest = store.add(picture(1))
    store.path(digest).write_bytes(b"x" * len(picture(1)))
    assert store.read(digest) is None


def test_an_image_of_the_web_is_fetched_with_a_limit(tmp_path, store, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "a.png").write_bytes(picture(1))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        for name in (url, url.replace("127.0.0.1", "localhost"), url.replace("127.0.0.1", "[::1]")):
            with pytest.raises(BadImage, match=r"cannot be (fetched|reached)"):
                read_image(ImageRef(f"{name}/a.png"), None, store)
        with pytest.raises(BadImage, match=r"127\.0\.0\.1, a private.*Set allow_private_urls"):
            read_image(ImageRef(f"{url}/a.png"), None, store)
        allowed = partial(read_image, root=None, web=store, allow_private=True)
        assert allowed(ImageRef(f"{url}/a.png")) == picture(1)
        with pytest.raises(BadImage, match=r"missing.png cannot be fetched"):
            allowed(ImageRef(f"{url}/missing.png"))
        small = {"image": replace(IMAGE, max_bytes=10)}
        monkeypatch.setattr("penstock.media.reference.KINDS", small)
        with pytest.raises(BadImage, match="bytes; 10 are allowed"):
            allowed(ImageRef(f"{url}/a.png?again"))
        server.shutdown()
    assert read_image(ImageRef(f"{url}/a.png"), None, store) == picture(1)


@pytest.mark.parametrize(
    "location", ["..", "../1.jpg", "/1.jpg", ".", "a/..", "a\\1.jpg", "s3://a/1"]
)
def test_what_is_no_name_below_a_folder_leads_to_no_file(location):
    assert name_below(location) is None
    assert name_below("a/./1.jpg") == "a/1.jpg"
