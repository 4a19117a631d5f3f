"""Phi-3 and Phi-4: q, k and v are one layer, and so are gate and up; LongRoPE, partial RoPE."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    decoder_config,
    rope_parameters,
    sliding_everywhere,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
LINEAR_LAYERS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
OLD_NAMES_OF_LONGROPE = ("su", "yarn")


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Phi-3's config.json."""
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
    if kind in OLD_NAMES_OF_LONGROPE:
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
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        rope_parameters=rope_parameters({**hf, "rope_scaling": rope}),
        fused_qkv=True,
        fused_gate_up=True,
        **sliding_everywhere(hf, hf.get("sliding_window")),
    )


PHI3 = Family("phi3", "Phi3ForCausalLM", read, ROLES, lora_targets=LINEAR_LAYERS)
