"""Select the grouped GEMM backend of experts: the configured one, or the best supported."""

from collections.abc import Callable

import torch

from penstock.config.schema.run import RunConfig
from penstock.core.errors import CapabilityError
from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.experts import ExpertOperations, Implementation, select_expert_ops
from penstock_kernels.group_gemm import group_gemm

NAMES: tuple[Implementation, ...] = ("eager", "triton", "native", "quack")


def select_moe_backend(
    run: RunConfig, config: DecoderConfig, device: torch.device, notify: Callable[[str], None]
) -> ExpertOperations:
    """Return the expert operations that `model.moe_implementation` names; unset, the first that
    support the model's experts on this device, which are passed to `notify`.

    Raises CapabilityError, with the reason, for a backend that does not support them.
    """
    written = run.model.moe_implementation
    if config.experts is None:
        if written:
            notify(f"experts: the model has none, so moe_implementation {written} changes nothing")
        if run.train.moe_checkpoint_method:
            notify("experts: the model has none, so moe_checkpoint_method moe_act changes nothing")
        return select_expert_ops("eager")
    dtype: torch.dtype = getattr(torch, run.train.computes_in)
    refusals: dict[Implementation, str | None] = {
        name: refusal(name, config, device, dtype) for name in NAMES if name in group_gemm.fast
    }
    serving: list[Implementation] = [name for name, reason in refusals.items() if reason is None]
    if written is None:
        picked: list[Implementation] = [
            name for name in serving if group_gemm.fast[name].is_auto_selectable
        ]
        chosen = picked[0] if picked else "eager"
        notify(f"experts: {chosen}")
        return select_expert_ops(chosen)
    if written in refusals and refusals[written] is not None:
        raise CapabilityError(
            f"model.moe_implementation is {written}, which cannot compute this model's experts "
            f"here: {refusals[written]}.\n"
            f"  Write {' or '.join([*serving, 'eager'])}, or leave it out to select the "
            "best supported one."
        )
    if written not in ("eager", *refusals):
        raise CapabilityError(
            f"model.moe_implementation is {written}, and this machine has no such kernels: triton "
            "is published for Linux alone.\n  Write native or eager, or leave it out."
        )
    return select_expert_ops(written)


def refusal(
    name: str, config: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why this grouped GEMM backend does not support the experts; None if it does."""
    experts = config.experts
    assert experts is not None
    if missing := group_gemm.fast[name].missing_reason:
        return missing
    unsupported_reason = group_gemm.fast[name].unsupported_reason
    counts_E = torch.zeros(experts.num_experts, dtype=torch.int64, device=device)
    width, inner = experts.latent_size or config.hidden_size, experts.intermediate_size
    # Gate and up projection are one GEMM.
    for inputs, outputs in ((width, (1 + config.gated) * inner), (inner, width)):
        x_RK = torch.empty((0, inputs), dtype=dtype, device=device)
        # One expert's memory is expanded to all.
        one_NK = torch.empty((outputs, inputs), dtype=dtype, device=device)
        if reason := unsupported_reason(x_RK, one_NK.expand(experts.num_experts, -1, -1), counts_E):
            return reason
    return None
