"""What networks and disks do is told by its name."""

import errno
import re
import socket

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors import SafetensorError

from penstock.core.errors import CapabilityError
from penstock.core.os_errors import describe_os_error, is_full_disk, is_of_the_machine
from penstock.core.remote.errors import connection_fault
from penstock.core.sources.pin import pin_data
from penstock.train.launch.rank_failures import first_failure, write_failure


def caused_by(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "the connection was refused"),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed"), "connection was refused"),
        (caused_by(FileNotFoundError("u"), TimeoutError()), "did not answer in time"),
        (socket.gaierror(-2, "Name or service not known"), r"cannot be resolved \(DNS\)"),
        (OSError(errno.EHOSTUNREACH, "no route"), "no network route"),
    ],
)
def test_a_connection_that_fails_is_told_by_what_failed(error, said):
    assert re.search(said, connection_fault(error) or "")
    assert connection_fault(FileNotFoundError(errno.ENOENT, "no such file", "x")) is None


def test_a_refused_connection_is_not_a_missing_file():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nothing listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/a.jsonl"
        with pytest.raises(CapabilityError, match="the connection was refused") as caught:
            pin_data(url)
    assert "does not exist" not in str(caught.value)


def write_text(path):
    with path.open("w") as stream:
        stream.write("x")


@pytest.mark.parametrize(
    "write",
    [
        write_text,
        lambda path: torch.save(torch.zeros(1 << 16), path),
        lambda path: np.zeros(1 << 16).tofile(path),
        lambda path: pa.OSFile(str(path), "wb").write(b"x" * (1 << 16)),
    ],
    ids=["python", "torch", "numpy", "arrow"],
)
def test_a_full_disk_is_called_so_whoever_writes(write, tmp_path):
    full = tmp_path / "full"
    full.symlink_to("/dev/full")  # whatever a writer replaces, it is this link
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each writer raises its own
        write(full)
    assert_called_full(caught.value, tmp_path)


def test_a_full_disk_that_safetensors_meets_is_called_so(tmp_path):
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert_called_full(SafetensorError(text), tmp_path)


def assert_called_full(error, folder):
    assert is_full_disk(error), repr(error)
    told = describe_os_error(error, folder)
    assert "the disk is full" in told
    assert "MB are left there" in told


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EROFS, "the file system is read-only"),
        (errno.EMFILE, "too many files are open.*ulimit -n"),
        (errno.EDQUOT, "the quota of this user is used up"),
    ],
)
def test_other_limits_of_the_machine_are_told_with_the_path(number, said, tmp_path):
    error = OSError(number, "whatever", str(tmp_path / "a"))
    assert is_of_the_machine(error)
    assert re.search(said, describe_os_error(error))
    assert str(tmp_path) in describe_os_error(error)
    assert not is_of_the_machine(ValueError("no such thing"))


def test_a_rank_whose_disk_is_full_says_so_and_not_what_torch_says(tmp_path):
    text = "[enforce fail at inline_container.cc:664] . unexpected pos 128 vs 22"
    write_failure(tmp_path, 0, RuntimeError(text))
    assert "the disk is full" in (first_failure(tmp_path) or "")
