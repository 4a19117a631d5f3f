"""Select the attention backend: the configured one, or the best supported."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
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
    """Return the attention backend that `model.attn_implementation` names.

    Unset, it is the first of PREFERRED that supports the model's heads on this device. The choice
    and the reason are passed to `notify`. `bidirectional`: whether the tokens of an image attend to
    one another in both directions.

    Raises CapabilityError, with the reason, for a backend that does not support them.
    """
    configured = run.model.attn_implementation
    branches, over_ring = run.data.shares_prompts, run.train.ringattn_parallel_size > 1
    casts = run.model.attention_cast_bf16
    dtype: torch.dtype = torch.bfloat16 if casts else getattr(torch, run.train.computes_in)
    has_dropout = run.train.dropout.attention > 0
    requirements = _Requirements(
        config,
        device,
        dtype,
        branches=branches,
        bidirectional=bidirectional,
        over_ring=over_ring,
        has_dropout=has_dropout,
    )
    refusals = {name: requirements.unsupported_reason(name) for name in ("eager", *attention.fast)}
    if configured and (reason := refusals[configured]):
        serving = [name for name in PREFERRED if refusals[name] is None]
        raise CapabilityError(
            f"model.attn_implementation is {configured}, which cannot compute this "
            "model's attention "
            f"here: {reason}.\n"
            f"  Write {' or '.join(serving)}, or leave it out to select the best supported one."
        )
    chosen = configured or next(name for name in PREFERRED if refusals[name] is None)
    reason = "configured" if configured else _explain_choice(chosen, refusals)
    if chosen in PACKAGES and over_ring:
        reason = f"{reason}; native for what comes over the ring"
    notify(f"attention: {chosen} ({reason})" if reason else f"attention: {chosen}")
    return chosen


@dataclass(frozen=True)
class _Requirements:
    """The requirements on attention."""

    config: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    _: KW_ONLY
    branches: bool
    """Whether documents have branches that do not see each other."""
    bidirectional: bool
    """Whether there are bidirectional runs of tokens."""
    over_ring: bool
    has_dropout: bool
    """Whether attention dropout is used."""

    def unsupported_reason(self, name: str) -> str | None:
        """Why this backend does not support it; None if it does."""
        if name == "eager":
            return None
        if self.has_dropout:
            return "it has no attention dropout (train.dropout.attention)"
        reasons = (self._reason(name, kind) for kind in self.config.layer_kinds)
        return next((reason for reason in reasons if reason is not None), None)

    def _reason(self, name: str, config: DecoderConfig) -> str | None:
        """The same for the layers of one kind."""
        backend = attention.fast[name]
        # Backends decide by shape, dtype and device; they read no values.
        q_1NH, k_1KH, sinks_N = (
            torch.empty(size, dtype=self.dtype, device=self.device)
            for size in (
                (1, config.num_attention_heads, config.attention_dim),
                (1, config.num_key_value_heads, config.attention_dim),
                (config.num_attention_heads,),
            )
        )
        segments = VarlenMetadata.of([1], self.device)
        if self.branches:
            start_rows_1 = torch.empty(1, dtype=torch.int32, device=self.device)
            segments = replace(segments, start_rows=start_rows_1)
        if self.bidirectional:
            run_ends_1 = torch.ones(1, dtype=torch.int32, device=self.device)
            segments = replace(segments, run_ends=run_ends_1)
        args = (q_1NH, k_1KH, k_1KH, segments, config.score_scale)
        reason = backend.unsupported_reason(
            *args,
            config.sliding_window if config.sliding_layers else None,
            sinks_N if config.attention_sinks else None,
            config.attention_soft_cap,
        )
        if reason is None and self.over_ring:
            settings = (None, config.attention_soft_cap)
            reason = block.fast[name].unsupported_reason(*args, *settings)
        # Do not report a backend as missing if it could not be used when installed.
        return reason or backend.missing_reason


def _explain_choice(chosen: str, refusals: Mapping[str, str | None]) -> str:
    """Why no better backend was chosen; backends with the same reason are grouped."""
    better = PREFERRED[: PREFERRED.index(chosen)]
    grouped = groupby(better, key=refusals.__getitem__)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in grouped)
