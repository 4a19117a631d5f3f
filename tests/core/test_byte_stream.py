import io

import pytest

from penstock.core.process.byte_stream import byte_stream


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_bytes_that_are_cut_anywhere_become_the_text_of_a_stream_without_a_buffer(size):
    shown, text = io.StringIO(), "löss → 0.5 \U0001f600\n"
    stream = byte_stream(shown)
    raw = text.encode() + b"\xff."
    for start in range(0, len(raw), size):
        stream.write(raw[start : start + size])
        stream.flush()
    assert shown.getvalue() == text + "\N{REPLACEMENT CHARACTER}."


def test_a_stream_with_a_buffer_takes_bytes_as_they_are():
    below = io.BytesIO()
    assert byte_stream(io.TextIOWrapper(below)) is below
