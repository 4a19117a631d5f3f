"""Loss inputs and parameters that clients may set: per-token inputs, and scalars. No torch."""

from collections.abc import Collection, Mapping
from typing import get_args

from penstock.server.protocol.types import Loss

TARGETS = "target_tokens"  # The input of every loss
FACTORS = ("weights", "mask")  # Inputs that a token's loss is multiplied by, if given
CLIPS = ("clip_low_threshold", "clip_high_threshold")  # Scalars, or per-token inputs

REQUIRED: Mapping[Loss, tuple[str, ...]] = {
    loss: () if loss == "cross_entropy" else ("logprobs", "advantages") for loss in get_args(Loss)
}
"""Required inputs besides the targets."""

OPTIONAL: Mapping[Loss, tuple[str, ...]] = {
    "cross_entropy": FACTORS,
    "importance_sampling": FACTORS,
    "ppo": (*FACTORS, *CLIPS),
    "cispo": (*FACTORS, *CLIPS),
    "dro": FACTORS,
    "gspo": FACTORS,
    "drgrpo": (*FACTORS, *CLIPS, "ref_logprobs"),
}
"""Optional inputs. `ref_logprobs` are those of the reference model of the KL penalty; without them
it is the model of `logprobs`."""

SEVERAL_TARGETS: tuple[Loss, ...] = ("cross_entropy",)
"""Losses that sum over several targets per token, for top-k distillation."""

MAX_TARGETS = 1024  # Maximum targets per token; every token of a row is padded to the row's maximum

# Parameters and their defaults. `eps_clip_c` above 1 bounds the loss of a token with negative
# advantage (Ye et al. 2020, "dual clip"); 0 disables it.
PARAMS: Mapping[Loss, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "eps_clip_c": 0.0},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "drgrpo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "kl_beta": 0.0},
}


def inputs_fault(loss: Loss, names: Collection[str], *optional: str) -> str | None:
    """Why a sample of this loss cannot have exactly the inputs `names`; None: it can. `optional`:
    names that are accepted besides those of the loss."""
    required = (TARGETS, *REQUIRED[loss])
    if missing := [name for name in required if name not in names]:
        return f"has no {', '.join(missing)}, which {loss} takes"
    accepted = {*required, *OPTIONAL[loss], *optional}
    if strange := sorted(name[:100] for name in names if name not in accepted):
        return (
            f"has {', '.join(strange[:5])}, which {loss} does not take;"
            f" it takes {', '.join(sorted(accepted))}"
        )
    return None


def params_fault(loss: Loss, names: Collection[str]) -> str | None:
    """Why this loss cannot have the parameters `names`; None: it can."""
    if strange := sorted(name[:100] for name in names if name not in PARAMS[loss]):
        takes = ", ".join(PARAMS[loss]) or "no numbers"
        return f"{loss} takes no {', '.join(strange[:5])}; it takes {takes}"
    return None
