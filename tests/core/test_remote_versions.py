"""What is read behind a URL is of one version, whole, and in its place, or it is an error."""

import io
import os
import random
import re
import socket
import time
from types import SimpleNamespace

import pytest

from penstock.core.errors import CapabilityError, PenstockError, StageError
from penstock.core.process import retry
from penstock.core.remote import answers
from penstock.core.remote import open as remote_open
from penstock.core.remote.addresses import is_public
from penstock.core.remote.errors import describe_error
from penstock.core.remote.open import open_file
from penstock.core.remote.path import RemotePath
from penstock.core.sources.pin import pin_data
from penstock.core.sources.pin_remote import download_source
from tests.core.servers import Chaos, web  # noqa: F401

SIZE = 700_001
VERSIONS = [random.Random(seed).randbytes(SIZE) for seed in range(2)]


@pytest.fixture
def url(web):  # noqa: F811
    web.files["/a.txt"] = VERSIONS[0]
    return f"{web.url}/a.txt"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(retry, "LONGEST_PAUSE", 0.01)


def replace(server, number=1):
    server.files["/a.txt"] = VERSIONS[number]
    if "ETag" in server.manners:
        server.manners["ETag"] = f'"{number + 1}"'
    if "Last-Modified" in server.manners:
        server.manners["Last-Modified"] = f"Mon, 01 Jan 2024 00:00:0{number} GMT"


DATE = {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
MANNERS = {
    "conditions": {"ETag": '"1"'},
    "no conditions": {"ETag": '"1"', "conditions": False},
    "weak tag": {"ETag": 'W/"1"', "conditions": False},
    "date": DATE,
    "no version": {},
    "no ranges": {"ETag": '"1"', "ranges": False},
    "no ranges, no version": {"ranges": False},
    "half of HEAD": {"ETag": '"1"', "halves HEAD": True},
}


@pytest.mark.parametrize("manners", MANNERS.values(), ids=MANNERS.keys())
def test_a_file_is_read_whole_and_a_replaced_one_never_mixed(web, url, manners):  # noqa: F811
    web.manners = dict(manners)
    with open_file(url) as stream:
        assert stream.read() == VERSIONS[0]
    try:
        # The change may come before the answer that is read.
        assert _read_with_change(web, url) == VERSIONS[1]
    except StageError as error:
        assert "a.txt was changed while it was being read" in str(error)  # noqa: PT017
    with open_file(url) as stream:
        assert stream.read() == VERSIONS[1]


def _read_with_change(server, url):
    """Replace the file while the first large body is sent, as one that is written in place."""

    def within(server, body):
        if len(body) < 1000 or server.files["/a.txt"] == VERSIONS[1]:
            return body
        at = VERSIONS[0].index(body)
        if "ETag" in server.manners and server.manners["ETag"].startswith("W/"):
            server.manners["ETag"] = 'W/"2"'
            server.files["/a.txt"] = VERSIONS[1]
        else:
            replace(server)
        return VERSIONS[1][at : at + len(body)]

    server.within = within
    try:
        with open_file(url) as stream:
            return stream.read()
    finally:
        server.within = None


def test_every_range_names_the_version_that_it_wants(web, url):  # noqa: F811
    with open_file(url) as stream:
        stream.read()
    ranges = [headers for _, _, headers in web.requests if headers.get("Range") != "bytes=0-0"]
    assert len(ranges) > 1
    assert {headers.get("If-Match") for headers in ranges} == {'"1"'}


@pytest.mark.parametrize(
    ("manners", "why"),
    [
        ({"shift": 7}, r"asked for bytes \d+-\d+ and answered bytes \d+-\d+/700001"),
        ({"says range": False}, r"and answered without Content-Range"),
        ({"ranges": False}, r"asked for a range and answered 200 OK"),
        ({"more": 1}, r"more than the \d+ bytes that were requested arrived"),
    ],
)
def test_an_answer_with_another_range_is_an_error(web, url, manners, why):  # noqa: F811
    with open_file(url) as stream:
        stream.read(10)
        web.manners |= manners
        with pytest.raises(StageError, match=why):
            stream.read()
    if not manners.keys() & {"shift", "more"}:
        with open_file(url) as stream:
            assert stream.read() == VERSIONS[0]


def test_a_server_that_stops_reporting_its_version_between_ranges_is_refused(web, url):  # noqa: F811
    web.manners["conditions"] = False
    with open_file(url) as stream:
        stream.read(10)
        del web.manners["ETag"]
        with pytest.raises(StageError, match="was changed while it was being read"):
            stream.read()


def test_a_header_of_thousands_of_characters_is_not_quoted_whole():
    with pytest.raises(answers.AnswerError) as error:
        answers.require_range("x" * 5000, 0, 7, 7)
    assert len(describe_error(error.value)) < 1000


def test_a_server_that_reports_another_version_or_none_since_the_plan_is_refused(web, url):  # noqa: F811
    source = pin_data(url, ds_type="text")
    web.files["/a.txt"] = VERSIONS[1]
    del web.manners["ETag"]
    with pytest.raises(StageError, match=r"cannot be proved .*\n?.*reported its etag then"):
        download_source(source)
    web.manners["ETag"] = '"2"'
    with pytest.raises(StageError, match="has changed since this run was planned"):
        download_source(source)


@pytest.mark.slow
def test_refusals_are_named_by_their_status_and_retried_when_the_server_says(web, url):  # noqa: F811
    for status, says in (
        (429, "server answers 429 Too Many Requests"),
        (503, "server answers 503 Service Unavailable"),
        (999, "server answers 999, which is no file"),
    ):
        web.manners["refusals"] = [(status, {})] * 20
        with pytest.raises(CapabilityError, match=says):
            pin_data(url, ds_type="text")
    web.manners["refusals"] = [(429, {"Retry-After": "1"})]
    began = time.monotonic()
    pin_data(url, ds_type="text")
    assert 1 <= time.monotonic() - began < 3
    web.manners["refusals"] = [(200, {"X-Long": "x" * 200_000})] * 20
    with pytest.raises(CapabilityError, match="not valid HTTP: Got more than"):
        pin_data(url, ds_type="text")


@pytest.mark.slow
def test_a_server_without_progress_is_given_up(web, url, monkeypatch):  # noqa: F811
    monkeypatch.setattr(answers, "PROGRESS_SECONDS", 0.2)
    with open_file(url) as stream:
        web.manners["seconds for each byte"] = 0.05
        with pytest.raises(StageError, match=r"the server sent \d bytes in 0\.2 s"):
            stream.read()


def test_a_body_without_an_end_is_given_up_before_the_disk_is_full(web, url, monkeypatch):  # noqa: F811
    web.manners = {"endless": True, "ranges": False, "length": False}
    free = remote_open.MIN_FREE_BYTES + (40 << 20)

    def statvfs(descriptor):
        return SimpleNamespace(f_bavail=free - os.fstat(descriptor).st_size, f_frsize=1)

    monkeypatch.setattr(remote_open.os, "fstatvfs", statvfs)
    with pytest.raises(StageError, match="does not say how long it is, and after 5"):
        open_file(url)
    # Without a version it is downloaded twice, and only the second body may be endless.
    web.requests.clear()
    web.before = lambda server: server.manners.update(endless=len(server.requests) >= 4)
    with pytest.raises(StageError, match="was changed while it was being read"):
        open_file(url)


@pytest.mark.slow
def test_a_link_that_is_cut_again_and_again_advances(web, url):  # noqa: F811
    chaos = Chaos(web.url, seed=2, least=8_000, most=12_000)
    try:
        with open_file(url.replace(web.url, chaos.url)) as stream:
            assert stream.read() == VERSIONS[0]
    finally:
        chaos.close()
    assert chaos.dropped > 50


@pytest.mark.slow
def test_a_connection_that_is_lost_goes_on_with_the_same_version_in_s3(bucket):
    place = RemotePath.from_url(f"{bucket}/a.bin")
    place.write(VERSIONS[0] * 9)
    with open_file(place.url) as stream:
        stream.read(300_000)
        place.write(VERSIONS[1] * 9)
        with pytest.raises(StageError, match="was changed while it was being read"):
            stream.read()


def test_redirects_lead_to_private_addresses_only_from_such(web, url):  # noqa: F811
    elsewhere = {"/file.txt": "file:///etc/hostname", "/port.txt": "http://127.0.0.1:99999/"}
    web.manners["redirects"] = {"/b.txt": url, **elsewhere}
    with open_file(f"{web.url}/b.txt") as stream:
        assert stream.read() == VERSIONS[0]
    for name, location in elsewhere.items():
        with pytest.raises(CapabilityError, match=f"redirects to {location}, which is no web add"):
            open_file(f"{web.url}{name}")
    for name in ("a.txt", "b.txt"):
        with pytest.raises(CapabilityError, match=r"127\.0\.0\.1, a private"):
            RemotePath.from_url(f"{web.url}/{name}", is_trusted=False).info()
        with pytest.raises(CapabilityError, match=r"127\.0\.0\.1, a private"):
            (RemotePath.from_url(web.url, is_trusted=False) / name).info()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07::1", True),
        *((address, False) for address in ("127.0.0.1", "10.1.2.3", "169.254.169.254", "0.0.0.0")),
        *((address, False) for address in ("100.64.0.1", "192.168.0.1", "172.16.9.9", "224.0.0.1")),
        *((address, False) for address in ("::1", "fe80::1%eth0", "fd00:ec2::254", "::")),
        *((address, False) for address in ("::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::")),
    ],
)
def test_addresses_are_public_in_none_of_the_forms_of_private_ones(address, public):
    assert is_public(address) == public


def test_a_name_that_leads_elsewhere_when_it_is_asked_again_is_checked_at_the_connection(
    web,  # noqa: F811
    url,
    monkeypatch,
):
    answers_of_dns = ["93.184.215.14", "127.0.0.1", "127.0.0.1"]

    def rebound(_host, port, *_, **__):
        address = answers_of_dns.pop(0) if len(answers_of_dns) > 1 else answers_of_dns[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port or 0))]

    assert is_public(rebound("rebound.test", 80)[0][4][0])
    monkeypatch.setattr(socket, "getaddrinfo", rebound)
    name = url.replace("127.0.0.1", "rebound.test")
    with pytest.raises(CapabilityError, match="a private"):
        RemotePath.from_url(name, is_trusted=False).info()
    assert not web.requests


SEED = 20261129


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(120))
def test_changes_during_and_between_reads_are_noticed(web, url, bucket, number, capsys):  # noqa: C901, F811
    rng = random.Random(SEED + number)
    manners = dict(rng.choice([*MANNERS.values()]))
    manners["ETag"] = '"1"' if manners.get("ETag", "").startswith("W/") else manners.get("ETag")
    web.manners = {name: value for name, value in manners.items() if value is not None}
    is_store = number % 4 == 0
    place = RemotePath.from_url(f"{bucket}/a.txt")
    if is_store:
        place.write(VERSIONS[0])
    at, kind = rng.randint(1, 6), rng.choice(["request", "body", "read"])
    print(f"seed {SEED + number}: {'s3' if is_store else web.manners}, {kind} {at}")

    def change():
        place.write(VERSIONS[1]) if is_store else replace(web)

    count = 0

    def before(_):
        nonlocal count
        count += 1
        if kind == "request" and count == at:
            change()

    def within(server, body):
        if kind != "body" or count != at or len(body) < 1000:
            return body
        current = server.files["/a.txt"]
        start = current.index(body)
        change()
        return VERSIONS[1][start : start + len(body)]

    try:
        source = pin_data(place.url if is_store else url, ds_type="text")
        pinned = source.pin["files"][0]
        location = source.paths[0] if source.paths else source.urls[0]
        web.before, web.within = before, within
        chunks: list[bytes] = []
        with open_file(location, pinned) as stream:
            for step in range(1, 100):
                if (kind == "read" or is_store) and step == at:
                    change()
                if rng.random() < 0.2:
                    stream.seek(-min(1000, stream.tell()), io.SEEK_CUR)
                    chunks = [b"".join(chunks)[: stream.tell()]]
                if not (chunk := stream.read(rng.randint(1, 200_000))):
                    break
                chunks.append(chunk)
    except PenstockError as error:
        assert re.search("changed while|has changed since|cannot be proved", str(error)), error  # noqa: PT017
    else:
        assert b"".join(chunks) in VERSIONS, capsys.readouterr().out
    finally:
        web.before = web.within = None
