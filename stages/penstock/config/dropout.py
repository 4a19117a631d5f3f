"""Dropout while training."""

from pydantic import Field

from penstock.config.section import Section


class DropoutConfig(Section):
    """Numbers that are dropped at random while training, each with so large a probability. Which
    ones depends on `train.seed`, the step and the token, and never on the layout. An evaluation
    drops none."""

    hidden: float = Field(default=0.0, ge=0, lt=1)
    """Of what each layer's attention and feed-forward network add to the hidden states."""

    ffn: float = Field(default=0.0, ge=0, lt=1)
    """Of what each layer's feed-forward network computes within, before its last matrix. For models
    without experts."""

    attention: float = Field(default=0.0, ge=0, lt=1)
    """Of the weights by which attention sums values. They are then all written out, so attention is
    plain (`eager`), and its memory grows with the square of a sample's length."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps in which all rise in a line from 0, which they are in the first one, and
    then stay. 0: they are what is written at once."""

    depth_scaling: bool = False
    """Drop less in earlier layers: in layer l of L, counted from 0, l / L of what is written."""
