"""Answers that share their prompt's tokens, judged by each answer alone after its prompt."""

import numpy as np
import pytest
import torch

from penstock.rows.collate import collate
from penstock.rows.reader import Row
from penstock.rows.shared_prefix import PrefixSharing, first_blind_rows
from penstock_kernels.attention import VarlenMetadata, attention
from tests.models.twins import assert_gradients_equal, gradients, their_logits, twins

PAIRS = [(11, 6, 9), (1, 1, 4), (20, 2, 2), (5, 13, 1)]
"""Tokens of prompts and of both answers. Windows of the models are shorter."""


def row_of(pairs, *, shares):
    """The documents of pairs of random tokens, as a packed row has them."""
    rng = np.random.default_rng(3)
    ids, labels, prompts, branches = [], [], [], []
    for prompt, *answers in pairs:
        shared = rng.integers(0, 131, prompt).tolist()
        begin = prompt - 1 if shares else 0
        ids += shared[:begin]
        labels += [-100] * begin
        prompts += [begin] if shares else [0, 0]
        for size in answers:
            answer = rng.integers(0, 131, size).tolist()
            ids += shared[begin:] + answer[:-1]
            labels += [-100] * (prompt - 1 - begin) + answer
            branches.append(prompt - begin + size - 1)
    branching = PrefixSharing(tuple(prompts), tuple(branches), (b"",) * len(pairs))
    lengths = np.array(branching.documents(), dtype=np.int32)
    return Row(np.array(ids, np.int32), np.array(labels, np.int32), lengths, 0, branching)


def batch_of(*, shares):
    [batch] = collate([[row_of(PAIRS, shares=shares)]], pad_to_multiple_of=16).micro_batches()
    return batch


def segments_of(batch):
    spans = batch.spans()
    return VarlenMetadata.of(
        batch.lengths, start_rows=None if spans is None else first_blind_rows(spans)
    )


def learnt(model, batch):
    """Logits where a label is, the log-probabilities of answers, and gradients of these weighed."""
    model.zero_grad()
    logits = model(batch.input_ids_T, batch.position_ids_T, segments_of(batch))
    places = (batch.labels_T != -100).nonzero().squeeze(1)
    chosen = logits[places].log_softmax(-1)
    each = chosen.gather(1, batch.labels_T[places, None]).squeeze(1)
    branch = batch.branch_T()[places]
    summed = torch.zeros(2 * len(PAIRS)).index_add(0, branch, each)
    (summed * torch.linspace(-1, 1, len(summed))).sum().backward()
    return logits[places].detach(), summed.detach(), gradients(model)


# fp32; a window of 5 reaches from answers into prompts that lie far before them.
@pytest.mark.parametrize("family", ["llama", "qwen2-windows", "gpt_oss"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_shared_prompts_change_nothing_of_what_is_learnt(family, backend):
    pair = twins(family, attention=attention.backend(backend))
    shared, apart = batch_of(shares=True), batch_of(shares=False)
    assert shared.num_tokens == apart.num_tokens - sum(prompt - 1 for prompt, *_ in PAIRS)
    got, want = learnt(pair.ours, shared), learnt(pair.ours, apart)
    for mine, other in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
    assert_gradients_equal(got[2], want[2])
    error, norm = (
        torch.cat([gradient.ravel() for gradient in some]).norm()
        for some in ([got[2][name] - want[2][name] for name in want[2]], want[2].values())
    )
    assert error <= 1e-6 * norm
    with torch.no_grad():
        theirs = [
            their_logits(pair.theirs, ids)[labels != -100]
            for ids, labels in zip(
                apart.input_ids_T.split(apart.lengths),
                apart.labels_T.split(apart.lengths),
                strict=True,
            )
        ]
    torch.testing.assert_close(got[0], torch.cat(theirs), atol=2e-5, rtol=2e-5)
