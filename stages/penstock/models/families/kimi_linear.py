"""Kimi Linear: three layers of Kimi Delta Attention, then one of latent attention without RoPE;
experts as in DeepSeek V3."""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.models.decoder_config import DecoderConfig, ExpertNames, TensorNames
from penstock.models.families.latent import (
    LORA_TARGETS,
    ROLES,
    latent_attention,
    unsupported_attention,
)
from penstock.models.families.layers import (
    layers_of_kind,
    read_routed_experts,
    sparse_layers,
    unsupported_activation,
)
from penstock.models.family import Family
from penstock.models.hf_config import (
    FULL,
    LINEAR,
    HfConfig,
    config_get,
    config_require,
    decoder_config,
)
from penstock.models.linear_config import KimiDeltaConfig
from penstock.models.tp_roles import LINEAR_ATTENTION_ROLES

# Other families' names of fields, and those in published files.
PUBLISHED = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
# Fields without effect: there is no RoPE.
UNREAD = ("rope_parameters", "rope_scaling", "rope_theta", "head_dim", "n_routed_experts")
# Settings of published files that transformers does not read either, and tied embeddings, which it
# does not tie.
COMPUTED = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
}

EXPERT_NAMES = ExpertNames(
    block="block_sparse_moe", gate="w1", up="w3", down="w2", known_to_peft=False
)
# Transformers writes MLPs of dense layers, too, by the name of the block of experts.
NAMES = TensorNames(
    earlier=tuple(
        (f"block_sparse_moe.{part}_proj", f"mlp.{part}_proj") for part in ("gate", "up", "down")
    )
)


class _Renamed(Mapping[str, Any]):
    """A config.json by other families' names of fields."""

    def __init__(self, hf: HfConfig) -> None:
        self._hf = hf

    def _published(self, name: str) -> str:
        published = PUBLISHED.get(name, name)
        return published if published in self._hf else name

    def get(self, name: str, default: Any = None) -> Any:
        return default if name in UNREAD else self._hf.get(self._published(name), default)

    def __getitem__(self, name: str) -> Any:
        return self._hf[self._published(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hf)

    def __len__(self) -> int:
        return len(self._hf)


def read_kimi_linear(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Kimi Linear's config.json."""
    hf = _Renamed(hf)
    layers = range(config_require(hf, "num_hidden_layers"))
    reasons = [
        f"{name} is {hf[name]!r}; {only!r} is computed"
        for name, only in COMPUTED.items()
        if config_get(hf, name, only) != only
    ]
    own = config_get(hf, "linear_attn_config", {})
    heads = config_get(own, "num_heads", config_get(hf, "linear_num_heads", 32))
    width = config_get(own, "head_dim", config_get(hf, "linear_head_dim", 128))
    kernel = config_get(hf, "linear_conv_kernel_dim", 4)
    delta_attention = KimiDeltaConfig(
        key_heads=heads,
        value_heads=heads,
        key_dim=width,
        value_dim=width,
        kernel=config_get(own, "short_conv_kernel_size", kernel),
    )
    # As KimiLinearConfig, which leaves out the first layer.
    full = [index for index in layers if index and index % 4 == 0]
    if "full_attn_layers" in own and "kda_layers" in own:
        # Published files number layers from 1.
        full = [index for index in layers if index + 1 in own["full_attn_layers"]]
    types = [FULL if index in full else LINEAR for index in layers]
    experts = read_routed_experts(
        hf,
        sparse_layers(hf, config_get(hf, "first_k_dense_replace", 1)),
        count=256,
        chosen=8,
        width=1024,
        scale=2.446,
        names=EXPERT_NAMES,
    )
    return decoder_config(
        hf,
        unsupported=unsupported_attention(hf),
        not_native=(*unsupported_activation(hf), *reasons),
        defaults={"rms_norm_eps": 1e-5},
        **latent_attention(hf, ranks=(None, 512), head=(128, 64, 128)),
        no_rope_layers=tuple(layers),
        linear=delta_attention,
        linear_layers=layers_of_kind(hf, LINEAR, types),
        experts=experts,
        names=NAMES,
    )


KIMI_LINEAR = Family(
    "kimi_linear",
    "KimiLinearForCausalLM",
    read_kimi_linear,
    {**ROLES, **LINEAR_ATTENTION_ROLES},
    (*LORA_TARGETS, "k_proj", "v_proj", "w1", "w2", "w3"),
)
