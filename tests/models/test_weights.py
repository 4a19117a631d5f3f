"""Names and shapes of a checkpoint and of our model, judged by transformers' own state dict."""

import pytest
import torch

from tests.models.twins import FAMILIES, twins


@pytest.mark.parametrize("merge_qkv", [False, True], ids=["split", "merged"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_map_names_exactly_the_tensors_of_both_models(family, tied, merge_qkv):
    pair = twins(family, tied=tied, merge_qkv=merge_qkv)
    ours = {name: tuple(p.shape) for name, p in pair.ours.named_parameters()}
    theirs = {name: tuple(p.shape) for name, p in pair.theirs.named_parameters()}
    assert pair.weights.native_names() == tuple(ours)
    assert {name: pair.weights.native_shape(name) for name in ours} == ours
    assert pair.weights.hf_shapes() == theirs
    extra = pair.theirs.state_dict().keys() - theirs.keys()
    assert all(pair.weights.is_optional(name) for name in extra)
    assert not any(pair.weights.is_optional(name) for name in theirs)


def test_splitting_and_joining_returns_every_tensor_to_the_bit():
    pair = twins("qwen2", merge_qkv=True)
    checkpoint = pair.theirs.state_dict()
    split = {}
    for name, tensor in pair.ours.state_dict().items():
        split |= pair.weights.to_hf(name, tensor)
    assert split.keys() == checkpoint.keys()
    assert all(torch.equal(split[name], checkpoint[name]) for name in checkpoint)
