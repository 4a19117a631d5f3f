"""How a mixture of experts is kept in balance."""

from pydantic import Field

from penstock.config.section import Section


class BalanceConfig(Section):
    """What is asked of routers besides a low loss. `loss` in the metrics is without it."""

    moe_aux_loss_coef: float | None = Field(default=None, ge=0)
    """Mixture of experts: what the load-balancing loss is multiplied by when it is added to the
    loss. Unset: the model's own `router_aux_loss_coef` where its config.json, or
    `model.foundation`, has `output_router_logits: true`, and otherwise 0, as in transformers."""

    moe_global_load_balancing: bool = False
    """Ask experts to be used alike by the tokens of a whole step, over all ranks and micro-batches,
    so that single rows may favour some; false asks it of each packed row. With several
    micro-batches on a rank a step costs a second forward pass."""

    moe_z_loss_coef: float = Field(default=0.0, ge=0)
    """Mixture of experts: what the z-loss is multiplied by, the mean over tokens and layers of the
    squared logarithm of the sum of exponentials of a router's logits, which keeps them small. 1e-3
    is usual where it is used."""

    moe_bias_update_rate: float = Field(default=0.0, ge=0)
    """Mixture of experts whose choice has a bias (ERNIE 4.5, GLM-4.5): after each step raise the
    biases of experts that got fewer tokens than the mean by this much, and lower the others'. 1e-3
    is usual; 0 leaves them as they are."""
