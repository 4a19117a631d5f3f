"""Names and shapes of a checkpoint and of our model, judged by transformers' own state dict."""

import pytest
import torch

from tests.models.stored import to_hf
from tests.models.twins import FAMILIES, SPARSE, as_stored, marked, twins


@pytest.mark.parametrize("merge_qkv", [False, True], ids=["split", "merged"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", marked([*FAMILIES, *SPARSE]))
def test_the_map_names_exactly_the_tensors_of_both_models(family, tied, merge_qkv):
    pair = twins(family, tied=tied, merge_qkv=merge_qkv)
    ours = {name: tuple(p.shape) for name, p in pair.ours.named_parameters()}
    stored = as_stored(pair.theirs, pair.theirs.state_dict())
    theirs = {name: tuple(p.shape) for name, p in stored.items()}
    if tied:
        del theirs["lm_head.weight"]
    assert pair.weights.native_names() == tuple(ours)
    assert {name: pair.weights.native_shape(name) for name in ours} == ours
    assert pair.weights.hf_shapes() == theirs


@pytest.mark.parametrize("family", ["qwen2", *SPARSE])
def test_splitting_and_joining_returns_every_tensor_to_the_bit(family):
    pair = twins(family, merge_qkv=True)
    checkpoint = as_stored(pair.theirs, pair.theirs.state_dict())
    split = {}
    for name, tensor in pair.ours.state_dict().items():
        split |= to_hf(pair.weights, name, tensor)
    assert split.keys() == checkpoint.keys()
    assert all(torch.equal(split[name], checkpoint[name]) for name in checkpoint)


@pytest.mark.parametrize("family", SPARSE)
def test_exact_tensors_are_those_that_transformers_keeps_in_fp32(family):
    pair = twins(family)
    # Of MiniMax M2 transformers rounds the bias, of no other family; Hunyuan's router is made fp32.
    kept = {*(pair.theirs._keep_in_fp32_modules_strict or ()), "e_score_correction_bias", ".wg."}
    kept |= {"expert_bias"}  # HY 3's name of it in files
    for name in pair.weights.hf_shapes():
        assert pair.weights.is_exact(name) == any(part in name for part in kept), name
