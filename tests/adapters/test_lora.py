"""Low-rank adapters, judged by the PEFT library on the same base model and the same factors."""

import copy
import json

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from penstock.adapters.inject import LoraSpec, inject
from penstock.adapters.lora import fill
from penstock.adapters.merge import merged
from penstock.adapters.names import factor_of, factor_pairs
from penstock.adapters.peft_format import adapter_config, from_peft_name, peft_name
from penstock.core.errors import ConfigError
from penstock.models.decoder import Decoder
from tests.models.stored import to_hf
from tests.models.twins import (
    assert_gradients_equal,
    documents,
    gradients,
    packed_logits,
    packed_loss,
    their_logits,
    their_loss,
    twins,
)

# PEFT asks transformers for a property under its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

BOTH = pytest.mark.parametrize("merge_qkv", [False, True], ids=["split", "merged"])
SPEC = LoraSpec(rank=4, alpha=6.0, seed=11)
SOME = ("q_proj", "v_proj", "layers.1.mlp.down_proj")


def linear_layers(model):
    return [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]


def adapted_twins(folder, merge_qkv, targets=None):
    """Both models with the same factors, ours with B not zero, theirs loaded by PEFT from files."""
    pair = twins("qwen2", merge_qkv=merge_qkv)
    layers = linear_layers(pair.theirs)
    chosen = inject(pair.ours, LoraSpec(4, 6.0, targets, 11))
    factors = {n: p for n, p in pair.ours.named_parameters() if factor_of(n)}
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, factor in factors.items():
            if ".lora_B." in name:
                factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))
    config = adapter_config(
        rank=4, alpha=6.0, adapted=chosen, linear_layers=layers, base_model="somewhere/base"
    )
    (folder / "adapter_config.json").write_text(json.dumps(config))
    state = {peft_name(name): factor.detach().clone() for name, factor in factors.items()}
    save_file(state, folder / "adapter_model.safetensors")
    # A tensor that PEFT misses or does not expect is a warning, and so a failure.
    theirs = peft.PeftModel.from_pretrained(pair.theirs, folder, is_trainable=True)
    return pair, theirs.eval(), factors


@BOTH
@pytest.mark.parametrize("targets", [None, SOME], ids=["all", "some"])
def test_logits_and_every_gradient_are_those_of_peft(tmp_path, merge_qkv, targets):
    pair, theirs, factors = adapted_twins(tmp_path, merge_qkv, targets)
    ids, labels = documents()
    with torch.no_grad():
        packed = packed_logits(pair.ours, ids).split([len(document) for document in ids])
        for document, logits in zip(ids, packed, strict=True):
            torch.testing.assert_close(logits, their_logits(theirs, document), atol=2e-5, rtol=1e-5)
    packed_loss(pair.ours, ids, labels).backward()
    their_loss(theirs, ids, labels).backward()
    ours, expected = gradients(pair.ours), gradients(theirs)
    assert ours.keys() == factors.keys()
    assert_gradients_equal(
        {peft_name(name): gradient for name, gradient in ours.items()},
        {name.replace(".default.", "."): gradient for name, gradient in expected.items()},
    )


@BOTH
def test_a_merged_model_is_pefts_merged_model(tmp_path, merge_qkv):
    pair, theirs, factors = adapted_twins(tmp_path, merge_qkv, SOME)
    pairs = factor_pairs(dict(factors))
    state = {}
    for name in pair.weights.native_names():
        for hf_name, tensor in to_hf(pair.weights, name, pair.ours.state_dict()[name]).items():
            factor = pairs.get(hf_name.removesuffix(".weight"))
            state[hf_name] = merged(tensor, *factor, SPEC.scale) if factor else tensor
    expected = theirs.merge_and_unload().state_dict()
    assert state.keys() == expected.keys()
    torch.testing.assert_close(state, dict(expected), atol=1e-6, rtol=1e-5)


def test_merging_rounds_once_to_the_weights_dtype():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 6, generator=generator).bfloat16()
    a, b = torch.randn(2, 6, generator=generator), torch.randn(8, 2, generator=generator)
    exact = weight.double() + 0.5 * b.double() @ a.double()
    got = merged(weight, a, b, 0.5)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, exact.bfloat16(), atol=0, rtol=2**-8)


@BOTH
def test_training_starts_at_the_base_model(merge_qkv):
    pair = twins("qwen3", merge_qkv=merge_qkv)
    ids, _ = documents()
    base = packed_logits(pair.ours, ids)
    inject(pair.ours, SPEC)
    assert torch.equal(packed_logits(pair.ours, ids), base)


def test_fused_and_split_layers_start_with_the_same_factors():
    starts = []
    for merge_qkv in (False, True):
        pair = twins("llama", merge_qkv=merge_qkv)
        inject(pair.ours, SPEC)
        starts.append(factor_pairs(pair.ours.state_dict()))
    assert starts[0].keys() == starts[1].keys()
    for module, (a, _) in starts[0].items():
        assert torch.equal(a, starts[1][module][0])
        # Kaiming's bound for a = sqrt 5.
        assert a.abs().max() <= a.shape[1] ** -0.5
        assert a.abs().max() > 0.8 * a.shape[1] ** -0.5


def test_a_model_without_memory_takes_its_factors_later():
    pair = twins("qwen3", merge_qkv=True)
    with torch.device("meta"):
        later = Decoder(pair.ours.config, merge_qkv=True)
    chosen = inject(later, SPEC)
    assert all(parameter.is_meta for parameter in later.parameters())
    later.to_empty(device="cpu")
    fill(later, SPEC.seed)
    base = copy.deepcopy(pair.ours.state_dict())
    assert inject(pair.ours, SPEC) == chosen
    later.load_state_dict(base, strict=False)
    state = later.state_dict()
    assert state.keys() == pair.ours.state_dict().keys()
    assert all(torch.equal(state[name], t) for name, t in pair.ours.state_dict().items())
    trainable = {name for name, p in later.named_parameters() if p.requires_grad}
    assert trainable == {name for name in state if factor_of(name)}


def test_autocast_and_bf16_base_weights_stay_close_to_fp32(tmp_path):
    pair, _, _ = adapted_twins(tmp_path, merge_qkv=True)
    ids, _ = documents()
    with torch.no_grad():
        exact = packed_logits(pair.ours, ids)
        with torch.autocast("cpu", torch.bfloat16):
            autocast = packed_logits(pair.ours, ids)
        for name, parameter in pair.ours.named_parameters():
            if factor_of(name) is None:
                parameter.data = parameter.data.bfloat16()
        mixed = packed_logits(pair.ours, ids)
    spread = exact.std()
    for rounded in (autocast, mixed):
        assert rounded.dtype == torch.bfloat16
        # A dozen roundings of 2^-9 each.
        assert (rounded.float() - exact).std() / spread < 0.02


@BOTH
def test_names_return_from_peft(merge_qkv):
    pair = twins("qwen3", merge_qkv=merge_qkv)
    inject(pair.ours, SPEC)
    fused = frozenset(pair.ours.config.qkv_parts) if merge_qkv else frozenset()
    names = [n for n, _ in pair.ours.named_parameters() if factor_of(n)]
    assert [from_peft_name(peft_name(name), fused) for name in names] == names
    assert len(set(map(peft_name, names))) == len(names) == 3 * 7 * 2


def test_a_fused_name_means_all_its_parts():
    pair = twins("qwen3", merge_qkv=True)
    chosen = inject(pair.ours, LoraSpec(2, 2.0, ["qkv_proj"]))
    assert {name.rpartition(".")[2] for name in chosen} == {"q_proj", "k_proj", "v_proj"}


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (["q_porj"], "'q_porj' names no linear layer of this model; did you mean q_proj"),
        (["embed_tokens"], "Linear layers here: down_proj, gate_proj"),
        ([], "lora_target_modules is empty"),
        (["lm_head"], "tie_word_embeddings"),
    ],
    ids=str,
)
def test_a_target_that_cannot_be_adapted_is_refused(targets, says):
    pair = twins("qwen3", tied=True)
    with pytest.raises(ConfigError, match=says):
        inject(pair.ours, LoraSpec(2, 2.0, targets))


def test_an_untied_head_can_be_adapted():
    pair = twins("qwen3")
    assert inject(pair.ours, LoraSpec(2, 2.0, ["lm_head"])) == ("lm_head",)
    ids, labels = documents()
    packed_loss(pair.ours, ids, labels).backward()
    assert gradients(pair.ours)["lm_head.lora_B.lm_head"].abs().sum() > 0
