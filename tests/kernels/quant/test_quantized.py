"""Quantized matrices in use: how they are cut, layers made of them, what others publish."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from penstock_kernels.group_gemm import group_gemm
from penstock_kernels.quant import (
    FORMATS,
    QuantizedTensor,
    cat,
    dequantize,
    get_format,
    group_linear,
    largest,
    linear,
    published_layouts,
    quantize,
    step_size,
)
from tests.kernels.quant.matrices import normal, same, uneven
from tests.kernels.where import CAN_RUN_TRITON, DEVICE

each_format = pytest.mark.parametrize("name", FORMATS)
pytestmark = pytest.mark.usefixtures("poisoned")

# Cuts.


@each_format
def test_any_cut_of_a_matrix_is_what_the_whole_has_there(name):
    made = quantize(uneven(3, 130, 384), FORMATS[name])
    whole = dequantize(made)
    for dim, start, length in ((0, 1, 2), (-2, 37, 60), (-1, 128, 256), (2, 256, 128)):
        part = made.narrow(dim, start, length)
        assert torch.equal(dequantize(part), whole.narrow(dim, start, length))
    # Gate and up of each expert, laid together; experts flattened; rows in bytes, through a file.
    halves = [made.narrow(-2, start, 65) for start in (65, 0)]
    assert torch.equal(dequantize(cat(halves)), torch.cat([whole[:, 65:], whole[:, :65]], 1))
    flat = {part: tensor.flatten(0, 1) for part, tensor in made.as_bytes().items()}
    assert all(tensor.dtype == torch.uint8 for tensor in flat.values())
    back = load(save({part: tensor[100:201].clone() for part, tensor in flat.items()}))
    back = {part: tensor.to(DEVICE) for part, tensor in back.items()}
    rows = QuantizedTensor.of_bytes(made.format, 384, back)
    assert torch.equal(dequantize(rows), whole.flatten(0, 1)[100:201])


ROWS, COLUMNS = 260, 300


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    backend=st.sampled_from(["reference", "triton"] if CAN_RUN_TRITON else ["reference"]),
    rows=st.lists(st.integers(0, ROWS), min_size=2, max_size=2, unique=True).map(sorted),
    columns=st.sampled_from([(0, 128), (0, COLUMNS), (128, 256), (128, COLUMNS), (256, COLUMNS)]),
)
def test_parts_quantized_by_themselves_are_those_of_the_whole(name, backend, rows, columns):
    weight, kept = uneven(ROWS, COLUMNS), FORMATS[name]
    (start, stop), (left, right) = rows, columns
    whole = quantize(weight, kept).narrow(-2, start, stop - start).narrow(-1, left, right - left)
    most = largest(weight, kept)
    if most is not None:
        most = most[start:stop] if most.shape[0] == ROWS else most
        most = most[:, left // 128 : -(-right // 128)] if most.shape[1] > 1 else most
    same(quantize.backend(backend)(weight[start:stop, left:right], kept, most), whole)


@each_format
def test_the_largest_magnitudes_of_the_whole_are_found_part_by_part(name):
    weight, kept = torch.stack([uneven(300, 140), uneven(300, 140, seed=5)]), FORMATS[name]
    most = largest(weight, kept)
    parts = {start: weight[:, start:stop] for start, stop in ((0, 60), (60, 70), (70, 300))}
    found = [
        each for start, part in parts.items() if (each := largest(part, kept, start)) is not None
    ]
    if most is None:
        assert name in ("nf4", "int4", "mxfp4")
        assert not found
    elif name == "nvfp4":
        assert torch.equal(torch.stack(found).amax(0), most)
    elif name == "block_fp8":
        tiles = torch.zeros(2, 3, 2, device=DEVICE)
        for start, part in zip(parts, found, strict=True):
            for row in range(part.shape[1]):
                at = (start + row) // 128
                tiles[:, at] = tiles[:, at].maximum(part[:, row])
        assert torch.equal(tiles.repeat_interleave(128, 1)[:, :300], most)
        assert torch.equal(tiles[:, 2, 1], weight[:, 256:, 128:].abs().amax((-2, -1)))
    else:
        assert torch.equal(torch.cat(found, 1), most)


@each_format
def test_a_stack_is_quantized_matrix_by_matrix(name):
    weight = uneven(3, 130, 70) * torch.tensor([1, 10, 100], device=DEVICE)[:, None, None]
    each = [quantize(matrix, FORMATS[name]) for matrix in weight]
    stacked = {part: torch.stack([one.tensors[part] for one in each]) for part in each[0].tensors}
    same(quantize(weight, FORMATS[name]), QuantizedTensor(FORMATS[name], 70, **stacked))


@each_format
def test_a_part_is_requantized_in_place(name):
    made = quantize(normal(8, 128), FORMATS[name])
    before, changed = dequantize(made), normal(3, 128, seed=5)
    made.narrow(-2, 2, 3).copy_(quantize(changed, FORMATS[name]))
    after = dequantize(made)
    assert torch.equal(after[2:5], dequantize(quantize(changed, FORMATS[name])))
    assert torch.equal(after[:2], before[:2])
    assert torch.equal(after[5:], before[5:])
    with pytest.raises(ValueError, match=r"does not fit in .* \(8, 128\)"):
        made.copy_(quantize(changed, FORMATS[name]))


def test_what_makes_no_sense_is_refused():
    made = quantize(normal(4, 256), FORMATS["nf4"])
    with pytest.raises(ValueError, match="columns 32 to 96 of 256 do not end between groups of 64"):
        made.narrow(-1, 32, 64)
    with pytest.raises(ValueError, match="3 from 2 on are not in the 4"):
        made.narrow(-2, 2, 3)
    with pytest.raises(ValueError, match="along rows"):
        cat([made, made], -1)
    with pytest.raises(ValueError, match="of several kinds"):
        cat([made, quantize(normal(4, 256), FORMATS["int4"])])
    with pytest.raises(ValueError, match="nf4 has no scales"):
        QuantizedTensor.of_bytes(made.format, 256, {"codes": made.codes})
    with pytest.raises(ValueError, match=r"are torch.uint8 \(4, 96\), and these .* \(4, 128\)"):
        QuantizedTensor(made.format, 192, made.codes, made.scales)
    with pytest.raises(ValueError, match="nvfp4 has global scales"):
        QuantizedTensor(FORMATS["nvfp4"], 256, made.codes, made.scales)
    with pytest.raises(ValueError, match="nvfp4 cannot have groups of 32"):
        get_format("nvfp4", 32)
    with pytest.raises(ValueError, match="there is no format 'fp4'"):
        get_format("fp4")
    with pytest.raises(ValueError, match=r"takes largest magnitudes \(4, 2\), .* are \(1, 2\, 1\)"):
        quantize(normal(4, 256), FORMATS["block_fp8"], torch.ones(1, 2, 1))
    with pytest.raises(ValueError, match="nf4 takes no largest"):
        quantize(normal(4, 256), FORMATS["nf4"], torch.ones(1, 1))
    for broken in (torch.tensor([[1.0, float("nan")]]), torch.tensor([[float("inf"), 1.0]])):
        for kept in FORMATS.values():
            with pytest.raises(ValueError, match="not finite"):
                quantize(broken, kept)
    with pytest.raises(ValueError, match=r"torch.int32 \(2, 2\)"):
        quantize(torch.ones(2, 2, dtype=torch.int32), FORMATS["nf4"])


# Layers.


def kept_for_backward(run):
    """Bytes that autograd keeps while `run` runs, and what it returns."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        result = run()
    return sum(tensor.numel() * tensor.element_size() for tensor in kept), result


@each_format
@pytest.mark.parametrize("change", [None, functools.partial(torch.mul, 1.5)], ids=["", "changed"])
def test_layers_give_the_rows_and_gradients_of_the_dequantized_matrix_and_keep_codes(name, change):
    made = quantize(normal(48, 128), FORMATS[name])
    weight = dequantize(made, torch.float32) * (1 if change is None else 1.5)
    x, dy = normal(2, 40, 128, seed=1).requires_grad_(), normal(2, 40, 48, seed=2)
    kept, y = kept_for_backward(lambda: linear(x, made, change))
    want = x @ weight.T
    torch.testing.assert_close(y, want)
    (dx,), (expected,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(want, x, dy)
    torch.testing.assert_close(dx, expected)
    assert kept == made.num_bytes < weight.numel() * 2

    experts = quantize(normal(3, 32, 128), FORMATS[name])
    weights = dequantize(experts, torch.float32) * (1 if change is None else 1.5)
    rows, counts = normal(9, 128, seed=3).requires_grad_(), torch.tensor([4, 0, 5], device=DEVICE)
    kept, y = kept_for_backward(lambda: group_linear(rows, experts, counts, change=change))
    want = group_gemm.reference(rows, weights, counts)
    torch.testing.assert_close(y, want)
    dy = normal(9, 32, seed=4)
    (dx,), (expected,) = torch.autograd.grad(y, rows, dy), torch.autograd.grad(want, rows, dy)
    torch.testing.assert_close(dx, expected)
    assert kept == experts.num_bytes + counts.numel() * counts.element_size()


@pytest.mark.slow
def test_layers_compile_without_a_break():
    made = quantize(normal(8, 64), FORMATS["nvfp4"]).as_bytes()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x, tensors):
        return linear(x, QuantizedTensor.of_bytes(FORMATS["nvfp4"], 64, tensors))

    x = normal(4, 64).requires_grad_()
    y, want = layer(x, made), linear(x, QuantizedTensor.of_bytes(FORMATS["nvfp4"], 64, made))
    torch.testing.assert_close(y, want)
    dx, expected = (torch.autograd.grad(of.sum(), x)[0] for of in (y, want))
    torch.testing.assert_close(dx, expected)


# The largest of each group is 1, and a matrix of nvfp4 has scales of 1 / 6 then.
@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("nvfp4", 0.5 / 6),
        ("fp8", 0.125 / 448),
        ("block_fp8", 0.125 / 448),
        ("nf4", 0.5 * 0.07958),
        ("int8", 0.5 / 127),
        ("int4", 0.5 / 7),
    ],
)
def test_steps_are_the_published_shares_of_a_groups_scale(name, step):
    weight = normal(3, 256).clamp(-1, 1)
    weight[:, ::16] = torch.tensor([1.0, 10.0, 100.0], device=DEVICE)[:, None]
    steps = step_size(quantize(weight, FORMATS[name]))
    rows = torch.tensor([1.0, 10.0, 100.0], device=DEVICE)
    rows = rows.clamp(min=100) if name == "block_fp8" else rows
    want = (step * rows)[:, None].expand_as(steps)
    torch.testing.assert_close(steps, want, rtol=0.04 if name == "nvfp4" else 1e-5, atol=0)


# What others publish.


def test_published_tensors_are_read_as_they_are():
    weight = uneven(200, 256)
    tiles = quantize(weight, FORMATS["block_fp8"])
    fp8 = tiles.codes.view(torch.float8_e4m3fn)
    assert published_layouts.tile_scales(tiles).shape == (2, 2)
    same(published_layouts.of_fp8_tiles(fp8, published_layouts.tile_scales(tiles)), tiles)
    same(
        published_layouts.of_fp8_tiles(
            fp8[100:], published_layouts.tile_scales(tiles), first_row=100
        ),
        tiles.narrow(-2, 100, 100),
    )
    blocks = quantize(torch.stack([weight, 2 * weight]), FORMATS["nvfp4"])
    whole = blocks.tensors["global_scales"][:, 0, 0]
    same(published_layouts.nvfp4_of_modelopt(blocks.codes, blocks.scales, whole), blocks)
    # compressed-tensors packs eight integers, 8 more than they are, into an int32, first ones low.
    packed = quantize(weight, FORMATS["int4"])
    words = packed.codes.view(torch.int32)
    each = torch.stack([(words >> 4 * i & 15) - 8 for i in range(8)], -1).flatten(-2)
    numbers = each * packed.scales.repeat_interleave(128, -1)
    assert torch.equal(numbers, dequantize(packed, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("scales", ["float32", "quantized again"])
def test_nf4_is_that_of_bitsandbytes_and_its_checkpoints_are_read(scales):
    functional = pytest.importorskip("bitsandbytes.functional")
    for group, weight in ((64, uneven(60, 256).cpu()), (128, normal(3, 20, 256).cpu())):
        packed, state = functional.quantize_4bit(
            weight, blocksize=group, quant_type="nf4", compress_statistics=scales != "float32"
        )
        found = state.absmax
        if scales != "float32":
            nested = state.state2
            found = published_layouts.bitsandbytes_scales(
                state.absmax, nested.code, nested.absmax, state.offset.item(), nested.blocksize
            )
        read = published_layouts.nf4_of_bitsandbytes(packed, found, weight.shape, group)
        theirs = functional.dequantize_4bit(packed, state)
        torch.testing.assert_close(dequantize(read, torch.float32), theirs, rtol=1e-6, atol=0)
        if scales == "float32":
            made = quantize.reference(weight, get_format("nf4", group))
            assert torch.equal(read.codes, made.codes)
            # Zeros have a scale of zero there.
            assert torch.equal(read.scales.clamp(min=1e-12), made.scales)
    with pytest.raises(ValueError, match="no rows of whole groups"):
        published_layouts.nf4_of_bitsandbytes(packed, found, (60, 128), 256)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning:torchao.*")
def test_floats_are_those_of_torchao():
    fp8 = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")

    weight = normal(256, 256).cpu()
    codes, scales = fp8.torch_blockwise_scale_weight_quant(weight)
    ours = quantize.reference(weight, FORMATS["block_fp8"])
    torch.testing.assert_close(published_layouts.tile_scales(ours), scales, rtol=1e-6, atol=0)
    # It multiplies by a rounded reciprocal: a few fall on the other side of a tie.
    assert (codes.view(torch.uint8) != ours.codes).float().mean() < 1e-3

    theirs = nvfp4.NVFP4Tensor.to_nvfp4(
        weight, per_tensor_scale=nvfp4.per_tensor_amax_to_scale(weight.abs().max())
    )
    made = quantize.reference(weight, FORMATS["nvfp4"])
    torch.testing.assert_close(
        made.tensors["global_scales"][0, 0], theirs.per_tensor_scale, rtol=1e-6, atol=0
    )
    assert (made.scales.float() != theirs.scale.float()).float().mean() < 1e-2
    # Its codes are read as ours; it rounds by the scale as it is kept, and ties to even.
    read = published_layouts.nvfp4_of_modelopt(theirs.qdata, theirs.scale, theirs.per_tensor_scale)
    torch.testing.assert_close(dequantize(read, torch.float32), theirs.dequantize(torch.float32))
    assert (made.codes != theirs.qdata).float().mean() < 0.1
