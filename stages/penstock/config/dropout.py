"""Dropout while training."""

from pydantic import Field

from penstock.config.section import Section


class DropoutConfig(Section):
    """Numbers that are dropped at random while training, each with so large a probability. Which
    ones depends on `train.seed`, the step and the token, and never on the layout. An evaluation
    drops none."""

    hidden: float = Field(default=0.0, ge=0, lt=1)
    """Of what each layer's attention and feed-forward network add to the hidden states."""
