"""Which of a model's matrices learn, as far as counting operations asks."""

import math
from collections.abc import Mapping, Sequence

from penstock.adapters.names import MAGNITUDE, factor_of
from penstock.config.lora import LoraConfig
from penstock.engine.parallel.pieces import Held
from penstock.engine.ranks import Ranks
from penstock.models.cost import EVERYTHING, Learning
from penstock.models.shape import DecoderConfig


def learning_of(
    lora: LoraConfig, held: Sequence[Held], config: DecoderConfig, ranks: Ranks
) -> Learning:
    """From what the ranks hold together. On every rank at once.

    Of experts' adapters those count that a token goes to.
    """
    if not lora.enable_lora:
        return EVERYTHING
    mine = {
        piece.tensor: math.prod(piece.whole)
        for one in held
        if (factor := factor_of(one.name)) and factor.side != MAGNITUDE
        for piece in one.pieces
    }
    everywhere: Mapping[str, int] = {
        tensor: size for here in ranks.gather(mine) for tensor, size in here.items()
    }
    inner = head = 0
    for tensor, size in everywhere.items():
        factor = factor_of(tensor)
        if factor and factor.module.endswith("lm_head"):
            head += size
        elif factor and factor.of_experts and config.experts:
            inner += size * config.experts.experts_per_token // config.experts.num_experts
        elif not (factor and factor.of_embedding):
            inner += size
    return Learning(base="frozen", factors=inner + head, head_factors=head)
