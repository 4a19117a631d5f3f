"""A training step of a hybrid model on one CPU thread, ours and transformers' PyTorch code:
`python -m tests.bench.bench_hybrid [--lengths L ...] [--layers N] [--width D]`.

A small Qwen3.5: three layers of Gated DeltaNet, then one of gated attention; forward, loss and
backward in float32 from the same weights. Documents are packed in one row here; transformers gets
them one by one, or padded in one batch, as its trainer does without packing. Runs alternate;
printed are milliseconds, and how many times as long transformers takes. The goal is 2 of the padded
batch: document by document both compute the same matrix products, which are most of a step.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.bench.figures import record
from tests.bench.timing import Work, machine, medians, processor_seconds, verdict
from tests.models.twins import ours_with, packed_loss, their_loss

GOAL = 2.0
APART = 1e-4
LENGTHS = (300, 64, 200, 90, 33, 161)


def hybrid(layers: int, width: int) -> transformers.PreTrainedModel:
    """transformers' model, with random weights."""
    heads = width // 64
    config = transformers.AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=2048,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=64,
        linear_num_key_heads=max(1, heads // 2),
        linear_num_value_heads=heads,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def padded_loss(model: nn.Module, ids: list[torch.Tensor], labels: list[torch.Tensor]):
    """The loss of one batch of padded documents."""
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    mask = pad([torch.ones_like(one) for one in ids])
    logits = model(input_ids=pad(ids), attention_mask=mask, use_cache=False).logits
    targets = pad(labels, padding_value=-100)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def step(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Work:
    """Forward, loss and backward."""

    def work() -> float:
        model.zero_grad()
        total = loss()
        total.backward()
        return total.item()

    return work


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    told = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}, documents of {told.lengths}, {told.layers} layers, {told.width} wide")
    theirs = hybrid(told.layers, told.width).train()
    ours = ours_with(theirs, merge_qkv=True).ours
    ids = [torch.randint(0, 2048, (length,)) for length in told.lengths]
    labels = [torch.cat((one[1:], torch.tensor([-100]))) for one in ids]
    works = {
        "ours": step(ours, lambda: packed_loss(ours, ids, labels, chunk=512)),
        "transformers, one by one": step(theirs, lambda: their_loss(theirs, ids, labels)),
        "transformers, padded": step(theirs, lambda: padded_loss(theirs, ids, labels)),
    }
    mine, *others = (work() for work in works.values())
    assert all(abs(mine - other) < APART * mine for other in others), (mine, others)
    found = medians(works, processor_seconds)
    for who, spent in found.items():
        record(f"step of a hybrid, {who}", spent * 1e3, "ms")
        print(f"{who}: {spent * 1e3:.0f} ms")
    for who in ("one by one", "padded"):
        ratio = found[f"transformers, {who}"] / found["ours"]
        line = verdict(f"step of a hybrid, {who}: transformers/ours", ratio, GOAL)
        print(line if who == "padded" else f"{who}: transformers/ours {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
