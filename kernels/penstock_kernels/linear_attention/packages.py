"""linear_attention through the package flash-linear-attention: the gated delta rule with one decay
for all channels.

Its published signature is called; it has not been run here. By name only.
"""

# pyright: reportMissingImports=false

from importlib.util import find_spec
from typing import Any

import torch

from penstock_kernels.attention.segments import VarlenMetadata


def missing_reason() -> str | None:
    """Why it cannot be imported here; None if it can."""
    if find_spec("fla") is not None:
        return None
    return "its package is not installed; install it with `pip install flash-linear-attention`"


def unsupported_reason(
    q_TGK: torch.Tensor, log_decay_TN: torch.Tensor, beta_TN: torch.Tensor | None
) -> str | None:
    """Of inputs that fit each other."""
    if q_TGK.device.type != "cuda":
        return f"its tensors are on {q_TGK.device.type}, and it needs cuda"
    if q_TGK.dtype not in (torch.bfloat16, torch.float16):
        return f"q is {q_TGK.dtype}, and it takes bfloat16 and float16"
    if beta_TN is None or log_decay_TN.ndim == 3:
        return "it is called for the delta rule with one decay for all channels"
    return None


def fla(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TNV: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor | None,
    segments: VarlenMetadata,
    scale: float,
    initial_state_BNKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same as the reference."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: PLC0415

    assert beta_TN is not None, "refused"
    of_each = v_TNV.shape[1] // q_TGK.shape[1]
    q_TNK, k_TNK = (x.repeat_interleave(of_each, dim=1) for x in (q_TGK, k_TGK))
    inputs: list[Any] = [x.unsqueeze(0) for x in (q_TNK, k_TNK, v_TNV, log_decay_TN, beta_TN)]
    y_1TNV, final_BNKV = chunk_gated_delta_rule(
        *inputs,
        scale=scale,
        initial_state=initial_state_BNKV,
        output_final_state=True,
        cu_seqlens=segments.cu_seqlens.long(),
    )
    return y_1TNV.squeeze(0), final_BNKV
