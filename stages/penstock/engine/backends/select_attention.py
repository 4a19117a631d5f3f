"""Select the attention backend: the configured one, or the best supported."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import torch

from penstock.config.schema.run import RunConfig
from penstock.core.errors import CapabilityError
from penstock.models.decoder_config import DecoderConfig
from penstock_kernels.attention import VarlenMetadata, attention
from penstock_kernels.attention.block import block
from penstock_kernels.flash_packages import PACKAGES

PREFERRED = ("flash_attention_3", "native", "sdpa", "eager")
"""The default backends, best first."""


def choose_attention(
    run: RunConfig,
    config: DecoderConfig,
    device: torch.device,
    notify: Callable[[str], None],
    *,
    bidirectional: bool = False,
) -> str:
    """Return the attention backend that `model.attn_implementation` names; unset, the first of
    PREFERRED that supports the model's heads on this device.

    The choice and the reason are passed to `notify`. `bidirectional`: whether the tokens of an
    image attend to one another in both directions. Raises CapabilityError, with the reason, for a
    backend that does not support them.
    """
    configured = run.model.attn_implementation
    refusals: dict[str, str | None] = {}
    for name in ("eager", *attention.fast):
        reasons = (
            _unsupported_reason(name, run, kind, device, bidirectional=bidirectional)
            for kind in config.layer_kinds
        )
        refusals[name] = next((reason for reason in reasons if reason is not None), None)
    if configured and (reason := refusals[configured]):
        serving = [name for name in PREFERRED if refusals[name] is None]
        raise CapabilityError(
            f"model.attn_implementation is {configured}, which cannot compute this model's "
            f"attention here: {reason}.\n"
            f"  Write {' or '.join(serving)}, or leave it out to select the best supported one."
        )
    chosen = configured or next(name for name in PREFERRED if refusals[name] is None)
    reason = "configured"
    if not configured:
        # Why no better one was chosen; backends with the same reason are grouped.
        better = groupby(PREFERRED[: PREFERRED.index(chosen)], key=refusals.__getitem__)
        reason = "; ".join(f"{', '.join(names)}: {why}" for why, names in better)
    if chosen in PACKAGES and run.train.ringattn_parallel_size > 1:
        reason = f"{reason}; native for what comes over the ring"
    notify(f"attention: {chosen} ({reason})" if reason else f"attention: {chosen}")
    return chosen


def _unsupported_reason(
    name: str,
    run: RunConfig,
    config: DecoderConfig,
    device: torch.device,
    *,
    bidirectional: bool,
) -> str | None:
    """Why a backend does not support layers of one kind; None if it does."""
    if name == "eager":
        return None
    if run.train.dropout.attention > 0:
        return "it has no attention dropout (train.dropout.attention)"
    backend, casts = attention.fast[name], run.model.attention_cast_bf16
    dtype: torch.dtype = torch.bfloat16 if casts else getattr(torch, run.train.computes_in)
    # Backends decide by shape, dtype and device; they read no values.
    q_1NH, k_1KH, sinks_N = (
        torch.empty(size, dtype=dtype, device=device)
        for size in (
            (1, config.num_attention_heads, config.attention_dim),
            (1, config.num_key_value_heads, config.attention_dim),
            (config.num_attention_heads,),
        )
    )
    segments = VarlenMetadata.of([1], device)
    if run.data.shares_prompts:
        # Documents have branches that do not see each other.
        start_rows_1 = torch.empty(1, dtype=torch.int32, device=device)
        segments = replace(segments, start_rows=start_rows_1)
    if bidirectional:
        run_ends_1 = torch.ones(1, dtype=torch.int32, device=device)
        segments = replace(segments, run_ends=run_ends_1)
    args = (q_1NH, k_1KH, k_1KH, segments, config.score_scale)
    reason = backend.unsupported_reason(
        *args,
        config.sliding_window if config.sliding_layers else None,
        sinks_N if config.attention_sinks else None,
        config.attention_soft_cap,
    )
    if reason is None and run.train.ringattn_parallel_size > 1:
        settings = (None, config.attention_soft_cap)
        reason = block.fast[name].unsupported_reason(*args, *settings)
    # Do not report a backend as missing if it could not be used when installed.
    return reason or backend.missing_reason
