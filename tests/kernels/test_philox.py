"""philox: its words against published ones."""

import pytest
import torch

from penstock_kernels.rng_rows import philox


# The known answers that come with the authors' own implementation (Random123, philox4x32-10).
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0_A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
def test_words_are_those_that_the_authors_of_philox_publish(counter, key, words):
    found = philox([torch.tensor([word]) for word in counter], key)
    assert [int(word) for word in found] == [int(word, 16) for word in words.split()]
