"""What is compiled for GPUs: every kernel, each of its ways, and its largest tiles.

Called in a process of its own, where Triton does not interpret; see `test_compiles_for_gpus.py`.
"""

import json
from itertools import cycle, islice, product

from tests.kernels.gpu_resources import SHARED_MEMORY, usage_of, variant_of

ALL = False
"""Whether every way is compiled for every kind of numbers, and not each once; and what is measured
beside a rule's choice."""

ARCH = 90
"""The compute capability that is compiled for, times ten."""

DATA = ("*bf16", "*fp32")
"""Of what kernels read and write."""


def ways(*choices):
    """Every choice of one thing beside some choice of the others, or beside all."""
    if ALL:
        return product(*choices)
    return islice(zip(*map(cycle, choices), strict=False), max(map(len, choices)))


def name_of(function) -> str:
    """Of a kernel's Python function, or of the kernel."""
    return f"{function.__module__}.{function.__qualname__}".removeprefix("penstock_kernels.")


def compiled(kernel, types, constants, **options):
    """`kernel` for arguments of `types` by name, None for what is absent and i32 for what is not
    named, and for `constants`; prints its name and what it uses. As in most launches, tensors begin
    at multiples of 16 bytes and sizes are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    assert {*types, *constants} <= set(names)
    constants = {**{name: None for name, kind in types.items() if kind is None}, **constants}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    multiples = {
        (at,): [["tt.divisibility", 16]]
        for at, (name, parameter) in enumerate(zip(names, kernel.params, strict=True))
        if signature[name].startswith(("*", "i")) and not parameter.do_not_specialize
    }
    source = ASTSource(kernel, signature, values, multiples)
    found = triton.compile(source, target=GPUTarget("cuda", ARCH, 32), options=options)
    assert found.asm["cubin"]
    name = f"{name_of(kernel.fn)} {variant_of(types, constants, options)}"
    assert found.metadata.shared <= SHARED_MEMORY[ARCH], f"{name}: {found.metadata.shared} bytes"
    print(json.dumps([name, usage_of(found)]))
    return found


def compile_elementwise() -> None:
    from penstock_kernels.clamped_swiglu import triton as clamped_gate
    from penstock_kernels.dropout import triton as dropout
    from penstock_kernels.glu import triton as glu
    from penstock_kernels.rms_norm import WIDEST
    from penstock_kernels.rms_norm import triton as rms_norm
    from penstock_kernels.rope import triton as rope

    for [data] in ways(DATA):
        moved = {"x_ptr": data, "places_ptr": "*i64", "y_ptr": data, "scale": "fp32"}
        compiled(dropout._drop, moved, {"GROUPS": dropout.GROUPS})
        limits, both = {"alpha": "fp32", "limit": "fp32"}, {"both_ptr": data}
        block = {"BLOCK": clamped_gate.BLOCK}
        compiled(clamped_gate._forward, {**both, **limits, "y_ptr": data}, block)
        backward = {**both, **limits, "dy_ptr": data, "dboth_ptr": data}
        compiled(clamped_gate._backward, backward, block)
    for data, activation in ways(DATA, ("silu", "gelu", "gelu_tanh")):
        pair = dict.fromkeys(("gate_ptr", "up_ptr"), data)
        slopes = dict.fromkeys(("dy_ptr", "dgate_ptr", "dup_ptr"), data)
        kind = {"BLOCK": glu.BLOCK, "ACTIVATION": activation}
        compiled(glu._forward, {**pair, "y_ptr": data}, kind)
        compiled(glu._backward, {**pair, **slopes}, kind)
    for data, (pairs, turning) in ways(DATA, (("halves", 128), ("neighbours", 64))):
        heads = dict.fromkeys(("q_ptr", "k_ptr", "turned_q_ptr", "turned_k_ptr"), data)
        angles = dict.fromkeys(("cos_ptr", "sin_ptr"), data)
        kinds = {"PAIRS": pairs, "BACK": turning == 64, **rope.tile(32, 128, turning)}
        compiled(rope._turn, {**heads, **angles}, kinds)
    norms = (("*bf16", WIDEST), ("*fp32", 128), ("*fp32", 4096))
    for data, (weight, width), has_stream in ways(DATA, norms, (True, False)):
        stream = data if has_stream else None
        streams = {"stream_ptr": stream, "sum_ptr": stream}
        forward = {"x_ptr": data, "weight_ptr": weight, "y_ptr": data, **streams}
        forward |= {"scale_ptr": "*fp32", "eps": "fp32"}
        # Rows side by side, and heads of a fused projection.
        spans = {"SPAN": 0, "SPAN_STRIDE": 0} if width > 128 else {"SPAN": 32, "SPAN_STRIDE": 6144}
        spans["PLUS_ONE"] = width == 128
        tile = {**rms_norm.tile(width), **spans}
        compiled(rms_norm._forward, forward, **_parted(tile))
        backward = {"x_ptr": data, "weight_ptr": weight, "dy_ptr": data, "dx_ptr": data}
        backward |= {"dsum_ptr": stream, "scale_ptr": "*fp32"}
        backward["dweight_ptr"] = stream and "*fp32"
        compiled(rms_norm._backward, backward, **_parted({**rms_norm.tile(width), **spans}))
        if stream:
            partials = {"partial_ptr": "*fp32", "sum_ptr": weight}
            compiled(rms_norm._add_partials, partials, rms_norm.PARTIALS)


def compile_cross_entropy() -> None:
    from penstock_kernels.cross_entropy import triton as cross_entropy

    for data, more in ways(DATA, (False, True)):
        # Where nothing is smoothed there is no such tensor.
        smoothed = "*fp32" if more else None
        read = {"logits_ptr": data, "labels_ptr": "*i64", "log_sum_ptr": "*fp32", "cap": "fp32"}
        tallied = {**read, "target_ptr": "*fp32", "total_ptr": smoothed}
        turned = {**read, "share_ptr": "*fp32", "hit_ptr": "*fp32", "floor_ptr": smoothed}
        kinds = {"CAPPED": more, "SMOOTHED": more}
        for kernel, types in ((cross_entropy._tally, tallied), (cross_entropy._slope, turned)):
            constants = {**kinds, "BLOCK": cross_entropy.BLOCK}
            compiled(kernel, types, constants, num_warps=cross_entropy.WARPS)
        for block, warps in cross_entropy.TILES[1:] if ALL else ():
            compiled(cross_entropy._slope, turned, {**kinds, "BLOCK": block}, num_warps=warps)


def compile_max_logits() -> None:
    import torch

    from penstock_kernels.max_logits import triton as max_logits

    widths = (("*bf16", 64, torch.bfloat16), ("*bf16", 192, torch.bfloat16))
    widths += (("*fp32", 128, torch.float32), ("*fp32", 256, torch.float32))
    for (data, width, dtype), windowed, starts in ways(widths, (True, False), ("*i32", None)):
        types = {"q_ptr": data, "k_ptr": data, "first_ptr": "*i32", "start_rows_ptr": starts}
        types |= {"largest_ptr": "*fp32", "scale": "fp32"}
        sizes = {**max_logits.tile(width, dtype), "GROUPS": 4, "WINDOWED": windowed}
        sizes["UPCAST"] = False
        compiled(max_logits._max_logits, types, sizes, num_warps=4)


def compile_paged_attention() -> None:
    import torch

    from penstock_kernels.attention.paged import triton as paged

    # Llama 3 and Qwen3, gpt-oss, DeepSeek's latent vectors, and fp32.
    models = (("*bf16", torch.bfloat16, 128, 4), ("*bf16", torch.bfloat16, 64, 8))
    models += (("*bf16", torch.bfloat16, 576, 16), ("*fp32", torch.float32, 128, 4))
    for (data, dtype, width, groups), is_decode, windowed, sinks in ways(
        models, (True, False), (False, True), (None, "*bf16")
    ):
        sizes = paged.tile(width, groups, dtype, is_decode=is_decode)
        splits = 8 if is_decode else 1
        types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), data)
        types |= dict.fromkeys(("tables_ptr", "starts_ptr", "counts_ptr"), "*i32")
        types |= {"tiles_ptr": None if is_decode else "*i32", "sinks_ptr": sinks}
        types |= {
            "y_ptr": "*fp32" if is_decode else data,
            "lse_ptr": "*fp32" if is_decode else None,
        }
        types |= {"scale": "fp32", "soft_cap": "fp32"}
        constants = {"GROUPS": groups, **sizes, "PAGE": 64, "SPLIT": paged.SPLIT}
        constants |= {"NUM_SPLITS": splits, "WINDOWED": windowed, "CAPPED": False, "UPCAST": False}
        compiled(paged._paged_attention, types, constants, num_warps=paged.warps(sizes))
    merged = {"parts_ptr": "*fp32", "lse_ptr": "*fp32", "sinks_ptr": "*bf16", "y_ptr": "*bf16"}
    sizes = {"NUM_SPLITS": 8, "PADDED_SPLITS": 8, "WIDTH": 128}
    compiled(paged._merge, merged, sizes, num_warps=4)


def compile_sparse_attention() -> None:
    from penstock_kernels.sparse_attention import latent, triton_latent
    from penstock_kernels.sparse_attention import triton_select as select

    for [data] in ways(DATA):
        scored = dict.fromkeys(("q_ptr", "k_ptr"), data)
        scored |= {"weight_ptr": "*fp32", "first_ptr": "*i32", "scores_ptr": "*fp32"}
        width = {"WIDTH": 128, "UPCAST": False}
        compiled(select.score, scored, {**select.TILE, **width}, num_warps=select.WARPS)
    # DeepSeek V3.2 and GLM 5, and fp32, which has room for less.
    for data, heads, (rank, rope) in (("*bf16", 128, (512, 64)), ("*fp32", 16, (128, 64))):
        types = dict.fromkeys(("q_ptr", "q_rope_ptr", "latent_ptr", "k_rope_ptr"), data)
        types |= {"selected_ptr": "*i32", "y_ptr": data, "log_sum_ptr": "*fp32", "scale": "fp32"}
        more = dict.fromkeys(("dy_ptr", "dq_ptr", "dq_rope_ptr"), data)
        more |= {**types, "dkeys_ptr": "*fp32"}
        size = 2 if data == "*bf16" else 4
        backward = triton_latent.add_gradients, more, latent.BACKWARD, latent.backward_bytes
        for (kernel, named, tiles, num_bytes), way in (
            ((triton_latent.attend, types, latent.FORWARD, latent.forward_bytes), {}),
            *((backward, {"IN_ORDER": in_order}) for in_order in (False, True)),
        ):
            limit = SHARED_MEMORY[ARCH]
            tile = latent.choose_tile(tiles, num_bytes, rank, rope, size, limit)
            constants = {**tile.options(heads, rank, rope), **way, "UPCAST": False}
            found = compiled(kernel, named, **_parted(constants))
            assert ARCH == 100 or found.metadata.shared <= num_bytes(tile, rank, rope, size)
    parts = dict.fromkeys(("parts_ptr", "dkeys_ptr"), "*fp32")
    parts |= {"order_ptr": "*i64", "starts_ptr": "*i32"}
    compiled(triton_latent.add_in_order, parts, {**latent.ADDED, "WIDTH": 1024})


def _parted(tile) -> dict:
    """Constants, and how many warps and stages."""
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages") if name in tile}
    return {"constants": tile, **options}


def compile_route() -> None:
    from penstock_kernels.route import triton as route

    # Qwen3, gpt-oss, DeepSeek V3, Kimi K2: experts, their groups, choices.
    models = ((128, 1, 8, False, "", None), (32, 1, 4, False, "", None))
    models += ((256, 8, 8, True, "best_two", "*fp32"), (384, 1, 8, True, "", "*fp32"))
    for [(experts, groups, choices, sigmoid, group_score, bias)] in ways(models):
        types = {"logits_ptr": "*fp32", "bias_ptr": bias, "choice_ptr": "*i64"}
        types |= {"weights_ptr": "*fp32", "norm_eps": "fp32", "scale": "fp32"}
        kind = {"SIGMOID": sigmoid, "NORMALIZED": True}
        size = 1 << (experts // groups - 1).bit_length()
        lanes = {"GROUPS": groups, "GROUP_SIZE": size, "CHOICES": choices}
        constants = {**kind, "GROUP_SCORE": group_score, **lanes, **route.tile(groups * size)}
        compiled(route._route, types, constants)
        types = {"logits_ptr": "*fp32", "choice_ptr": "*i64", "dweights_ptr": "*fp32"}
        types |= {"dlogits_ptr": "*fp32", "norm_eps": "fp32", "scale": "fp32"}
        constants = {**kind, "EXPERTS": groups * size, **route.tile(groups * size)}
        compiled(route._route_gradient, types, constants)
        constants.pop("NORMALIZED")
        types = {"logits_ptr": "*fp32", "choice_ptr": "*i64", "row_ptr": "*i64"}
        compiled(route._route_stats, {**types, "partial_ptr": "*fp32"}, constants)


def compile_permute() -> None:
    from penstock_kernels.permute import order_triton
    from penstock_kernels.permute import triton as permute

    data, order = "*bf16", "*i64"
    block = {"BLOCK": permute.WIDEST}
    moved = {"x_ptr": data, "copy_of_row_ptr": order, "rows_ptr": data}
    compiled(permute._copy, moved, block)
    added = {"rows_ptr": data, "row_of_copy_ptr": order, "y_ptr": data}
    for weights in ("*fp32", data):
        weighted = {**added, "weights_ptr": weights}
        compiled(permute._add, weighted, {"WEIGHTED": weights != data, **block})
    weighed = {
        **{"dy_ptr": data, "rows_ptr": data, "weights_ptr": "*fp32", "copy_of_row_ptr": order},
        **{"drows_ptr": data, "dweights_ptr": "*fp32"},
    }
    compiled(permute._weigh, weighed, block)
    counted = {"choice_ptr": order, "tally_ptr": "*i32"}
    ordered = {**counted, "copy_of_row_ptr": order, "row_of_copy_ptr": order, "counts_ptr": order}
    for [experts] in ways((128, 8, 384)):
        compiled(order_triton._tally, counted, order_triton.tile(experts))
        compiled(order_triton._order, ordered, {"NONE": -1, **order_triton.tile(experts)})


def _require_asynchronous(found, *, is_indirect) -> None:
    """Tiles go from memory to the tensor cores without passing through registers, beside the
    indices of rows."""
    loop = found.asm["ttgir"].split("scf.for")[-1].split("scf.yield")[0]
    assert "warp_group_dot" in loop
    assert loop.count("local_load") == is_indirect
    assert "async_tma_copy" in loop


def _compiled_rows(copy, weight, dtype, tile, gate="", gathers=False):
    from penstock_kernels.group_gemm import triton as kernels

    types = {"y_ptr": f"*{dtype}", "bounds_ptr": "*i32", "alpha": "fp32", "limit": "fp32"}
    types |= {"x": f"*{dtype}", "weight": f"*{dtype}"}
    types |= {"gated_ptr": f"*{dtype}" if gate else None}
    types |= {"copies_ptr": "*i64" if gathers else None}
    types |= {"bias_ptr": f"*{dtype}" if gate == "clamped" else None}
    if copy == "descriptors":
        block = (tile.columns, tile.depth)
        block = block if weight == "contracted" else block[::-1]
        block = f"1,2,{block[0] // 2},{block[1]}" if gate == "silu" else f"1,{block[0]},{block[1]}"
        types["weight"] = f"tensordesc<{dtype}[{block}]>"
        if not gathers:
            types["x"] = f"tensordesc<{dtype}[{tile.rows},{tile.depth}]>"
    x_copy = "pointers" if gathers else copy
    constants = {"WEIGHT": weight, "X_COPY": x_copy, "WEIGHT_COPY": copy, "GROUPS": 256}
    return _compiled_products(kernels._by_rows, types, {**constants, "GATE": gate}, tile)


def _compiled_groups(copy, dtype, tile, copied=""):
    from penstock_kernels.group_gemm import triton as kernels

    types = {"ends_ptr": "*i32", "y_ptr": f"*{dtype}", "a": None, "b": None}
    types |= {**dict.fromkeys(("a_ptr", "b_ptr"), f"*{dtype}")}
    types["copies_ptr"] = "*i64" if copied else None
    if copy == "descriptors" and copied != "a":
        types["a"] = f"tensordesc<{dtype}[{tile.depth},{tile.rows}]>"
    if copy == "descriptors" and copied != "b":
        types["b"] = f"tensordesc<{dtype}[{tile.depth},{tile.columns}]>"
    ways = {f"{name.upper()}_COPY": "copies" if copied == name else copy for name in "ab"}
    return _compiled_products(kernels._of_groups, types, ways, tile)


def _compiled_products(kernel, types, constants, tile):
    from penstock_kernels.group_gemm import tiles

    rows, columns, depth, warps, stages = tile
    ways = {*constants.values()}
    constants |= {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth}
    constants |= {"UPCAST": False, "BAND": tiles.BAND}
    found = compiled(kernel, types, constants, num_warps=warps, num_stages=stages)
    if ARCH == 90 and tile == tiles.largest(2, SHARED_MEMORY[90]) and "descriptors" in ways:
        _require_asynchronous(found, is_indirect="copies" in ways)
    return found


def compile_group_gemm() -> None:
    from penstock_kernels.group_gemm import tiles, triton, zeroing_triton

    plan = {"counts_ptr": "*i64", "bounds_ptr": "*i32"}
    compiled(triton._plan, plan, {"PAST": 1, "ROWS": 128, "GROUPS": 256})
    zeroed = {"ROWS": 1, "COLUMNS": 4096, "EACH": 65536}
    for tail, numbers in ((True, "*i32"), (False, "*i64")):
        zeroing = {"y_ptr": "*bf16", "numbers_ptr": numbers}
        compiled(zeroing_triton._zero_rows, zeroing, {"TAIL": tail, **zeroed})

    largest = tiles.largest(2, SHARED_MEMORY[ARCH])
    copy = "descriptors" if ARCH >= 90 else "pointers"
    _compiled_rows(copy, "contracted", "bf16", largest)
    _compiled_rows(copy, "resulting", "bf16", largest)
    _compiled_groups(copy, "bf16", largest)
    short = largest._replace(rows=16, columns=128, warps=4)
    _compiled_rows(copy, "contracted", "bf16", short)
    for first, instruction in ((largest, "warp_group_dot"), (short, "tt.dot")):
        for other in tiles.others(first, 2, SHARED_MEMORY[ARCH]) if ALL else ():
            found = _compiled_rows(copy, "contracted", "bf16", other)
            if ARCH == 90:
                assert instruction in found.asm["ttgir"], "another one may add in another order"
    _compiled_rows("pointers", "contracted", "fp16", largest)
    _compiled_rows("pointers", "resulting", "fp32", tiles._FP32)
    _compiled_groups("pointers", "fp32", tiles._FP32)


def compile_expert_mlp() -> None:
    from penstock_kernels.expert_mlp import triton as expert_mlp
    from penstock_kernels.group_gemm import tiles

    largest = tiles.largest(2, SHARED_MEMORY[ARCH])
    copy = "descriptors" if ARCH >= 90 else "pointers"
    # Qwen3 and gpt-oss: gates and biases, rows by index.
    _compiled_rows(copy, "contracted", "bf16", largest, "silu", gathers=True)
    _compiled_rows(copy, "resulting", "bf16", largest, "clamped", gathers=True)
    _compiled_rows(copy, "resulting", "bf16", largest, gathers=True)
    _compiled_groups(copy, "bf16", largest, "a")
    _compiled_groups(copy, "bf16", largest, "b")
    for data, gate, experts in ways(DATA, ("silu", "clamped"), (128, 32)):
        bias = data if gate == "clamped" else None
        types = dict.fromkeys(("both_ptr", "dinner_ptr", "dy_ptr", "dboth_ptr", "inner_ptr"), data)
        types |= {"weights_ptr": "*fp32", "dweights_ptr": "*fp32", "bias_ptr": bias}
        types |= {"copies_ptr": "*i64", "ends_ptr": "*i32", "alpha": "fp32", "limit": "fp32"}
        sizes = {"GATE": gate, "EXPERTS": experts, "BLOCK": expert_mlp.WIDEST}
        compiled(expert_mlp._gate_gradients, types, sizes)
        summed = {"x_ptr": data, "ends_ptr": "*i32", "y_ptr": data}
        gathered = {"copies_ptr": "*i64", "weights_ptr": "*fp32"}
        if gate == "silu":
            gathered = dict.fromkeys(gathered)
        compiled(expert_mlp._sum_groups, {**summed, **gathered}, expert_mlp.SUMMED)


def compile_quant() -> None:
    from penstock_kernels.noise import triton as noise
    from penstock_kernels.quant import FORMATS, get_format
    from penstock_kernels.quant import triton_dequantize as dequantize
    from penstock_kernels.quant import triton_matmul as matmul
    from penstock_kernels.quant import triton_quantize as quantize

    for kept in (*FORMATS.values(), *([get_format("nf4", 4096)] if ALL else [])):
        scale = "*fp32" if kept.scales == "float32" else "*u8"
        whole = "*fp32" if kept.scales == "e4m3" else None
        tensors = {"codes_ptr": "*u8", "scales_ptr": scale}
        rows, columns = dequantize.tile(4096, kept.group)
        tile = {"ROWS": rows, "COLUMNS": columns}
        of = {"FORMAT": kept.name, "GROUP": kept.group or 0}
        read = {**tensors, "global_ptr": whole}
        compiled(dequantize._dequantize, {**read, "y_ptr": "*bf16"}, {**of, **tile, "ROUND": False})
        if (kept.group or 0) <= matmul.MOST_GROUP:
            types = {**read, "x_ptr": "*bf16", "y_ptr": "*bf16"}
            for tile_of_w in matmul.TILES if ALL else matmul.TILES[:1]:
                rows, warps, stages = tile_of_w
                tile_of_x = {"X_ROWS": matmul.MOST_ROWS, "WEIGHT_ROWS": rows}
                tile_of_x |= {"COLUMNS": matmul.COLUMNS, "UPCAST": False}
                options = {"num_warps": warps, "num_stages": stages}
                compiled(matmul._multiply, types, {**of, **tile_of_x}, **options)
        if kept.name in ("nvfp4", "int8"):
            drawn = {"w_ptr": "*bf16", "spread_ptr": "*fp32", "runs_ptr": "*i64"}
            shape = {"GROUP": kept.group or 0, **tile, "RUNS": 256}
            compiled(noise._add, drawn, {**shape, "ROUND": False})
        made = {**tensors, "w_ptr": "*bf16"}
        if kept.name == "block_fp8":
            compiled(quantize._by_tiles, made, {"TILE": quantize.TILE}, num_warps=8)
        if kept.codes == "levels":
            compiled(quantize._by_groups, {**made, "largest_ptr": whole}, {**of, **tile})
        else:
            compiled(quantize._by_rows, made, {**of, **tile})


def compile_float8() -> None:
    from penstock_kernels.float8 import triton_multiply as multiply
    from penstock_kernels.float8 import triton_quantize as quantize

    tensors = {"x_ptr": "*bf16", "codes_ptr": "*u8", "scales_ptr": "*fp32"}
    for sharing, kind in ways(("tensor", "rows", "groups", "tiles"), ("e4m3", "e5m2")):
        rows, warps = (quantize.BLOCK, 8) if sharing == "tiles" else (quantize.ROWS, 4)
        of = {"SHARING": sharing, "GIVEN": False, "ROWS": rows, "BLOCK": quantize.BLOCK}
        # A launch compiles a stride of 1 as that.
        of |= {"HARDWARE": ARCH >= 89, "column_stride": 1}
        largest = {"largest_ptr": "*fp32" if sharing in ("tensor", "rows") else None}
        compiled(quantize._quantize, {**tensors, **largest}, {**of, "KIND": kind}, num_warps=warps)
    codes = {"x_ptr": "*u8", "y_ptr": "*u8"}
    compiled(quantize._transpose, codes, {"TILE": quantize.TRANSPOSED}, num_warps=8)
    scales = {"a_scales_ptr": "*fp32", "b_scales_ptr": "*fp32", "y_ptr": "*bf16"}
    tile = {"TILE_M": multiply.TILE, "TILE_N": multiply.TILE, "BAND": multiply.BAND}
    several = (("e4m3", "*fp8e4nv", 128), ("e5m2", "*fp8e5", 1))
    for kind, pointer, rows in several if ARCH >= 89 else ():
        codes = {"a_ptr": pointer, "b_ptr": "*fp8e4nv"}
        of = {"A_KIND": kind, "B_KIND": "e4m3", "A_ROWS": 1, "B_ROWS": rows}
        found = compiled(
            multiply._multiply,
            {**codes, **scales},
            {**of, **tile, "BLOCK": multiply.BLOCK, "UPCAST": False},
            num_warps=multiply.WARPS,
            num_stages=multiply.STAGES,
        )
        if ARCH != 90:
            continue
        # Codes go from memory to the tensor cores without passing through registers.
        loop = found.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
        assert "warp_group_dot" in loop
        assert "local_load" not in loop
        assert "async_copy_global_to_local" in loop


def compile_linear_attention() -> None:
    from penstock_kernels.linear_attention import triton
    from penstock_kernels.linear_attention import triton_backward as backward
    from penstock_kernels.linear_attention import triton_forward as forward

    documents = {"cu_seqlens_ptr": "*i32", "chunks_ptr": "*i32", "firsts_ptr": "*i32"}
    compiled(forward.plan, documents, {"BLOCK": triton.DOCUMENTS})
    # Gated DeltaNet, Kimi Delta Attention, and states of Mamba-2.
    kinds = (
        ("*bf16", False, True, 128),
        ("*bf16", True, True, 128),
        ("*bf16", False, False, 256),
        ("*fp32", False, True, 128),
        ("*fp32", True, True, 128),
    )
    for data, by_channel, has_rule, K in kinds if ALL else kinds[:1]:
        where = {"chunks_ptr": "*i32", "firsts_ptr": "*i32"}
        numbers = {"sums_ptr": "*fp32", "beta_ptr": data if has_rule else None}
        tensors = ("q_ptr", "k_ptr", "v_ptr", "dy_ptr", "y_ptr", "dv_ptr", "scores_ptr")
        states = ("states_ptr", "dstates_ptr", "deltas_ptr", "solution_ptr", "dq_ptr", "dk_ptr")
        floats = ("initial_ptr", "final_ptr", "dfinal_ptr", "dinitial_ptr")
        more = ("dbeta_ptr", "dlog_decay_ptr", "log_decay_ptr")
        named = {**dict.fromkeys((*tensors, *states), data), "scale": "fp32", **where, **numbers}
        named |= dict.fromkeys((*floats, *more), "*fp32")

        def types_of(kernel, named=named):
            return {name: kind for name, kind in named.items() if name in kernel.arg_names}

        def warps(number):
            return {"num_warps": number, "num_stages": 1}

        kind = {"CHANNELS": by_channel, "UPCAST": False}
        block = {"BLOCK": triton.SUMMED if by_channel else 1}
        compiled(forward.sum_decays, types_of(forward.sum_decays), block)
        scan, small = triton.tile_of_scan(K, 128), triton.tile(K, 128, 2 if data == "*bf16" else 4)
        products = {**kind, "BLOCK": small["BLOCK_K"], **warps(triton.PRODUCT_WARPS)}
        compiled(forward.make_products, types_of(forward.make_products), **_parted(products))
        for solved in (False, True):
            of_scan = {**kind, "SOLVED": solved, **scan}
            compiled(forward.scan_states, types_of(forward.scan_states), **_parted(of_scan))
        compiled(forward.read_states, types_of(forward.read_states), **_parted({**kind, **small}))
        back = backward.scan_gradients, backward.make_gradients
        compiled(back[0], types_of(back[0]), **_parted({**kind, **scan}))
        compiled(
            back[1],
            types_of(back[1]),
            **_parted({**kind, **small, **warps(triton.GRADIENT_WARPS)}),
        )


def compile_causal_conv1d() -> None:
    from penstock_kernels.causal_conv1d import triton as conv

    for data, more in ways(DATA, (True, False)):
        named = dict.fromkeys(("x_ptr", "y_ptr", "dy_ptr", "dx_ptr", "weight_ptr"), data)
        named |= dict.fromkeys(("bias_ptr", "initial_ptr", "dfinal_ptr"), data if more else None)
        named |= {"states_ptr": data, "dweight_ptr": "*fp32", "cu_seqlens_ptr": "*i32"}
        named["dbias_ptr"] = "*fp32" if more else None
        kind = {"SILU": more, "WIDTH": 4}
        for kernel, constants in (
            (conv._forward, {**kind, **conv.TILE}),
            (conv._backward, {**kind, **conv.TILE}),
            (conv._states, {**kind, "BACKWARD": more, "BLOCK": conv.TILE["BLOCK"]}),
        ):
            types = {name: kind for name, kind in named.items() if name in kernel.arg_names}
            compiled(kernel, types, **_parted(constants))


def compile_gated_rms_norm() -> None:
    from penstock_kernels.gated_rms_norm import triton as norm
    from penstock_kernels.rms_norm.triton import tile

    for data, (width, first) in ways(DATA, ((128, True), (4096, False))):
        named = dict.fromkeys(("x_ptr", "gate_ptr", "y_ptr", "dy_ptr", "dx_ptr"), data)
        named |= {"dgate_ptr": data, "weight_ptr": data, "dweight_ptr": "*fp32"}
        named |= {"scale_ptr": "*fp32", "eps": "fp32"}
        kind = {"NORM_FIRST": first, "SILU": first, **tile(width)}
        for kernel in (norm._forward, norm._backward):
            types = {name: kind for name, kind in named.items() if name in kernel.arg_names}
            compiled(kernel, types, **_parted(dict(kind)))


def compile_optimizers() -> None:
    from penstock_kernels.adamw import triton as adamw
    from penstock_kernels.newton_schulz import triton as newton_schulz
    from penstock_kernels.stochastic_rounding import triton as rounding

    rows, across = rounding.tile(4096)
    blocks = {"ROWS": rows, "ACROSS": across}
    rounded = {"x_ptr": "*fp32", "y_ptr": "*bf16", "runs_ptr": "*i64"}
    compiled(rounding._round, rounded, {**blocks, "RUNS": 4, "SHIFT": 0})
    numbers = dict.fromkeys(
        ("forgets1", "beta2", "forgets2", "eps", "decay", "size", "root"), "fp32"
    )
    several = (
        ("*bf16", "*bf16", "*bf16", 4),
        ("*fp32", "*fp32", None, 0),
        ("*bf16", "*bf16", None, 4),
        ("*bf16", "*fp32", None, 4),
    )
    for data, states, lost, runs in several if ALL else several[:2]:
        tensors = {"weight_ptr": data, "gradient_ptr": data, "lost_ptr": lost}
        tensors |= {"first_ptr": states, "second_ptr": states}
        tensors["runs_ptr"] = "*i64" if runs else None
        compiled(adamw._step, {**tensors, **numbers}, {**blocks, "RUNS": runs, "SHIFT": 0})
    least, tile, depth = newton_schulz.LEAST, newton_schulz.TILE, newton_schulz.DEPTH
    of_symmetric = {"x_ptr": "*bf16", "add_ptr": "*bf16", "y_ptr": "*bf16"}
    of_symmetric |= {"times": "fp32", "plus": "fp32"}
    alone = {**of_symmetric, "add_ptr": None}
    small = {"ROWS": least, "DEPTH": least, "UPCAST": False}
    compiled(newton_schulz._symmetric, alone, small, num_warps=4, num_stages=3)
    sizes = {"ROWS": tile, "DEPTH": depth, "UPCAST": False}
    for types in (of_symmetric, alone) if ALL else (of_symmetric,):
        found = compiled(newton_schulz._symmetric, types, sizes, num_warps=8, num_stages=3)
        assert ARCH != 90 or "warp_group_dot" in found.asm["ttgir"]
    others = newton_schulz.others(2, SHARED_MEMORY[ARCH])
    for rows, depth, warps, stages in others if ALL else ():
        sizes = {"ROWS": rows, "DEPTH": depth, "UPCAST": False}
        options = {"num_warps": warps, "num_stages": stages}
        found = compiled(newton_schulz._symmetric, of_symmetric, sizes, **options)
        if ARCH == 90:
            assert "warp_group_dot" in found.asm["ttgir"], "others may add in another order"
