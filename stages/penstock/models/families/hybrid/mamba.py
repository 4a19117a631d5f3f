"""Reads what the families with Mamba-2 layers share in config.json."""

import math

from penstock.core.errors import ConfigError
from penstock.models.hf_config import HfConfig, config_get, config_require
from penstock.models.mamba2_config import Mamba2Config

NO_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
"""RoPE parameters of a model in which no layer has RoPE."""


def mamba_config(hf: HfConfig) -> Mamba2Config:
    """Mamba-2 layers in the fields of Granite 4 and Bamba."""
    heads = config_get(hf, "mamba_n_heads", 128)
    features = config_get(hf, "mamba_expand", 2) * config_require(hf, "hidden_size")
    head_dim = config_get(hf, "mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = features // heads
    if heads * head_dim != features:
        raise ConfigError(
            f"the model's mamba_n_heads ({heads}) heads of mamba_d_head ({head_dim}) features are "
            f"not mamba_expand times its hidden_size ({features}). Correct the config.json that "
            "model.config_path names."
        )
    bias = bool(config_get(hf, "mamba_proj_bias", False))
    least, most = time_step_limit(hf)
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        groups=config_get(hf, "mamba_n_groups", 1),
        state_dim=config_get(hf, "mamba_d_state", 256),
        kernel=config_get(hf, "mamba_d_conv", 4),
        conv_bias=bool(config_get(hf, "mamba_conv_bias", True)),
        in_bias=bias,
        out_bias=bias,
        min_step=least,
        max_step=most,
    )


def time_step_limit(hf: HfConfig) -> tuple[float, float]:
    """The limits of time steps; transformers writes infinity as `{"__float__": "Infinity"}`."""
    limits = config_get(hf, "time_step_limit", (0.0, math.inf))
    least, most = (
        float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits
    )
    return least, most
