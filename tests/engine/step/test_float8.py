"""Layers that are computed in float8: which, how, and the same whatever the layout is."""

from collections import Counter
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.core.errors import CapabilityError, ConfigError
from penstock.core.machine.gpus import Gpus
from penstock.engine.hf.config import read_hf_config
from penstock.engine.precision.fp8_convert import largest_over
from penstock.engine.precision.fp8_layers import float8_layers
from penstock.models.registry import get_family
from penstock.pipeline.plan import check_machine
from penstock_kernels.float8 import AmaxReduceGroups, Float8Recipe, linear
from tests.engine import runs
from tests.engine.inputs import write_model, write_rows
from tests.engine.laid import laid
from tests.engine.loops import each, loop_of, step
from tests.engine.traces import errors, exported, trace_here
from tests.models.twins import hf_model
from tests.ranks import on_ranks
from tests.turns import one_day_in, over_days

pytestmark = pytest.mark.dist

KIND = "broad"
"""Whose sizes are multiples of 16 on two ranks too."""
SHARED = "shared"
"""A model with shared experts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float8")
    write_rows(folder / "packed", 24)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "num_hidden_layers": 2, "moe_intermediate_size": 32}
    hf_model("glm4_moe", tied=False, **sizes, vocab_size=runs.VOCAB).save_pretrained(
        folder / SHARED
    )
    return folder


def layout(name, /, recipe="tensorwise", **settings: Any):
    fp8 = {"recipe": recipe, **settings.pop("fp8", {})}
    return laid(name, **{"kind": KIND, "enable_fp8_training": True, "fp8": fp8, **settings})


def job(folder, of, **train):
    return of.job(folder, of.name, data={"pad_to_multiple_of": 16}, **train)


# Scales of what several ranks hold.


def parts_agree(recipe):
    """Which share of a layer's numbers is another where ranks hold parts of its matrices; and where
    they do not agree."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (
        torch.randn(shape, generator=generator) for shape in ((32, 64), (48, 64), (32, 48))
    )
    # What the first rank holds is large and counts for nothing, but for the scale: what the second
    # holds is rounded to fewer bits than if it were alone.
    large = 2.0**14
    x[:16] *= large
    x[:, :32] *= large
    dy[:, :24] *= large
    dy[:16], weight[:24], weight[:, :32] = 0, 0, 0
    scheme = Float8Recipe(recipe, "e4m3")

    def gradients(given, agreement):
        x, weight = (tensor.clone().requires_grad_() for tensor in given[:2])
        y = linear(x, weight, scheme, agreement)
        return [y.detach(), *torch.autograd.grad(y, (x, weight), given[2])]

    whole = gradients([x, weight, dy], AmaxReduceGroups())
    agree = partial(largest_over, group)
    # The dim of x, of the weight and of dy; which of y, dx and dweight are sums over ranks.
    cuts: dict[str, tuple[Any, ...]] = {
        "tokens": (0, None, 0, (False, False, True)),
        "inputs": (1, 1, None, (True, False, False)),
        "outputs": (None, 0, 1, (False, True, False)),
    }
    dims = {"tokens": (0, 0, None), "inputs": (None, 1, 1), "outputs": (1, None, 0)}
    found = {}
    for name, (of_x, of_weight, of_dy, sums) in cuts.items():
        given = [
            tensor if dim is None else tensor.chunk(2, dim)[rank]
            for tensor, dim in ((x, of_x), (weight, of_weight), (dy, of_dy))
        ]
        for told in (AmaxReduceGroups(**{name: agree}), AmaxReduceGroups()):
            worst = 0.0
            for got, want, is_sum, dim in zip(
                gradients(given, told), whole, sums, dims[name], strict=True
            ):
                if is_sum:
                    dist.all_reduce(got)
                mine = want if dim is None else want.chunk(2, dim)[rank]
                other = (got - mine).abs() > 1e-3 * mine.abs()
                worst = max(worst, other.float().mean().item())
            found[name, bool(told.tokens or told.inputs or told.outputs)] = worst
    return found


@pytest.mark.slow
def test_ranks_that_hold_parts_of_a_matrix_round_as_if_they_held_the_whole():
    recipes = {recipe: recipe for recipe in ("tensorwise", "rowwise")}
    for found in on_ranks(2, each, parts_agree, recipes):
        for recipe, shares in found.items():
            for (cut, agreed), share in shares.items():
                # What is almost zero in sum may be another by the order of terms.
                assert share < 2e-3 if agreed else share > 0.02, (recipe, cut, agreed, share)


# A step.

PRODUCTS = import_module("penstock_kernels.float8.matmuls")


def a_step(job):
    loop = loop_of(job)
    step(loop)


def watched(job, work=a_step):
    """What is rounded in some work, in order: kinds, what shares scales, the first scale; blocks of
    features that are turned; and what comes of the work."""
    rounded, blocks = [], set()
    quantize, turn = PRODUCTS.quantize, PRODUCTS.turn

    def seen(x, kind, sharing, scales=None):
        made = quantize(x, kind, sharing, scales)
        rounded.append((kind, sharing, made.scales.flatten().tolist()[0]))
        return made

    def transpose(x, block, factor):
        blocks.add(block)
        return turn(x, block, factor)

    with patch.object(PRODUCTS, "quantize", seen), patch.object(PRODUCTS, "turn", transpose):
        return rounded, blocks, work(job)


FIELDS = {
    "recipe": ({"recipe": "tensorwise"}, {("e4m3", "tensor"): 3, ("e5m2", "tensor"): 1}),
    "blocks": (
        {"recipe": "blockwise"},
        {("e4m3", "groups"): 4, ("e4m3", "tiles"): 2},
    ),
    "unset": ({}, {("e4m3", "rows"): 6}),
    "format": ({"format": "hybrid"}, {("e4m3", "rows"): 4, ("e5m2", "rows"): 2}),
    "inputs": ({"quantize_input_grad": False}, {("e4m3", "rows"): 5}),
    "weights": ({"quantize_weight_grad": False}, {("e4m3", "rows"): 4}),
    "turned": ({"hadamard": True}, {("e4m3", "rows"): 6}),
    "less": (
        {"hadamard": True, "hadamard_block_size": 16},
        {("e4m3", "rows"): 6},
    ),
    "excluded": ({"exclude_modules": ["mlp"]}, {("e4m3", "rows"): 6}),
}
"""What is rounded for one layer and micro-batch."""
LAYERS, OF_ATTENTION = 20, 8


@pytest.mark.slow
def test_every_field_of_fp8_decides_what_is_rounded(folder):
    plain: dict[str, Any] = {"data_parallel_mode": "none", "enable_gradient_checkpointing": False}
    plain["global_batch_size"] = 1
    jobs = {
        name: job(folder, layout(name, fp8={"recipe": "rowwise", **fp8}, **plain))
        for name, (fp8, _) in FIELDS.items()
    }
    jobs["off"] = job(folder, laid("off", kind=KIND, **plain))
    [found] = on_ranks(1, each, watched, jobs)
    for name, (_, counts) in FIELDS.items():
        rounded, blocks, _ = found[name]
        layers = OF_ATTENTION if name == "excluded" else LAYERS
        want = {kind: count * layers for kind, count in counts.items()}
        assert Counter(each_[:2] for each_ in rounded) == want, name
        assert blocks == {"turned": {32}, "less": {16}}.get(name, set()), name
    assert found["off"] == ([], set(), None)


# Layouts.

# Numbers that fall on the other side of a tie make what follows another by a rounding; a scale of
# less than all changes every number that is small for it.
LIMIT = 1e-4
COARSE = 2.0**-4
"""What one value of 3 bits may be off when it is rounded on another grid."""
ALONE: dict[str, Any] = {"data_parallel_mode": "none"}
LAYOUTS = {
    "tp 2": {"tp": 2, "sequence_parallel": True},
    "ring 2": {"ring": 2},
    "ulysses 2": {"ulysses": 2, "recipe": "rowwise"},
    "tp 2, turned": {"tp": 2, "recipe": "rowwise", "fp8": {"hadamard": True}},
    "pp 2": {"pp": 2, "recipe": "blockwise"},
    "shared experts, tp 2": {"tp": 2, "kind": SHARED},
    "shard 2": {"shard": 2, "recipe": "blockwise"},
}


def alone(settings):
    """The same in one process."""
    more = {key: settings[key] for key in ("recipe", "fp8", "kind") if key in settings}
    return layout(f"alone {more}", **more, **ALONE)


def far_in_all(got, want):
    """The size of all differences as a share of the size of all."""
    assert got.keys() == want.keys()
    differences = sum(float(np.square(got[name] - array).sum()) for name, array in want.items())
    return (differences / sum(float(np.square(array).sum()) for array in want.values())) ** 0.5


def traced_and_watched(job):
    """A trace, and the scales of whole tensors."""
    rounded, _, trace = watched(job, trace_here)
    return trace, [scale for _, sharing, scale in rounded if sharing == "tensor"]


@pytest.mark.parametrize("name", over_days(LAYOUTS, 7))
def test_a_layout_rounds_as_one_process_does(name, folder):
    settings = LAYOUTS[name]
    # In small steps: differences would grow with large ones.
    [(one, its_scales)] = on_ranks(1, traced_and_watched, job(folder, alone(settings), lr=1e-3))
    ours = job(folder, layout(name, **settings), lr=1e-3)
    trace, scales = on_ranks(2, traced_and_watched, ours, timeout=200)[0]
    # A sum in another order may carry a largest value over a power of two: the scale doubles,
    # and its tensor rounds on another grid. No other difference is allowed.
    others = sum(a != b for a, b in zip(scales, its_scales, strict=True))
    assert others <= 0.01 * len(scales)
    assert trace.losses == pytest.approx(one.losses, rel=5e-4 if others else 1e-4)
    assert far_in_all(trace.gradients[0], one.gradients[0]) < (COARSE if others else LIMIT)
    assert bool(scales) is (settings.get("recipe", "tensorwise") == "tensorwise")


# Weights that travel in 8 bits.


class Gathered(TorchDispatchMode):
    """How many bytes of weights were gathered."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if "allgather" in str(function) and isinstance(arguments[0], torch.Tensor):
            self.bytes += arguments[0].nbytes
        return function(*arguments, **(options or {}))


def gathering(job):
    """A trace, and the bytes of it."""
    with Gathered() as gathered:
        trace = trace_here(job)
    return trace, gathered.bytes


EIGHT: dict[str, Any] = {"enable_fp8_all_gather": True}
GATHERED = {
    "tensorwise": {"shard": 2, "enable_mixed_precision": True},
    "blockwise": {"shard": 2, "recipe": "blockwise", "fp8": {"hadamard": True}},
    "rowwise": {"shard": 2, "recipe": "rowwise", "fp8": {"quantize_input_grad": False}},
    "adapters": {"shard": 2, "lora": True, "enable_gradient_checkpointing": False},
    "away": {
        "shard": 2,
        "precision": "bf16",
        "enable_gradient_checkpointing": False,
        "enable_activation_offload": True,
    },
    "units": {"shard": 2, "zero_stage": 1, "model": {"basic_modules": ["mlp"]}},
}


@pytest.mark.parametrize("name", over_days(GATHERED, 6))
def test_weights_that_are_gathered_in_8_bits_change_nothing_but_the_traffic(name, folder):
    settings = GATHERED[name]
    plain = job(folder, layout(name, **settings))
    eight = job(folder, layout(f"{name}, 8", **settings, **EIGHT))
    found = on_ranks(2, each, gathering, {"plain": plain, "8": eight}, timeout=200)[0]
    (one, many), (other, few) = found.values()
    assert one.losses == other.losses
    for mine, theirs in zip(one.gradients, other.gradients, strict=True):
        assert all(np.array_equal(mine[key], theirs[key]) for key in theirs)
    assert few < 0.75 * many
    assert exported(plain) == exported(eight)


@pytest.mark.slow
def test_adapters_learn_beside_a_base_in_float8_and_what_starts_is_the_plain_model(folder):
    settings = {"lora": True, **ALONE}
    jobs = {
        "float8": job(folder, layout("float8 adapters", **settings)),
        "plain": job(folder, laid("plain adapters", kind=KIND, **settings)),
    }
    [found] = on_ranks(1, each, trace_here, jobs)
    far = errors(found["float8"], found["plain"])
    assert 1e-5 < far.loss < 0.02
    assert 1e-5 < far.norm < 0.1
    assert exported(jobs["float8"]) == exported(jobs["plain"])


STEPS = 18


def losses_of(job):
    loop = loop_of(job)
    return [step(loop)["loss"] for _ in range(STEPS)]


@one_day_in(2, of=0)
def test_a_model_learns_in_float8_as_it_does_in_bfloat16(folder):
    train = {"enable_mixed_precision": True, "optimizer": "adamw", "lr": 5e-3, "max_steps": STEPS}
    train |= {"micro_batch_size": 4, "enable_gradient_checkpointing": False}
    jobs = {
        "bfloat16": job(folder, laid("bfloat16", kind=KIND, **ALONE), **train),
        "tensorwise": job(folder, layout("learns by tensors", **ALONE), **train),
        "blockwise": job(folder, layout("learns by blocks", "blockwise", **ALONE), **train),
    }
    [found] = on_ranks(1, each, losses_of, jobs)
    want = found["bfloat16"]
    assert want[-1] < 0.92 * want[0]
    for name in ("tensorwise", "blockwise"):
        far = [abs(one - other) / other for one, other in zip(found[name], want, strict=True)]
        assert 0 < max(far) < 0.02, name


# What cannot be.


def layers_of(folder, kind=KIND, model=None, **settings):
    run = layout("asked", **{"data_parallel_mode": "none", **settings})
    config = job(folder, run, model=model or {}).config
    write_model(folder, kind)
    hf = read_hf_config(str(folder / kind), config.model.foundation)
    family = get_family(hf)
    names = family.weight_map(family.read(hf), merge_qkv=config.model.merge_qkv)
    return float8_layers(config.train, names, family.roles)


def test_layers_are_those_of_blocks_whose_sizes_serve_and_the_choice_is_told(folder):
    dense = layers_of(folder)
    assert len(dense.chosen) == LAYERS
    fp8 = layout("told").more["fp8"]
    transpose = layers_of(folder, "tied", fp8={"hadamard": True})
    assert transpose.uneven == {f"model.layers.{n}.mlp.down_proj": (32, 48) for n in range(4)}
    sparse = layers_of(folder, "experts")
    assert len(sparse.chosen) == 2 * 4 + 3, "the second layer alone has no experts"
    assert not any("experts" in name or name.endswith(".gate") for name in sparse.chosen)
    config = job(folder, layout("line", fp8={**fp8, "hadamard": True}, **ALONE)).config
    line = transpose.description(config.train.fp8)
    assert "experts" not in line
    assert "; the 8 experts of each layer are not" in sparse.description(config.train.fp8)
    assert "16 linear layers in float8 (tensorwise, gradients e5m2, turned)" in line
    assert (
        "4 not, whose sizes are no multiples of 32 (model.layers.0.mlp.down_proj is 32 x 48)"
        in line
    )


def test_what_cannot_be_computed_in_float8_is_refused_before_any_work(folder, monkeypatch):
    with pytest.raises(ConfigError, match=r"'self_atn' names no module.*self_attn"):
        layers_of(folder, fp8={"exclude_modules": ["self_atn"]})
    with pytest.raises(CapabilityError, match="merge_qkv: false, or leave all three out"):
        layers_of(folder, fp8={"exclude_modules": ["q_proj"]})
    with pytest.raises(CapabilityError, match=r"no linear layer has rows.*leaves out the rest"):
        layers_of(folder, fp8={"exclude_modules": ["layers"]})
    with pytest.raises(CapabilityError, match=r"leaves 24 of 48 features of model\.layers\.0\.mlp"):
        layers_of(folder, "tied", tp=2)
    with pytest.raises(CapabilityError, match="multiples of 128"):
        layers_of(folder, recipe="blockwise", tp=2)
    config = job(folder, layout("old", **ALONE)).config
    check_machine(config)
    monkeypatch.setattr("penstock.estimate.machine.detect_gpus", lambda: Gpus(1, (8, 0)))
    with pytest.raises(CapabilityError, match=r"compute capability is 8\.0, and 8\.9"):
        check_machine(config)
