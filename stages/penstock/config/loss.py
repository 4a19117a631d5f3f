"""Which loss is trained on, and how it is computed."""

from typing import Literal

from pydantic import Field

from penstock.config.section import Section


class LossConfig(Section):
    """The loss. That of tokens is always told as plain cross-entropy in validation."""

    objective: Literal["sft", "pretrain", "preference"] = "sft"
    """What is learnt. `sft`: the tokens that the data mark as trained, such as answers. `pretrain`:
    every token of plain texts (data of type `text`). `preference`: which of two answers is better,
    as the section `preference` says."""

    ce_mode: Literal["eager", "compiled", "chunked"] = "chunked"
    """How the head and the loss are computed. `chunked`: a chunk of tokens at a time, whose logits
    turn into gradients where they lie, by Triton kernels on GPUs. `compiled`: the same with kernels
    that `torch.compile` makes when training starts. `eager`: by PyTorch's own operations from the
    logits of all trained tokens at once, which takes by far the most memory. Tokens that are not
    trained never reach the head."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """The share of each target that is spread evenly over the vocabulary. `loss` in the metrics is
    with it."""

    z_loss_coef: float = Field(default=0.0, ge=0)
    """What the squared logarithm of the sum of exponentials of a token's logits is multiplied by
    before it is added to the token's loss, which keeps logits from drifting. 1e-4 is usual where it
    is used. `loss` in the metrics is with it."""
