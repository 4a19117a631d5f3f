"""Output whose reader is gone, or whose disk is full, is lost and raises nothing."""

import os
import pty
import sys

import pytest
from tqdm import tqdm

from penstock.core.process.hangup import lossy_output


def closed_pipe():
    read, write = os.pipe()
    os.close(read)
    return write


def closed_terminal():
    terminal, ours = pty.openpty()
    os.close(terminal)
    return ours


SINKS = {
    "a pipe without a reader": closed_pipe,
    "a terminal that was closed": closed_terminal,
    "a full disk": lambda: os.open("/dev/full", os.O_WRONLY),
}


@pytest.mark.parametrize("sink", SINKS)
def test_prints_bars_and_bytes_of_c_go_nowhere(sink, monkeypatch):
    with os.fdopen(SINKS[sink](), "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with lossy_output("stderr"):
            for _ in range(3):
                print("a line", file=sys.stderr, flush=True)
                tqdm.write("another", file=sys.stderr)
            for _ in tqdm(range(3), file=sys.stderr, mininterval=0):
                sys.stderr.writelines(["a\n", "b\n"])
            if sink != "a full disk":
                assert os.write(stream.fileno(), b"from C") == 6
        assert sys.stderr is stream
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), stream.fileno()
        )  # what is buffered can be flushed


def test_what_has_a_reader_arrives(monkeypatch):
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with lossy_output("stderr"):
            print("a line", file=sys.stderr, flush=True)
            assert sys.stderr.fileno() == write
    assert os.read(read, 99) == b"a line\n"
    os.close(read)
