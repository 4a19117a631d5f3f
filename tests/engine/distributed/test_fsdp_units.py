"""Which modules FSDP gathers together."""

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn

from penstock.engine.distributed import data_parallel
from penstock.engine.distributed.data_parallel import edge_units, shard_units
from penstock.models.decoder import Decoder
from penstock.models.layers.linear_terms import linear_terms
from penstock.models.registry import get_family
from tests.engine import runs


def decoder(**changes: Any) -> Decoder:
    hf_config = {**runs.TINY, **changes}
    with torch.device("meta"):
        return Decoder(get_family(hf_config).read(hf_config))


@pytest.mark.skipif(
    Version(torch.__version__) < data_parallel.HEAD_MAY_BE_SKIPPED, reason="PyTorch is too old"
)
def test_an_untied_embedding_and_the_head_with_its_norm_are_units() -> None:
    model = decoder(tie_word_embeddings=False)
    found = edge_units(model)
    assert found == (model.model.embed_tokens, [model.model.norm, model.lm_head])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["Embedding", "embed_tokens", "lm_head", "norm"])
def test_edges_that_are_named_are_not_units_twice(name: str, tied: bool) -> None:
    model = decoder(tie_word_embeddings=tied)
    assert shard_units(model, [name]) == shard_units(model, [])


@pytest.mark.parametrize("case", ["tied", "an earlier PyTorch"])
def test_otherwise_they_stay_in_the_root_unit(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(tie_word_embeddings=case == "tied")
    if case == "an earlier PyTorch":
        monkeypatch.setattr(data_parallel, "HEAD_MAY_BE_SKIPPED", Version("99"))
    assert edge_units(model) == (None, [])


def test_a_head_of_the_class_that_fsdp_makes_is_a_product_and_one_with_its_own_forward_is_not() -> (
    None
):
    class Replaced(nn.Linear):
        pass

    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    x_TD = torch.ones(2, 3)
    head = Replaced(3, 4, bias=False)
    assert linear_terms(head, x_TD) == [(x_TD, head.weight)]
    assert linear_terms(Doubled(3, 4, bias=False), x_TD) is None
