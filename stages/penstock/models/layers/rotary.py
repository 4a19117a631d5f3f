"""Rotary position embedding's angles. Applying them is `penstock_kernels.rope`.

The scaled kinds' formulas are transformers' own (`modeling_rope_utils`), so that a checkpoint sees
the frequencies it was trained with.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from penstock.models.shape import RotaryPairs


class Rotary:
    """The angles of one model. Not a module and without tensors: nothing here can be moved to
    another precision, or be left unfilled when a model built without memory is given some."""

    def __init__(
        self,
        parameters: Mapping[str, Any],
        *,
        head_dim: int,
        max_position_embeddings: int,
        pairs: RotaryPairs = "halves",
    ) -> None:
        # On the CPU whatever device the model is being built on: the numbers are needed now.
        with torch.device("cpu"):
            inverse_frequencies, self.attention_factor = _frequencies(
                parameters, head_dim, max_position_embeddings
            )
        self.pairs = pairs
        self.inverse_frequencies: list[float] = inverse_frequencies.float().tolist()

    def angles(
        self, position_ids_T: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, H] on the positions' device, for the features that turn.

        Computed in fp32, and given in `dtype`, or as they are where neighbours are turned together.
        """
        device = position_ids_T.device
        inverse = torch.tensor(self.inverse_frequencies, dtype=torch.float32, device=device)
        angle = position_ids_T[:, None].float() * inverse
        factor = self.attention_factor
        if self.pairs == "neighbours":
            both_TH = angle.repeat_interleave(2, dim=-1)
            return both_TH.cos() * factor, both_TH.sin() * factor
        both_TH = torch.cat((angle, angle), dim=-1)
        cos_TH, sin_TH = both_TH.cos(), both_TH.sin()
        return (cos_TH * factor).to(dtype), (sin_TH * factor).to(dtype)


def _frequencies(
    parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int
) -> tuple[torch.Tensor, float]:
    kind = parameters["rope_type"]
    if kind == "default":
        turning = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, turning, 2, dtype=torch.float) / turning
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    # What the formulas read of a transformers config. Some compute the head width that a config
    # without one would have before they read ours.
    config = SimpleNamespace(
        rope_parameters=dict(parameters),
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=max_position_embeddings,
        standardize_rope_params=lambda: None,
    )
    # Half a second that models without scaled positions need not wait.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
