"""Weights into any layout: every number where it belongs, and no byte read for nothing."""

import json
import os
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock.core.errors import CapabilityError
from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.hf import load_weights as filling
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.models.initialize import initialize
from penstock.models.weights import WeightMap
from tests.engine.holdings import CONFIG, LAYOUTS, cut, holding, worst
from tests.ranks import on_ranks

SHAPES = WeightMap(CONFIG).hf_shapes()
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn]


def tensors():
    """As a checkpoint holds them, in several dtypes."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(DTYPES[number % len(DTYPES)])
        for number, (name, shape) in enumerate(SHAPES.items())
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two files and their index."""
    folder = tmp_path_factory.mktemp("weights")
    found = tensors()
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(found)}
    for file in set(files.values()):
        save_file({n: t for n, t in found.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def start(name, shape):
    return initialize(name, shape, 3, CONFIG)


def filled(folder):
    """What is wrong in each layout, and the bytes that this rank read for it, and should have."""
    filling.BLOCK_BYTES = 150  # a few rows
    preadv, counts = os.preadv, []
    os.preadv = lambda *given: counts.append(preadv(*given)) or counts[-1]
    want, ranks, seen = tensors(), init_process_group(60), {}
    for number, layout in enumerate(LAYOUTS):
        for readers in ("first_rank", "all_ranks"):
            counts.clear()
            held = holding(layout, merge_qkv=bool(number % 2))
            filling.load_weights(held, folder, start, readers=readers, ranks=ranks)
            pieces = [piece for one in held for piece in one.shards]
            if readers == "first_rank":
                due = sum(t.nbytes for t in want.values()) if ranks.is_main_process else 0
            else:
                due = sum(cut(want[piece.tensor], piece).nbytes for piece in pieces)
            seen[layout, readers] = worst(held, want), sum(counts) - due
        held = holding(layout, merge_qkv=bool(number % 2))
        filling.load_weights(held, None, start, readers="first_rank", ranks=ranks)
        drawn = {name: start(name, shape) for name, shape in SHAPES.items()}
        seen[layout, "drawn"] = worst(held, drawn), 0
    faults = {}
    for name, wrong in (("lacks", {"tensor": "model.none"}), ("shape", {"full_shape": (9, 9)})):
        held = holding("sharded", merge_qkv=False)
        pieces = tuple(replace(piece, **wrong) for piece in held[0].shards)
        held[0] = replace(held[0], shards=pieces)
        try:
            filling.load_weights(held, folder, start, readers="first_rank", ranks=ranks)
        except CapabilityError as error:
            faults[name] = str(error)
    return seen, faults


@pytest.mark.dist
def test_each_rank_of_each_layout_gets_its_own_numbers_and_no_byte_is_read_twice(folder):
    for seen, faults in on_ranks(4, filled, folder):
        assert len(seen) == 3 * len(LAYOUTS)
        assert seen == dict.fromkeys(seen, ([], 0))
        assert "lacks 1 tensors" in faults["lacks"]
        assert "model.none" in faults["lacks"]
        assert "is (13, 6) in the checkpoint, and the config makes it (9, 9)" in faults["shape"]


def refused(folder):
    """What this rank is told of weights that are not finite."""
    ranks, told = init_process_group(60), set()
    for readers in ("first_rank", "all_ranks"):
        held = holding("sharded", merge_qkv=False)
        with pytest.raises(CapabilityError) as error:
            filling.load_weights(held, folder, start, readers=readers, ranks=ranks)
        told.add(str(error.value).partition(":")[0])
    return told


@pytest.mark.dist
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_told_to_every_rank_with_its_tensor(value, tmp_path):
    found = tensors()
    spoiled = next(name for name, tensor in found.items() if tensor.dtype == torch.bfloat16)
    found[spoiled].view(-1)[-1] = value
    save_file(found, tmp_path / "model.safetensors")
    expected = f"1 tensors of {tmp_path} hold NaN or infinity, first {spoiled}"
    assert on_ranks(4, refused, tmp_path) == [{expected}] * 4


@st.composite
def boxes(draw):
    """A shape, and offsets and sizes of a box in it."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return shape, [first for first, _ in ends], [end - first for first, end in ends]


@given(boxes(), st.sampled_from([torch.bfloat16, torch.float64, torch.int8, torch.bool]))
@settings(max_examples=60, deadline=None)
def test_a_box_read_is_the_slice_of_what_the_library_wrote(tmp_path_factory, box, dtype):
    shape, offsets, sizes = box
    folder = tmp_path_factory.mktemp("box")
    tensor = torch.randn(shape).mul(9).to(dtype)
    save_file(
        {"before": torch.ones(3, dtype=torch.uint8), "it": tensor}, folder / "model.safetensors"
    )
    with SafetensorsFolder(folder) as found:
        got = found.box("it", offsets, sizes)
        want = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert got.dtype == dtype
        assert torch.equal(got, want)
        assert torch.equal(found["it"], tensor)


def file_of(entry, data=b"12345678", header=None):
    text = json.dumps({"it": entry}).encode() if header is None else header
    return struct.pack("<Q", len(text)) + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "header would be 0 bytes"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header would be"),
        (file_of(GOOD, header=b"{not json}"), "not a safetensors file"),
        (file_of(GOOD, header=b"[1, 2]"), "not a table"),
        (file_of({**GOOD, "data_offsets": [0, 16], "shape": [4]}), "bytes 0 to 16 of 8"),
        (file_of({**GOOD, "shape": [3]}), "bytes 0 to 8 of 8"),
        (file_of({**GOOD, "data_offsets": [-8, 0]}), "what is no count"),
        (file_of({**GOOD, "shape": [-2]}), "what is no count"),
        (file_of({**GOOD, "shape": "22"}), "what is no count"),
        (file_of({"dtype": "F32"}), "not of the format"),
        (file_of({**GOOD, "dtype": "F4"}), "of dtype F4"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused(tmp_path, content, fault):
    (tmp_path / "model.safetensors").write_bytes(content)
    with SafetensorsFolder(tmp_path) as found, pytest.raises(CapabilityError, match=fault):
        found["it"]


def test_an_index_leads_nowhere_but_into_its_folder(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({"it": torch.ones(2)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"it": "../secret.safetensors"}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with SafetensorsFolder(inside) as found, pytest.raises(CapabilityError, match="is not there"):
        found["it"]
