"""A transformer block."""

from functools import partial

import torch
from torch import nn

from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.attention import AttentionFn
from penstock.models.layers.call_hook import CallHook, call
from penstock.models.layers.dropout import NO_DROPOUT, DropoutRates
from penstock.models.layers.experts import ExpertOperations
from penstock.models.layers.feed_forward import build_feed_forward
from penstock.models.layers.layer_ops import LayerOps
from penstock.models.layers.moe import build_moe
from penstock.models.layers.norm import NoNorm, build_norm
from penstock.models.layers.router import Precision
from penstock.models.layers.token_mixer import TokenMixer, build_token_mixer
from penstock.models.names import LINEAR_ATTN
from penstock_kernels.attention import VarlenMetadata

CALL_HOOKS = {"self_attn": "run_attn", "mlp": "run_mlp"}
"""The two parts of a block, and the call hooks through which they are called."""
PART_NAMES = (*CALL_HOOKS, LINEAR_ATTN)
"""What the modules that these hooks call are named."""


class Block(nn.Module):
    """A token mixer and a feed-forward network or MoE, or one of them alone. Each has a norm of its
    input, of its output, or of both; then come dropout and the residual addition. In a parallel
    block both have one norm of their input.

    `run_attn` and `run_mlp` are call hooks. A caller that replaces one must call the previous one.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        merge_qkv: bool,
        attend: AttentionFn,
        operations: LayerOps,
        experts: ExpertOperations,
        router: Precision,
        dropout: DropoutRates = NO_DROPOUT,
    ) -> None:
        """`layer` is the layer's index in the whole model, from 0."""
        super().__init__()
        input_norm, output_norm = (
            partial(build_norm, config, operations) if position else NoNorm
            for position in config.layer_norms(layer)
        )
        self.mixer_name = config.layer_mixer(layer)
        if self.mixer_name:
            self.input_layernorm = input_norm()
            mixer = build_token_mixer(
                config,
                layer,
                merge_qkv=merge_qkv,
                attend=attend,
                operations=operations,
                drop=dropout.of_weights(layer, config.num_hidden_layers),
            )
            self.add_module(self.mixer_name, mixer)
            self.attention_output_norm = output_norm()
        self.is_parallel = config.parallel_block
        drop = dropout.site("ffn", "mlp.act_fn", layer, config.num_hidden_layers)
        self.mlp: nn.Module | None = None
        if config.has_mlp(layer):
            self.post_attention_layernorm = NoNorm() if config.parallel_block else input_norm()
            if sparse := config.layer_experts(layer):
                kwargs = {"operations": experts, "router": router, "shared_ops": operations}
                self.mlp = build_moe(config, sparse, **kwargs)
            else:
                self.mlp = build_feed_forward(config, config.intermediate_size, operations, drop)
            self.mlp_output_norm = output_norm()
        self.residual_scale = config.residual_scale
        # A parameter, because checkpoints have it; it is not trained.
        self.layer_scalar = (
            nn.Parameter(torch.ones(1), requires_grad=False) if config.layer_scalars else None
        )
        self.drop_attn, self.drop_mlp = (
            dropout.site("hidden", part, layer, config.num_hidden_layers) for part in CALL_HOOKS
        )
        self.run_attn: CallHook = call
        self.run_mlp: CallHook = call

    @property
    def token_mixer(self) -> TokenMixer | None:
        """`self_attn`, or `linear_attn` in layers of linear attention; None in a layer without."""
        if self.mixer_name is None:
            return None
        mixer = getattr(self, self.mixer_name)
        assert isinstance(mixer, TokenMixer)
        return mixer

    def part(self, name: str) -> nn.Module | None:
        """One of the two parts of `CALL_HOOKS`: the token mixer for `self_attn`; None for a part
        that the layer has not."""
        return self.mlp if name == "mlp" else self.token_mixer

    def forward(
        self,
        x_TD: torch.Tensor,
        cos_TH: torch.Tensor,
        sin_TH: torch.Tensor,
        segments: VarlenMetadata,
        *query_scale: torch.Tensor,
    ) -> torch.Tensor:
        """The residual stream after this block, [T, D]. The rest as in `token_mixer.py`."""
        mixer = self.token_mixer
        if mixer is None:
            normed_TD = self.post_attention_layernorm(x_TD)
        else:
            normed_TD = self.input_layernorm(x_TD)
            y_TD = self.run_attn(mixer, normed_TD, cos_TH, sin_TH, segments, *query_scale)
            y_TD = self._scaled(self.drop_attn(self.attention_output_norm(y_TD)))
            if self.mlp is None:
                return self._output(x_TD + y_TD)
            # The norm adds its two inputs as well, so that a kernel reads each of them once.
            x_TD, after_TD = self.post_attention_layernorm(y_TD, x_TD)
            normed_TD = normed_TD if self.is_parallel else after_TD
        assert self.mlp is not None, "a layer has one part or both"
        y_TD = self.mlp_output_norm(self.run_mlp(self.mlp, normed_TD))
        return self._output(x_TD + self._scaled(self.drop_mlp(y_TD)))

    def _output(self, x_TD: torch.Tensor) -> torch.Tensor:
        # Cast: it is a tensor [1], not a scalar, so one in fp32 would promote a stream in 16 bits.
        return x_TD if self.layer_scalar is None else x_TD * self.layer_scalar.to(x_TD.dtype)

    def _scaled(self, y_TD: torch.Tensor) -> torch.Tensor:
        return y_TD if self.residual_scale == 1 else y_TD * self.residual_scale
