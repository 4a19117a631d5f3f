"""Adapters of experts, judged by the same model whose weights are what the factors make of them."""

import copy
import math
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.func import functional_call

from penstock.adapters.inject import LoraSpec, inject
from penstock.adapters.names import native_name, parse_lora_name
from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.moe.deepep import Buffer, DeepEP
from penstock.models.layers.dropout import DropoutRNG, RowDropout, dropout_rng, rows_rng
from penstock.models.layers.experts import Implementation, select_expert_ops
from penstock.models.layers.moe import MoE
from tests.models.twins import (
    assert_gradients_equal,
    documents,
    gradients,
    packed_logits,
    packed_loss,
    twins,
)

ALPHA, RATE = 6.0, 0.3
OF_EXPERTS = ["experts.*.gate_proj", "experts.*.up_proj", "experts.*.down_proj"]
EACH = {"A": {"gate_proj", "up_proj", "down_proj"}, "B": {"gate_proj", "up_proj", "down_proj"}}
OWN = {
    "each": EACH,
    "shared": {"A": set(), "B": set()},
    "hybrid": {"A": {"down_proj"}, "B": {"gate_proj", "up_proj"}},
}
"""The matrices of which each expert has a factor of its own."""


def adapted(family, form, rank=4, *, implementation: Implementation = "eager", dropout=0.0):
    """A model, the same with adapters that change what it computes, and these."""
    pair = twins(family, experts=select_expert_ops(implementation))
    base = copy.deepcopy(pair.ours).requires_grad_(False)
    targets = OF_EXPERTS if pair.ours.config.gated else OF_EXPERTS[1:]
    inject(pair.ours, LoraSpec(rank, ALPHA, targets, 11, dropout, experts=form))
    factors = {n: p for n, p in pair.ours.named_parameters() if parse_lora_name(n)}
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, factor in factors.items():
            if ".lora_B." in name:
                factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))
    return base, pair.ours, factors


class WithFactors(nn.Module):
    """The base model with every product added to its weight, expert by expert."""

    def __init__(self, base, factors, scale):
        super().__init__()
        self.base, self.factors, self.scale = base, factors, scale

    def product(self, mixture, matrix, expert):
        pair = []
        for side in ("lora_A", "lora_B"):
            own = self.factors.get(f"{mixture}.experts.adapter.{side}.{matrix}")
            shared = self.factors.get(f"{mixture}.adapter.{side}.{matrix}")
            assert (own is None) != (shared is None)
            pair.append(shared if own is None else own[expert])
        return self.scale * pair[1] @ pair[0]

    def forward(self, *args):
        weights: dict[str, torch.Tensor] = dict(self.base.named_parameters())
        in_one = {"gate_up_proj": ["gate_proj", "up_proj"]}
        in_one |= {matrix: [matrix] for matrix in ("up_proj", "down_proj")}
        for name, weight in self.base.named_parameters():
            mixture, _, tensor = name.rpartition(".experts.")
            if mixture:
                weights[name] = torch.stack(
                    [
                        matrix + torch.cat([self.product(mixture, p, e) for p in in_one[tensor]])
                        for e, matrix in enumerate(weight)
                    ]
                )
        return functional_call(self.base, weights, args)


@pytest.mark.parametrize(
    ("form", "rank", "implementation", "family"),
    [
        ("each", 4, "eager", "qwen3_moe"),
        ("each", 4, "native", "qwen3_moe"),
        ("shared", 4, "native", "qwen3_moe"),
        ("hybrid", 4, "eager", "qwen3_moe"),
        ("hybrid", 3, "native", "qwen3_moe"),  # which takes no rows as short as these
        ("hybrid", 4, "native", "nemotron_h-experts"),
    ],
)
def test_logits_and_gradients_are_those_of_weights_with_the_products(
    form, rank, implementation, family
):
    base, ours, factors = adapted(family, form, rank, implementation=implementation)
    ids, labels = documents()
    wanted = {name: factor.detach().clone().requires_grad_() for name, factor in factors.items()}
    theirs = WithFactors(base, wanted, ALPHA / rank)
    with torch.no_grad():
        logits = packed_logits(ours, ids)
        torch.testing.assert_close(logits, packed_logits(theirs, ids), atol=2e-5, rtol=1e-5)
        assert (logits - packed_logits(base, ids)).abs().max() > 0.05
    packed_loss(ours, ids, labels).backward()
    packed_loss(theirs, ids, labels).backward()
    assert_gradients_equal(gradients(ours), {name: factor.grad for name, factor in wanted.items()})


@pytest.mark.parametrize("form", OWN)
def test_experts_have_in_common_what_the_form_says(form):
    _, ours, factors = adapted("qwen3_moe", form)
    sizes = {"gate_proj": (24, 48), "up_proj": (24, 48), "down_proj": (48, 24)}
    expected = {}
    for layer in (0, 2):
        for matrix, (outputs, inputs) in sizes.items():
            for side, shape in (("A", (4, inputs)), ("B", (outputs, 4))):
                own = matrix in OWN[form][side]
                at = f"model.layers.{layer}.mlp{'.experts' if own else ''}.adapter"
                expected[f"{at}.lora_{side}.{matrix}"] = (8, *shape) if own else shape
    assert {name: tuple(factor.shape) for name, factor in factors.items()} == expected
    assert {name for name, p in ours.named_parameters() if p.requires_grad} == set(expected)
    # What a checkpoint calls them does not depend on the form.
    stored = [found for name in factors if (found := parse_lora_name(name))]
    assert {native_name(found.hf_module, found.side) for found in stored} == {
        f"model.layers.{layer}.mlp.experts.lora_{side}.{matrix}"
        for layer in (0, 2)
        for matrix in sizes
        for side in "AB"
    }


def test_training_starts_at_the_base_model_and_no_two_experts_start_alike():
    pair = twins("mixtral")
    ids, _ = documents()
    logits = packed_logits(pair.ours, ids)
    inject(pair.ours, LoraSpec(4, ALPHA, seed=11))
    assert torch.equal(packed_logits(pair.ours, ids), logits)
    starts = pair.ours.state_dict()["model.layers.1.mlp.experts.adapter.lora_A.down_proj"]
    assert len({tuple(start.flatten().tolist()) for start in starts}) == 5
    # Kaiming's bound for a = sqrt 5, of each expert's own matrix.
    assert 0.8 / math.sqrt(32) < starts.abs().max() <= 1 / math.sqrt(32)


class OfRow(nn.Module):
    """Our dropout for PEFT's layers of experts, which get the row of one choice at a time."""

    def __init__(self, site, part):
        super().__init__()
        self.dropout, self.part = RowDropout(RATE, site), part

    def forward(self, x):
        return self.dropout.drop_rows(x, self.part)


class Loop(nn.Module):
    """The experts of a layer as linear layers with PEFT's adapters, called row by row; a
    `TokenDispatcher`."""

    def __init__(self, site, base, factors):
        super().__init__()
        rows = {"gate_proj": base.gate_up_proj[:, : base.inner], "down_proj": base.down_proj}
        rows["up_proj"] = base.gate_up_proj[:, base.inner :]
        plain = nn.ModuleDict()
        for expert in range(base.num_experts):
            for matrix, weights in rows.items():
                layer = nn.Linear(*weights.shape[:0:-1], bias=False)
                layer.weight = nn.Parameter(weights[expert].clone())
                plain[f"{matrix}_{expert}"] = layer
        config = LoraConfig(r=4, lora_alpha=int(ALPHA), lora_dropout=RATE, target_modules=[*plain])
        self.layers: Any = cast(Any, get_peft_model(cast(Any, plain), config)).base_model.model
        for name, layer in self.layers.items():
            matrix, _, expert = name.rpartition("_")
            layer.lora_dropout["default"] = OfRow(site, matrix)
            for side in ("lora_A", "lora_B"):
                factor = factors[f"{site}.adapter.{side}.{matrix}"][int(expert)]
                getattr(layer, side)["default"].weight = nn.Parameter(factor.detach().clone())

    def forward(self, x_TD, choice_TK, weights_TK, _):
        rows = []
        for token, choice in enumerate(choice_TK.tolist()):
            for number, expert in enumerate(choice):
                gate, up, down = (
                    self.layers[f"{m}_{expert}"] for m in ("gate_proj", "up_proj", "down_proj")
                )
                x, index = x_TD[token : token + 1], token * len(choice) + number
                with rows_rng(torch.tensor([index])):
                    y = down(nn.functional.silu(gate(x)) * up(x))
                rows.append(weights_TK[token, number] * y[0])
        return torch.stack(rows).unflatten(0, choice_TK.shape).sum(1)


def test_adapters_of_experts_drop_from_their_inputs_as_in_peft():
    base, ours, factors = adapted("qwen3_moe", "each", dropout=RATE)
    loops = {}
    for name, mixture in base.named_modules():
        if isinstance(mixture, MoE):
            loops[name] = Loop(f"{name}.experts", mixture.experts, factors)
            mixture.dispatch = loops[name].forward
    ids, labels = documents([9, 6])
    plain = packed_logits(ours, ids).detach()
    with dropout_rng(DropoutRNG(seed=1, step=2, token_indices_T=torch.arange(15))):
        mine = packed_logits(ours, ids)
        packed_loss(ours, ids, labels).backward()
        expected = packed_logits(base, ids)
        packed_loss(base, ids, labels).backward()
        assert torch.equal(packed_logits(ours.eval(), ids), plain)
    assert (mine - plain).abs().max() > 0.01
    torch.testing.assert_close(mine, expected, atol=2e-5, rtol=1e-5)
    wanted = {}
    for name in factors:
        mixture, _, rest = name.partition(".experts.adapter.")
        side, _, matrix = rest.partition(".")
        layers = loops[mixture].layers
        count = len(layers) // 3
        found = [getattr(layers[f"{matrix}_{e}"], side)["default"].weight for e in range(count)]
        wanted[name] = torch.stack(
            [torch.zeros_like(w) if w.grad is None else w.grad for w in found]
        )
    assert_gradients_equal(gradients(ours), wanted)


def test_autocast_and_bf16_base_weights_stay_close_to_fp32():
    _, ours, factors = adapted("qwen3_moe", "hybrid", implementation="native")
    ids, _ = documents([20])
    with torch.no_grad():
        exact = packed_logits(ours, ids)
        with torch.autocast("cpu", torch.bfloat16):
            autocast = packed_logits(ours, ids)
        for name, parameter in ours.named_parameters():
            if name not in factors and ".gate." not in name:
                parameter.data = parameter.data.bfloat16()
        mixed = packed_logits(ours, ids)
    for rounded in (autocast, mixed):
        assert rounded.dtype == torch.bfloat16
        # A dozen roundings of 2^-9 each; a token that rounding sends elsewhere is far off.
        assert (rounded.float() - exact).abs().median() / exact.std() < 0.02


@pytest.mark.parametrize(
    ("family", "targets", "reached"),
    [
        ("qwen3_moe", ["gate_proj"], {"0.mlp.experts.*", "1.mlp", "2.mlp.experts.*"}),
        ("qwen3_moe", ["mlp.gate_proj"], {"1.mlp"}),
        ("qwen3_moe", ["layers.2.mlp.experts.*.gate_proj"], {"2.mlp.experts.*"}),
        ("mixtral", ["w1"], {f"{layer}.block_sparse_moe.experts.*" for layer in range(3)}),
        ("mixtral", ["gate_proj"], {f"{layer}.block_sparse_moe.experts.*" for layer in range(3)}),
        ("gpt_oss", ["gate_up_proj"], {f"{layer}.mlp.experts.*" for layer in range(3)}),
        ("qwen2_moe", ["shared_expert_gate"], {f"{i}.mlp" for i in (0, 2)}),
        ("qwen2_moe", ["shared_expert.up_proj"], {f"{i}.mlp.shared_expert" for i in (0, 2)}),
        ("nemotron_h-latent", ["experts.*.up_proj"], {"1.mixer.experts.*"}),
        ("granitemoe", ["down_proj"], {f"{i}.block_sparse_moe.experts.*" for i in range(3)}),
        ("ernie4_5_moe", ["shared_experts.up_proj"], {f"{i}.mlp.shared_experts" for i in (1, 2)}),
    ],
)
def test_a_name_reaches_every_layer_that_bears_it(family, targets, reached):
    pair = twins(family)
    chosen = inject(pair.ours, LoraSpec(2, 2.0, targets))
    assert {name.partition(".layers.")[2].rpartition(".")[0] for name in chosen} == reached
    trained = {name for name, p in pair.ours.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(reached)


@pytest.mark.parametrize(
    ("family", "spec", "says"),
    [
        ("qwen3_moe", {"targets": ["gate"]}, "'gate' is a router"),
        ("qwen3_moe", {"targets": ["experts.3.up_proj"]}, r"write 'experts\.\*\.up_proj'"),
        ("qwen3_moe", {"normed": "dora"}, "use_dora is true, and lora.lora_target_modules names"),
        ("qwen3_moe", {"targets": ["q_proj"], "experts": "shared"}, "moe_shared_lora is true"),
        ("qwen3", {"experts": "hybrid"}, "moe_hybrid_shared_lora is true.* the model has none"),
    ],
)
def test_what_experts_cannot_have_is_refused(family, spec, says):
    with pytest.raises(ConfigError, match=says):
        inject(twins(family).ours, LoraSpec(2, 2.0, **spec))


def test_dropout_of_rows_whose_tokens_are_not_known_is_refused():
    _, ours, _ = adapted("qwen3_moe", "each", dropout=RATE)
    mixture = next(module for module in ours.modules() if isinstance(module, MoE))
    dispatcher = DeepEP(cast(Buffer, None), 8, combining="at_once")
    with pytest.raises(CapabilityError, match="does not say which token a row is of"):
        dispatcher.register_hooks(mixture)
