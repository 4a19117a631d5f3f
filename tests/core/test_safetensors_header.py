"""Headers of safetensors files are refused where the library refuses the file."""

import json
import random
import struct

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from penstock.core.errors import CapabilityError
from penstock.core.safetensors_header import INDEX, SINGLE, files_by_tensor, read_header

SIZES = {"a": 4, "b": 4, "c": 6}


def write(path, offsets, size):
    header = {
        name: {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
        for name, (start, stop) in offsets.items()
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(max(size, 0)))


def library_reads(path):
    try:
        with safe_open(path, "pt"):
            return True
    except SafetensorError:
        return False


def test_offsets_with_gaps_overlaps_or_a_rest_are_refused_as_the_library_does(tmp_path):
    rng = random.Random(0)
    path, outcomes = tmp_path / SINGLE, set()
    for _ in range(300):
        end, offsets = 0, {}
        for name, size in rng.sample(sorted(SIZES.items()), 3):
            start = end + rng.choice((0, 0, 0, 0, 0, -1, 1, -4))
            offsets[name] = max(start, 0), max(start, 0) + rng.choice((size, size, size, 0))
            end = offsets[name][1]
        write(path, offsets, max(end, 0) + rng.choice((0, 0, 0, 1, -1)))
        is_read = library_reads(path)
        outcomes.add(is_read)
        if is_read:
            assert read_header(path).keys() == offsets.keys()
        else:
            with pytest.raises(CapabilityError, match=SINGLE):
                read_header(path)
    assert outcomes == {True, False}


def test_a_single_file_beside_an_old_set_of_shards_is_taken_as_transformers_takes_it(tmp_path):
    save_file({"new": torch.ones(2)}, tmp_path / SINGLE)
    save_file({"old": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    weight_map = {"old": "model-00001-of-00001.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert files_by_tensor(tmp_path).keys() == {"new"}
