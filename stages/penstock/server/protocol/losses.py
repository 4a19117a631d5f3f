"""What clients may say of each loss: inputs of every token, and numbers for all. No torch."""

from collections.abc import Mapping

from penstock.server.protocol.types import Loss

TARGETS = "target_tokens"
"""The input that every loss takes."""

FACTORS = ("weights", "mask")
"""Inputs that a token's loss is multiplied by, wherever they are given."""

CLIPS = ("clip_low_threshold", "clip_high_threshold")
"""Numbers for all tokens, or inputs of each one."""

REQUIRED: Mapping[Loss, tuple[str, ...]] = {
    "cross_entropy": (),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
    "gspo": ("logprobs", "advantages"),
    "drgrpo": ("logprobs", "advantages"),
}
"""Inputs besides the targets without which a loss is not computed."""

OPTIONAL: Mapping[Loss, tuple[str, ...]] = {
    "cross_entropy": FACTORS,
    "importance_sampling": FACTORS,
    "ppo": (*FACTORS, *CLIPS),
    "cispo": (*FACTORS, *CLIPS),
    "dro": FACTORS,
    "gspo": FACTORS,
    "drgrpo": (*FACTORS, *CLIPS, "ref_logprobs"),
}
"""Other inputs that it takes. `ref_logprobs` are those of the model that the penalty keeps close
to; without them it is the one that `logprobs` are of."""

SEVERAL_TARGETS: tuple[Loss, ...] = ("cross_entropy",)
"""Losses that are the sum of those of several targets of a token: distillation of the likeliest."""

MAX_TARGETS = 1024
"""Targets of a token: they are laid out for every token of the rows that it shares."""

PARAMS: Mapping[Loss, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "eps_clip_c": 0.0},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "drgrpo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "kl_beta": 0.0},
}
"""Numbers that it takes, with what they are unless they are given. `eps_clip_c` above 1 bounds what
a token of negative advantage costs (Ye et al. 2020, "dual clip"); 0: nothing does."""
