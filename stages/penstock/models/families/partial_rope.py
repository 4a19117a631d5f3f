"""Phi-3 and Phi-4, and StableLM: RoPE of a part of each head."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    rope_parameters,
    sliding_everywhere,
)

PHI3_LINEAR_LAYERS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def read_phi3(hf: HfConfig) -> DecoderConfig:
    """Phi-3 and Phi-4: q, k and v are one layer, and so are gate and up; LongRoPE."""
    faults, reasons = [], []
    if rate := config_get(hf, "resid_pdrop", 0.0):
        faults.append(
            f"resid_pdrop is {rate}; write 0 here (model.foundation overrides it), and"
            f" train.dropout.hidden: {rate} to drop"
        )
    rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    kind = rope.pop("type", "default")
    kind = rope.setdefault("rope_type", kind)
    # As transformers' Phi3Config: the first files named LongRoPE otherwise.
    if kind in ("su", "yarn"):
        kind = rope["rope_type"] = "longrope"
    if kind not in ("default", "longrope"):
        reasons.append(f"RoPE is of the type {kind!r}; default and longrope are computed")
    if kind == "longrope":
        trained = config_get(hf, "original_max_position_embeddings", 4096)
        rope["original_max_position_embeddings"] = trained
    return decoder_config(
        hf,
        unsupported=faults,
        not_native=reasons,
        defaults={"rms_norm_eps": 1e-5},
        rope_parameters=rope_parameters({**hf, "rope_scaling": rope}),
        fused_qkv=True,
        fused_gate_up=True,
        **sliding_everywhere(hf, hf.get("sliding_window")),
    )


def read_stablelm(hf: HfConfig) -> DecoderConfig:
    """StableLM: LayerNorm, gated MLPs; optional biases on q, k and v only."""
    reasons = [
        f"{name} is true; StableLM without it is computed"
        for name in ("qk_layernorm", "use_parallel_residual")
        if config_get(hf, name, False)
    ]
    faults = []
    if dropout := config_get(hf, "hidden_dropout", 0.0):
        faults.append(
            f"hidden_dropout is {dropout}; write 0 here (model.foundation overrides it), and"
            " train.dropout if something is to be dropped"
        )
    width = config_require(hf, "hidden_size") // config_require(hf, "num_attention_heads")
    if (head_dim := config_get(hf, "head_dim", width)) != width:
        faults.append(f"head_dim is {head_dim}; hidden_size / num_attention_heads is computed")
    return decoder_config(
        hf,
        unsupported=faults,
        not_native=reasons,
        defaults={"num_key_value_heads": 32},
        norm="layer",
        rms_norm_eps=config_get(hf, "layer_norm_eps", 1e-5),
        head_dim=width,
        rope_parameters=rope_parameters(hf, share=0.25),
        qkv_bias=bool(config_get(hf, "use_qkv_bias", False)),
    )


PHI3 = Family("phi3", "Phi3ForCausalLM", read_phi3, lora_targets=PHI3_LINEAR_LAYERS)
STABLELM = Family("stablelm", "StableLmForCausalLM", read_stablelm)
