"""DeepSeek V2 and V2 Lite: latent attention with RoPE in fp32, and softmax routing, greedily or
within groups of experts.

The balance losses of its paper are config.json's `aux_loss_alpha`, which transformers does not
compute; `train.moe_aux_loss_coef` is the load-balancing loss here.
"""

from collections.abc import Iterator

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.latent.fields import (
    LORA_TARGETS,
    ROLES,
    experts,
    groups,
    latent_attention,
    layers_from,
    unsupported_attention,
    unsupported_routing,
)
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, config_require, decoder_config

GREEDY, GROUPED = "greedy", "group_limited_greedy"


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a DeepSeek V2's config.json."""
    layers = layers_from(hf, 0)
    return decoder_config(
        hf,
        unsupported=(*unsupported_attention(hf), *_unsupported_routing(hf)),
        **latent_attention(hf, ranks=(1536, 512), head=(128, 64, 128)),
        rope_pairs="neighbours",
        rope_fp32=True,
        mlp_bias=bool(config_get(hf, "mlp_bias", False)),
        experts=experts(
            hf,
            layers,
            count=64,
            chosen=config_require(hf, "num_experts_per_tok") if layers else 1,
            width=1407,
            shared=2,
            scoring="softmax",
            normalized=False,
            groups=_groups(hf),
            scale=1.0,
            group_score="best",
            selection_bias=False,
        ),
    )


def _groups(hf: HfConfig) -> tuple[int, int]:
    """Groups of experts, and how many of them a token chooses from; only one method reads these."""
    if config_get(hf, "topk_method", GREEDY) != GROUPED:
        return 1, 1
    return groups(hf, 1, 1)


def _unsupported_routing(hf: HfConfig) -> Iterator[str]:
    yield from unsupported_routing(hf, methods=(GREEDY, GROUPED), scoring="softmax")
    if config_get(hf, "norm_topk_prob", False):
        yield (
            "norm_topk_prob is true: the code that DeepSeek published divides the weights of a "
            "token's experts by their sum, and transformers' has the key without effect; write "
            "false here (model.foundation overrides it) to train what transformers computes"
        )


DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", read, ROLES, lora_targets=LORA_TARGETS)
