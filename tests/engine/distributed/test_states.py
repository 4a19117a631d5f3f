"""Layers with recurrent states whose tokens lie on several ranks, judged by one rank with all."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.engine.distributed.context_parallel import ContextParallel
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.parallel_dims import ParallelDims
from penstock.models.decoder import Decoder, PipelineStageModules
from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.block import Block
from penstock.models.layers.recurrent.gated_delta_net import GatedDeltaNet
from penstock.models.layers.recurrent.short_conv import ShortConv
from penstock.models.linear_config import GatedDeltaConfig
from penstock.models.short_conv_config import ShortConvConfig
from penstock.rows.collate import MicroBatch
from penstock_kernels.attention import VarlenMetadata
from tests.dense import relative_error
from tests.ranks import on_ranks

WIDTH, TOKENS = 16, 384
ROWS = {
    "one document": [TOKENS],
    "around a chunk, and longer than one": [1, 63, 64, 65, 130, 61],
    "many short": [1, 2, 3, 5, 21] * 12,
}
SIZES: dict[str, Any] = {"key_dim": 8, "value_dim": 4}
CASES = {
    "shared out": (GatedDeltaConfig(4, 8, **SIZES), "around a chunk, and longer than one"),
    "keys repeated": (GatedDeltaConfig(1, 4, doubles_rates=True, **SIZES), "one document"),
    "three": (GatedDeltaConfig(3, 3, **SIZES), "many short"),
    "one key": (GatedDeltaConfig(1, 2, **SIZES), "around a chunk, and longer than one"),
    "convolution": (ShortConvConfig(10, bias=True), "many short"),
}
"""Layers whose heads are shared out evenly or not, and the documents that they see."""
LAYOUTS = {
    2: [ParallelDims(ring=2), ParallelDims(ulysses=2)],
    4: [ParallelDims(ring=4), ParallelDims(ulysses=4), ParallelDims(ring=2, ulysses=2)],
    6: [ParallelDims(ring=2, ulysses=3), ParallelDims(ring=3, ulysses=2)],
}


def model_of(layer):
    """A decoder of one such layer, in fp64."""
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        linear=layer,
        linear_layers=(0,),
    )
    model = Decoder(config, part=PipelineStageModules([0], has_embedding=False, has_head=False))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.double().parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def computed(model, x_TD, dy_TD, segments):
    """The output and the gradient of the input, and those of the weights."""
    [block] = model.blocks
    assert isinstance(block, Block)
    mixer, x_TD = block.token_mixer, x_TD.clone().requires_grad_()
    assert isinstance(mixer, GatedDeltaNet | ShortConv)
    y_TD = mixer(x_TD, x_TD, x_TD, segments)
    dx_TD, *dweights = torch.autograd.grad(y_TD, (x_TD, *mixer.parameters()), dy_TD)
    return [y_TD.detach(), dx_TD], dweights


def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def several_layouts(layouts):
    """Of each layout and case what this rank computes, and its tokens."""
    found = {}
    tokens_T = torch.arange(TOKENS)
    for degrees in layouts:
        context = ContextParallel(Mesh(degrees, dist.get_rank(), "cpu"))
        for name, (layer, row) in CASES.items():
            model = model_of(layer)
            context.parallelize([model])
            batch = MicroBatch(tokens_T, tokens_T, tokens_T, tuple(ROWS[row]), 0, 0, ())
            segments = context.varlen_metadata(batch, "cpu")
            mine_S = context.shard_tensor(tokens_T)
            x_SD, dy_SD = inputs()[:, mine_S]
            parts = computed(model, x_SD, dy_SD, segments)
            arrays = [[part.numpy() for part in some] for some in parts]
            found[degrees, name] = mine_S.tolist(), *arrays
    return found


@pytest.mark.dist
@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6))])
def test_ranks_that_share_the_tokens_of_states_compute_what_one_computes(world):
    ranks, (x_TD, dy_TD) = on_ranks(world, several_layouts, LAYOUTS[world]), inputs()
    for degrees, name in ranks[0]:
        found = [results[degrees, name] for results in ranks]
        order = [token for mine, *_ in found for token in mine]
        assert sorted(order) == list(range(TOKENS)), "each token lies on one rank"
        layer, row = CASES[name]
        whole_row = VarlenMetadata.of(ROWS[row])
        wanted, dweights = computed(model_of(layer), x_TD, dy_TD, whole_row)
        for part, whole in enumerate(wanted):
            got = torch.cat([torch.from_numpy(of_tokens[part]) for _, of_tokens, _ in found])
            assert relative_error(got, whole[order]) < 1e-12, (degrees, name, part)
        for number, whole in enumerate(dweights):
            got = sum(torch.from_numpy(of_weights[number]) for *_, of_weights in found)
            assert relative_error(got, whole) < 1e-11, (degrees, name, number)


@pytest.mark.parametrize(
    ("tensor", "context", "wanted"),
    [(1, 1, (16, 32)), (2, 4, (2, 4)), (1, 32, (1, 1)), (8, 8, (1, 1)), (1, 3, (11, 11))],
)
def test_heads_are_shared_out_whole(tensor, context, wanted):
    sizes = GatedDeltaConfig(16, 32, key_dim=128, value_dim=128)
    assert sizes.heads_of_rank(tensor, context) == wanted
