"""DeepSeek V3.2 and GLM 5: DeepSeek V3, whose tokens attend to those that an indexer selects
(DeepSeek Sparse Attention).

Transformers is followed where its code and the published inference code differ: index scores are
not quantized. Models whose layers share a selection (`indexer_types`) are trained through the
transformers backend.
"""

from collections.abc import Iterator
from typing import Literal

from penstock.core.errors import ConfigError
from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.latent.fields import (
    LORA_TARGETS,
    ROLES,
    experts,
    groups,
    latent_attention,
    sparse_layers,
    unsupported_attention,
    unsupported_routing,
)
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, config_require, decoder_config
from penstock.models.latent_config import INDEXER_FIELDS, IndexerConfig
from penstock.models.mtp_config import DEEPSEEK_MTP
from penstock.models.tp_roles import ParallelStyle

SPARSE_ROLES = {
    **ROLES,
    "model.layers.*.self_attn.indexer.wq_b": ParallelStyle.REPLICATED,
    "model.layers.*.self_attn.indexer.wk": ParallelStyle.REPLICATED,
    "model.layers.*.self_attn.indexer.weights_proj": ParallelStyle.REPLICATED,
}
"""The selection is computed on every rank: its heads are not split."""

INDEXED = "indexed_attention"
"""The kind of all layers, in layer_types."""


def read_deepseek(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a DeepSeek V3.2's config.json."""
    return _read(
        hf,
        ranks=(1536, 512),
        head=(128, 64, 128),
        eps=1e-6,
        grouped=(8, 4),
        indexer=_indexer(hf, 64, "halves"),
    )


def read_glm(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a GLM 5's."""
    return _read(
        hf,
        ranks=(2048, 512),
        head=(192, 64, 256),
        eps=1e-5,
        grouped=(1, 1),
        indexer=_indexer(hf, 32, "neighbours"),
        not_native=tuple(_unsupported_sharing(hf)),
    )


def _read(
    hf: HfConfig,
    *,
    ranks: tuple[int, int],
    head: tuple[int, int, int],
    eps: float,
    grouped: tuple[int, int],
    indexer: IndexerConfig,
    not_native: tuple[str, ...] = (),
) -> DecoderConfig:
    routing = unsupported_routing(hf, methods=("noaux_tc",), scoring="sigmoid")
    return decoder_config(
        hf,
        layer_type=INDEXED,
        unsupported=(*unsupported_attention(hf), *routing),
        not_native=not_native,
        rms_norm_eps=config_get(hf, "rms_norm_eps", eps),
        **latent_attention(hf, ranks=ranks, head=head, indexer=indexer),
        rope_pairs="neighbours",
        experts=experts(
            hf,
            sparse_layers(hf, config_get(hf, "first_k_dense_replace", 3)),
            count=256,
            chosen=8,
            width=2048,
            shared=1,
            scoring="sigmoid",
            normalized=bool(config_get(hf, "norm_topk_prob", True)),
            groups=groups(hf, *grouped),
            scale=2.5,
        ),
    )


def _indexer(hf: HfConfig, heads: int, pairs: Literal["halves", "neighbours"]) -> IndexerConfig:
    defaults = {"heads": heads, "head_dim": 128, "top_k": 2048}
    sizes = {name: config_get(hf, INDEXER_FIELDS[name], size) for name, size in defaults.items()}
    return IndexerConfig(**sizes, rope_pairs=pairs)


def _unsupported_sharing(hf: HfConfig) -> Iterator[str]:
    """Layers without an indexer of their own, as transformers reads them."""
    count = config_require(hf, "num_hidden_layers")
    every = max(1, config_get(hf, "index_topk_freq", 1))
    offset = config_get(hf, "index_skip_topk_offset", 2)
    expected = ["F" if max(index - offset + 1, 0) % every == 0 else "S" for index in range(count)]
    types = config_get(hf, "indexer_types", config_get(hf, "index_topk_pattern", expected))
    if len(types) < count:
        raise ConfigError(
            f"the model's indexer_types (config.json) has {len(types)} entries, and "
            f"num_hidden_layers is {count}. Correct the config.json that model.config_path names."
        )
    shared = sum(type_ in ("shared", "S") for type_ in types[:count])
    if shared:
        yield f"{shared} layers take over the selection of an earlier layer (indexer_types)"


DEEPSEEK_V32 = Family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    read_deepseek,
    SPARSE_ROLES,
    lora_targets=LORA_TARGETS,
    mtp=DEEPSEEK_MTP,
)
GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    read_glm,
    SPARSE_ROLES,
    lora_targets=LORA_TARGETS,
    mtp=DEEPSEEK_MTP,
)
