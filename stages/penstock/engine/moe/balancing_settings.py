"""MoE load-balancing settings: auxiliary losses, bias updates, router logs.

No torch here: checked before ranks start.
"""

from dataclasses import dataclass
from typing import Literal

from penstock.config.loading.fault import shown
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError
from penstock.engine.distributed.validate_layout import EXPERTS
from penstock.engine.native_config import native_config
from penstock.models.hf_config import HfConfig, aux_loss_coef, native_type

BIAS_FAMILIES = (
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5_moe",
    "ernie4_5_vl_moe_text",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v_moe_text",
    "glm_moe_dsa",
    "kimi_linear",
    "lfm2_moe",
    "minimax_m2",
    "exaone_moe",
    "hy_v3",
    "solar_open",
)
"""Families with a load-balancing bias on expert choice that has no gradient."""

MOE_FAMILIES = (
    *BIAS_FAMILIES,
    "deepseek_v2",
    "cohere2_moe",
    "flex_olmo",
    "gpt_oss",
    "granitemoe",
    "granitemoehybrid",
    "hunyuan_v1_moe",
    "llama4_text",
    "mellum",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl_moe_text",
)
"""Families that are always MoE, even if config.json does not give the number of experts."""

ROUTER_SETTINGS = (
    "moe_aux_loss_coef",
    "moe_z_loss_coef",
    "moe_bias_update_rate",
    "moe_global_load_balancing",
)
"""Settings that need routers, unless they are unset, 0 or false."""


@dataclass(frozen=True)
class RoutedLayers:
    """The layers with routers that are observed."""

    layers: tuple[int, ...]
    num_experts: int
    aux_loss_coef: float
    """The model's own coefficient of the load-balancing loss."""


@dataclass(frozen=True)
class LoadBalancingConfig:
    """The load balancing of a training step."""

    load: float
    z: float
    over: Literal["row", "step"]
    """Whether load is balanced over the tokens of each packed sequence, or of the whole step."""
    bias_rate: float
    log_stats: bool

    @classmethod
    def of(cls, train: TrainConfig, experts: RoutedLayers | None) -> "LoadBalancingConfig | None":
        """The settings of a run; None if a step does nothing with routers. Raises ConfigError if
        it should and the model has no routers."""
        if experts is None:
            if needs_router_config(train):
                raise _without_experts(train)
            return None
        written = train.moe_aux_loss_coef
        config = cls(
            load=experts.aux_loss_coef if written is None else written,
            z=train.moe_z_loss_coef,
            over="step" if train.moe_global_load_balancing else "row",
            bias_rate=train.moe_bias_update_rate,
            log_stats=train.log_router_stats,
        )
        return config if config.has_aux_loss or config.bias_rate or config.log_stats else None

    @property
    def has_aux_loss(self) -> bool:
        return bool(self.load or self.z)


def needs_router_config(train: TrainConfig) -> bool:
    """Whether `require_routers` needs the model's config."""
    return any(getattr(train, name) for name in ROUTER_SETTINGS)


def has_experts(hf: HfConfig) -> bool:
    """Whether the model with this config.json has MoE layers."""
    # In a hybrid family, the kinds of the layers decide, and the number of experts may stand there
    # for no layer.
    if config := native_config(hf):
        return bool(config.experts and config.experts.layers)
    counts = [hf[name] for name in EXPERTS if hf.get(name) is not None]
    return any(counts) if counts else native_type(hf) in MOE_FAMILIES


def require_routers(run: RunConfig, hf: HfConfig) -> None:
    """Raise ConfigError for router settings of a model without routers."""
    family = native_type(hf)
    if needs_router_config(run.train) and not has_experts(hf):
        raise _without_experts(run.train)
    written = run.train.moe_aux_loss_coef
    load = aux_loss_coef(hf) if written is None else written
    if run.train.moe_global_load_balancing and not load:
        raise ConfigError(
            "train.moe_global_load_balancing is true, and there is no load-balancing loss: "
            f"moe_aux_loss_coef is {'unset' if written is None else 0}.\n"
            "  Write train.moe_aux_loss_coef: 1e-3 for a mixture of experts, or leave "
            "moe_global_load_balancing out."
        )
    rate = run.train.moe_bias_update_rate
    if rate and family not in BIAS_FAMILIES:
        raise ConfigError(
            f"train.moe_bias_update_rate is {rate:g}, and the experts of a {family} are not chosen "
            f"by a bias; those of {' and '.join(BIAS_FAMILIES)} are.\n"
            "  Write train.moe_aux_loss_coef instead, or leave moe_bias_update_rate out."
        )


def _without_experts(train: TrainConfig) -> ConfigError:
    setting = next(name for name in ROUTER_SETTINGS if getattr(train, name))
    return ConfigError(
        f"train.{setting} is {shown(getattr(train, setting))}, and the model has no "
        "experts to balance."
        f"\n  Leave {setting} out, or train a mixture of experts."
    )
