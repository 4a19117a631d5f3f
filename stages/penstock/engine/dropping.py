"""What a model drops while it is trained, in a run's words and in a model's."""

from penstock.config.dropout import DropoutConfig
from penstock.models.decoder import Decoder
from penstock.models.layers.dropout import Dropout, Dropping


def dropping(written: DropoutConfig) -> Dropping:
    """What layers drop."""
    depth = "rising" if written.depth_scaling else "alike"
    rates = (written.hidden, written.ffn, written.attention)
    return Dropping(*rates, warmup_steps=written.warmup_steps, depth=depth)


def drops(part: Decoder) -> bool:
    """Whether anything in it, adapters included, is ever dropped."""
    return any(isinstance(module, Dropout) and module.drops for module in part.modules())
