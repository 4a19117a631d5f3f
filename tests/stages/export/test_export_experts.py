"""Exported adapters of experts, judged by peft, which loads, computes with and merges them."""

from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from penstock.adapters.inject import LoraSpec, inject
from penstock.adapters.names import native_name, parse_lora_name
from penstock.core.errors import ArtifactError
from penstock.engine.model_source import LoraArgs
from tests.models.stored import write_published
from tests.models.twins import documents, hf_model, ours_with, packed_logits, their_logits
from tests.stages.checkpoints import trained_artifact
from tests.stages.export.test_export import export_of, loaded, saved_config

pytestmark = [
    # peft asks transformers for a name that transformers has since changed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # It looks for what has a rank of its own among modules alone, and finds no parameter there.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]

CASES = {
    # A layer without experts, whose network has the same names.
    "qwen3_moe": LoraSpec(4, 6.0, scaling="root"),
    # Experts that all tokens go to, and the gate of what these give.
    "qwen2_moe": LoraSpec(4, 6.0, ["experts.*.down_proj", "up_proj", "shared_expert_gate"]),
    # Other names in the checkpoint than in the model; one pair for all experts.
    "mixtral": LoraSpec(4, 6.0, experts="shared"),
    # One matrix of three, and with every expert a network that all tokens go to.
    "glm4_moe": LoraSpec(4, 6.0, ["q_proj", "down_proj"], experts="hybrid"),
    # A tensor for each matrix of all experts, [inputs, outputs], both or one with adapters.
    "gpt_oss": LoraSpec(
        4,
        6.0,
        ["gate_up_proj", "layers.1.mlp.experts.*.down_proj"],
        experts="hybrid",
        scaling="root",
    ),
    # Tensors of all experts that the model and the checkpoint call otherwise.
    "granitemoe": LoraSpec(4, 6.0, ["gate_up_proj", "down_proj"], experts="shared", scaling="root"),
    # Low-rank projections of queries and of latent vectors.
    "deepseek_v3": LoraSpec(
        4,
        6.0,
        ["q_*proj", "kv_a_proj_with_mqa", "kv_b_proj", "experts.*.up_proj"],
        experts="hybrid",
    ),
    "dots1": LoraSpec(4, 6.0, ["mlp.experts.*.gate_proj", "shared_experts.down_proj"]),
    "minimax_m2": LoraSpec(4, 6.0, ["w2", "layers.1.self_attn.k_proj"], experts="hybrid"),
    # Other names of the block, and of dense layers.
    "lfm2_moe": LoraSpec(4, 6.0, ["w1", "experts.*.w2", "w3", "in_proj", "q_proj"]),
    # Modules that transformers nests otherwise than its files.
    "kimi_linear": LoraSpec(
        4,
        6.0,
        ["q_proj", "kv_b_proj", "f_a_proj", "g_b_proj", "experts.*.w1", "shared_experts.up_proj"],
    ),
    # Two matrices of an expert, for which PEFT takes two names of tensors alone.
    "nemotron_h-experts": LoraSpec(4, 6.0, ["up_proj", "down_proj"], experts="hybrid"),
    "nemotron_h-latent": LoraSpec(4, 6.0, ["experts.*.up_proj", "fc1_latent_proj"]),
    "hunyuan_v1_moe": LoraSpec(4, 6.0, ["gate_proj", "v_proj"]),
    "olmoe": LoraSpec(4, 6.0, experts="shared"),
    # The experts of one layer of two.
    "ernie4_5_moe": LoraSpec(
        4,
        6.0,
        ["layers.1.mlp.experts.*.gate_proj", "shared_experts.up_proj", "layers.2.self_attn.o_proj"],
        scaling="root",
    ),
}


def trained_twins(family, folder):
    """Both models, ours with adapters, and these in a checkpoint."""
    pair = ours_with(hf_model(family, tied=False, vocab_size=300), merge_qkv=True)
    pair.theirs.save_pretrained(folder / "base")
    write_published(pair.theirs, folder / "base")
    inject(pair.ours, CASES[family])
    generator = torch.Generator().manual_seed(2)
    saved = {}
    with torch.no_grad():
        for name, factor in pair.ours.named_parameters():
            if found := parse_lora_name(name):
                if found.side == "lora_B":
                    factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))
                layer = pair.weights.hf_layer(found.hf_module)
                saved[native_name(layer, found.side)] = factor
    return pair, trained_artifact(folder / "train", saved, adapter_only=True)


OFTEN = ("qwen3_moe", "gpt_oss")


@torch.no_grad()
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in CASES],
)
def test_peft_loads_computes_with_and_merges_what_was_trained(family, tmp_path):
    pair, trained = trained_twins(family, tmp_path)
    base = tmp_path / "base"
    stage = export_of(trained, base, model_path=base, alpha=6)
    adapting = LoraArgs(6, CASES[family].scaling)
    facts = replace(stage, origin=replace(stage.origin, adapting=adapting)).run(tmp_path / "out")
    ids, _ = documents()
    wanted = packed_logits(pair.ours, ids)

    def logits(model):
        return torch.cat([their_logits(model.eval(), document) for document in ids])

    assert (logits(pair.theirs) - wanted).abs().max() > 0.02, "the adapter does nothing"
    # A tensor that peft misses or does not expect is a warning, and so a failure.
    with_peft = PeftModel.from_pretrained(loaded(base), tmp_path / "out/adapter")
    torch.testing.assert_close(logits(with_peft), wanted, atol=2e-5, rtol=1e-5)
    merged = loaded(tmp_path / "out/hf")
    torch.testing.assert_close(logits(merged), wanted, atol=2e-5, rtol=1e-5)
    theirs = with_peft.merge_and_unload().state_dict()
    torch.testing.assert_close(dict(merged.state_dict()), dict(theirs), atol=1e-6, rtol=1e-5)
    trained_here = [p.numel() for p in pair.ours.parameters() if p.requires_grad]
    assert facts["adapter"]["parameters"] == sum(trained_here)


def test_every_expert_has_its_pair_and_those_that_bear_none_have_none(tmp_path):
    _, trained = trained_twins("ernie4_5_moe", tmp_path)
    base = tmp_path / "base"
    export_of(trained, base, model_path=base, alpha=6, merge_lora=False).run(tmp_path / "out")
    tensors = load_file(tmp_path / "out/adapter/adapter_model.safetensors")
    at = "base_model.model.model.layers.1.mlp.experts"
    assert {name for name in tensors if ".experts." in name} == {
        f"{at}.{number}.{part}.lora_{side}.weight"
        for number in range(6)
        for part in ("gate_proj", "up_proj", "down_proj")
        for side in "AB"
    }
    assert tensors[f"{at}.5.gate_proj.lora_B.weight"].any()
    assert not tensors[f"{at}.5.up_proj.lora_B.weight"].any()


def test_factors_for_another_number_of_experts_are_refused(tmp_path):
    pair, trained = trained_twins("qwen3_moe", tmp_path)
    other = saved_config(pair.theirs.config, tmp_path / "other", num_experts=4, num_local_experts=4)
    with pytest.raises(ArtifactError, match="is for 8 experts, and the config has 4 in a layer"):
        export_of(trained, other, model_path=tmp_path / "base", alpha=6).run(tmp_path / "out")
