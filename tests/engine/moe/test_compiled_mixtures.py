"""A mixture of experts is one program with its layer, with all that is drawn and told in it."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from penstock.adapters.inject import LoraSpec, inject
from penstock.engine.backends.compile import compile_layers
from penstock.engine.distributed.param_shards import full_shard
from penstock.engine.moe.routers import LocalRows, RouterStatsCollector
from penstock.engine.quantization.noise import QuantNoise
from penstock.losses.load_balancing import aux_loss_grad
from penstock.models.decoder import Decoder
from penstock.models.decoder_config import ExpertsConfig
from penstock.models.layers.dropout import DropoutRates, DropoutRNG, dropout_rng
from penstock.models.layers.quantized_linear import QuantizedMatrix, keep_quantized
from penstock.models.layers.router_observer import observe_routers
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.quant import get_format, quantize
from tests.engine.holdings import CONFIG
from tests.turns import one_day_in

SHAPE = replace(
    CONFIG,
    hidden_size=16,
    intermediate_size=16,
    experts=ExpertsConfig(
        layers=(0, 1),
        num_experts=3,
        experts_per_token=2,
        intermediate_size=16,
        shared_intermediate_size=16,
        shared_gate=True,
        selection_bias=(1, 3),
    ),
)
QUANTIZED = ("self_attn.q_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
STEPS = ([5, 3], [11], [2, 2, 9, 1])
"""Lengths of documents."""


def everything() -> Decoder:
    """Two layers in which matrices are quantized and bear noise, and adapters learn, which drop;
    so does the residual stream, at other rates in each layer and step."""
    torch.manual_seed(0)
    model = Decoder(SHAPE, dropout=DropoutRates(0.6, warmup_steps=2, depth="rising"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    nvfp4 = get_format("nvfp4")
    for name in [f"model.layers.{layer}.{part}" for layer in (0, 1) for part in QUANTIZED]:
        weight = model.get_parameter(name).detach()
        keep_quantized(model, name, nvfp4)
        matrix = model.get_submodule(name)
        assert isinstance(matrix, QuantizedMatrix)
        for leaf, raw in quantize(weight, nvfp4).as_bytes().items():
            matrix.get_parameter(leaf).data = raw
        shape = (weight.numel() // weight.shape[-1], weight.shape[-1])
        matrix.transform = QuantNoise(1.0, [full_shard(name, shape)], 0)
    targets = ("q_proj", "o_proj")
    inject(model, LoraSpec(rank=3, alpha=6.0, dropout=0.3, targets=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    # Below a layer where nothing learns no gradient is wanted, and that is another program.
    assert model.model.embed_tokens is not None
    model.model.embed_tokens.requires_grad_(True)
    return model


def steps(model):
    """Of each step: logits, gradients, and what routers saw."""
    found = []
    for number, lengths in enumerate(STEPS):
        tokens = sum(lengths)
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, SHAPE.vocab_size, (tokens,), generator=generator)
        positions = torch.cat([torch.arange(length) for length in lengths])
        whole = torch.tensor([tokens])
        rows = LocalRows(torch.ones(tokens, dtype=torch.int64), whole)
        watch = RouterStatsCollector(
            rows, lambda _, counts, whole=whole: aux_loss_grad(counts, whole), 0.5, 0.1
        )
        with dropout_rng(DropoutRNG(7, number, 100 + torch.arange(tokens))), observe_routers(watch):
            logits = model(ids, positions, VarlenMetadata.of(lengths))
        logits.square().mean().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((logits.detach(), gradients, [*watch.statistics.values()]))
        model.zero_grad(set_to_none=True)
    return found


# Of torch, of hidden states between layers that are compiled one by one.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@one_day_in(3, of=2)
def test_what_is_drawn_told_and_routed_at_each_step_needs_no_other_program(monkeypatch):
    from torch._dynamo.utils import counters

    want = steps(everything())
    # The same programs, but nobody turns them into code, which takes most of the time.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()
    model = everything()
    compile_layers(model, torch.device("cpu"))
    got = steps(model)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"], "the graph of a layer is whole"
    for mine, plain in zip(got, want, strict=True):
        torch.testing.assert_close(mine, plain, atol=2e-6, rtol=2e-4)
    assert all(len(noted) == 2 for _, _, noted in got), "each router is heard"
