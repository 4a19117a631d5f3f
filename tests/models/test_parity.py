"""Our decoder is transformers' model: loss, every gradient, logits; alone and packed."""

import copy

import pytest
import torch
import transformers

from tests.models.stored import to_hf
from tests.models.twins import (
    FAMILIES,
    assert_gradients_equal,
    documents,
    gradients,
    hf_model,
    marked,
    ours_with,
    packed_logits,
    packed_loss,
    their_logits,
    their_loss,
    twins,
)

BOTH = pytest.mark.parametrize("merge_qkv", [False, True], ids=["split", "merged"])


@BOTH
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_are_those_of_transformers(family, tied, merge_qkv):
    pair = twins(family, tied=tied, merge_qkv=merge_qkv)
    ids, labels = documents()
    ours = packed_loss(pair.ours, ids, labels, soft_cap=pair.ours.config.logit_soft_cap)
    theirs = their_loss(pair.theirs, ids, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    ours.backward()
    theirs.backward()
    seen = {}
    for name, gradient in gradients(pair.ours).items():
        seen |= to_hf(pair.weights, name, gradient)
    assert_gradients_equal(seen, gradients(pair.theirs))
    frozen = {name for name in pair.weights.hf_shapes() if name.endswith("layer_scalar")}
    assert seen.keys() == pair.weights.hf_shapes().keys() - frozen


@BOTH
@pytest.mark.parametrize("family", marked(FAMILIES))
def test_a_document_has_the_same_logits_alone_packed_and_in_transformers(family, merge_qkv):
    pair = twins(family, merge_qkv=merge_qkv)
    ids, _ = documents()
    with torch.no_grad():
        packed = packed_logits(pair.ours, ids).split([len(document) for document in ids])
        for document, logits in zip(ids, packed, strict=True):
            alone = packed_logits(pair.ours, [document])
            torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                logits, their_logits(pair.theirs, document), atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_other_activations_are_those_of_transformers(activation):
    pair = ours_with(hf_model("llama", tied=False, hidden_act=activation), merge_qkv=False)
    ids, labels = documents()
    with torch.no_grad():
        ours, theirs = packed_loss(pair.ours, ids, labels), their_loss(pair.theirs, ids, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


TRAINED = 10
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
BY_LENGTH = {
    "dynamic": {"factor": 4.0},
    "longrope": {**LONG, "factor": 8.0, "original_max_position_embeddings": TRAINED},
}


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_documents_turn_by_their_own_lengths_as_alone_in_transformers(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, **BY_LENGTH[kind]}
    more = {"rope_parameters": rope, "max_position_embeddings": TRAINED}
    pair = ours_with(hf_model("llama", tied=False, **more), merge_qkv=True)
    ids, _ = documents([7, 10, 11, 20, 5])
    with torch.no_grad():
        packed = packed_logits(pair.ours, ids).split([len(document) for document in ids])
        for document, logits in zip(ids, packed, strict=True):
            # A copy, because theirs keeps the longest that it has seen.
            theirs = their_logits(copy.deepcopy(pair.theirs), document)
            torch.testing.assert_close(logits, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", marked(FAMILIES))
def test_bf16_is_as_close_to_fp32_as_transformers_is(family, tmp_path):
    # Loaded, not converted: `.to(bfloat16)` would round their rotary frequencies as well.
    hf_model(family, tied=False).bfloat16().save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    exact, theirs = load(tmp_path, dtype=torch.float32), load(tmp_path, dtype=torch.bfloat16)
    ours = ours_with(theirs, merge_qkv=True).ours.bfloat16()
    ids, labels = documents()
    with torch.no_grad():
        reference = torch.cat([their_logits(exact, document) for document in ids])
        their_error = torch.cat([their_logits(theirs, d) for d in ids]).float() - reference
        mine = packed_logits(ours, ids)
        our_error = mine.float() - reference
        loss = packed_loss(ours, ids, labels, soft_cap=ours.config.logit_soft_cap)
        reference_loss = their_loss(exact, ids, labels)
    assert mine.dtype == torch.bfloat16
    # The same roundings in the same places, but for attention's scores: ours may be better.
    assert our_error.norm() <= 1.2 * their_error.norm()
    assert our_error.norm() <= 0.02 * reference.norm()
    torch.testing.assert_close(loss, reference_loss, rtol=1e-2, atol=0)


@BOTH
def test_autocast_computes_what_bf16_parameters_compute(merge_qkv):
    pair = twins("qwen3", merge_qkv=merge_qkv)
    ids, _ = documents()
    streams = []
    pair.ours.model.layers["0"].register_forward_hook(lambda *call: streams.append(call[-1].dtype))
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            autocast = packed_logits(pair.ours, ids)
        converted = packed_logits(pair.ours.bfloat16(), ids)
    assert streams == [torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(autocast, converted, atol=3e-2, rtol=3e-2)
