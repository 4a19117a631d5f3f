"""The token mixer of a layer, where tokens see one another: the module `self_attn` of a block, or
`linear_attn` in layers of linear attention.

A token mixer is an `nn.Module` that provides:

- `forward(x_TD, cos_TH, sin_TH, segments, query_scale_T=None) -> y_TD`: the output for the tokens
  of packed documents, which do not see one another; `segments` has their bounds.
- Roles in the family's table (`tp_roles.py`): layers split by heads are column-parallel and
  row-parallel; what has no role is on every tensor-parallel rank, with a partial sum of its
  gradient. Its sizes are read from tensors, because a rank has only some of the heads.
- Its tensors in `weights.WeightMap`, and its FLOPs and saved activations in `flops.py` and
  `estimate/costs/activations.py`.
- `run_core`, a call hook around it without projections (`recompute_modules: [core_attn]`).
- Where it is softmax attention: `attend`, the function from queries, keys and values to outputs,
  through which context parallelism and the KV cache work.
- Where it has a state: `head_blocks`, by which context parallelism gives a rank all tokens of some
  heads (`recurrent/mixer.py`). Passes with a KV cache keep the state (`PrefillSegments`,
  `DecodeSegments`).
"""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.attention import AttentionFn, SelfAttention
from penstock.models.layers.dropout import WeightDropout
from penstock.models.layers.latent_attention import LatentAttention
from penstock.models.layers.layer_ops import LayerOps
from penstock.models.layers.recurrent.gated_delta_net import GatedDeltaNet, KimiDeltaAttention
from penstock.models.layers.recurrent.mamba2 import Mamba2
from penstock.models.layers.recurrent.short_conv import ShortConv
from penstock.models.linear_config import KimiDeltaConfig
from penstock.models.mamba2_config import Mamba2Config
from penstock.models.short_conv_config import ShortConvConfig

TokenMixer = SelfAttention | LatentAttention | GatedDeltaNet | ShortConv | Mamba2


def build_token_mixer(
    config: DecoderConfig,
    layer: int,
    *,
    merge_qkv: bool,
    attend: AttentionFn,
    operations: LayerOps,
    drop: WeightDropout | None,
) -> TokenMixer:
    """The token mixer of this layer, as the config defines it."""
    if layer in config.linear_layers:
        if isinstance(config.linear, ShortConvConfig):
            return ShortConv(config)
        if isinstance(config.linear, Mamba2Config):
            return Mamba2(config, operations=operations)
        if isinstance(config.linear, KimiDeltaConfig):
            return KimiDeltaAttention(config, operations=operations)
        return GatedDeltaNet(config, operations=operations)
    if config.latent:
        return LatentAttention(config, layer, attend=attend, operations=operations, drop=drop)
    return SelfAttention(
        config, layer, merge_qkv=merge_qkv, attend=attend, operations=operations, drop=drop
    )
