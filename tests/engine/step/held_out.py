"""A model of many minds, rows of two data sets for it, and what transformers says of them."""

import math

import numpy as np
import pyarrow as pa
import torch
import transformers
from transformers import AutoModelForCausalLM

from penstock.rows.reader import PackedRows
from penstock.rows.schema import PACKED
from penstock.rows.sources import Sources
from tests.engine import runs

LABELS = ("arithmetic", "poems")
NEW_TOKENS = 5


def random_model(folder):
    """Weights of a model whose guesses differ from token to token."""
    config = transformers.AutoConfig.for_model(**{**runs.TINY, "initializer_range": 0.3})
    config.dtype = torch.float32
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def guesses(model, ids):
    """Logits of a document [T, V] and what they make likeliest."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits, logits.argmax(1)


def write_held_out(folder, model):
    """Rows of documents of two data sets; of every third token the label is what is likeliest."""
    rng = np.random.default_rng(3)
    rows = {"input_ids": [], "labels": [], "lengths": []}
    for _ in range(7):
        lengths = rng.integers(1, 30, size=int(rng.integers(1, 5))).tolist()
        row_ids, row_labels = [], []
        for length in lengths:
            ids = rng.integers(0, runs.VOCAB, size=length).tolist()
            _, likeliest = guesses(model, ids)
            labels = rng.integers(0, runs.VOCAB, size=length)
            kind = np.arange(length) % 3
            labels = np.where(kind == 0, likeliest.numpy(), np.where(kind == 1, labels, -100))
            row_ids += ids
            row_labels += labels.tolist()
        rows["input_ids"].append(row_ids)
        rows["labels"].append(row_labels)
        rows["lengths"].append(lengths)
    folder.mkdir(parents=True)
    with pa.ipc.new_file(str(folder / "rows-00000-of-00001.arrow"), PACKED) as writer:
        writer.write_table(pa.table(rows, schema=PACKED))
    documents = [length for lengths in rows["lengths"] for length in lengths]
    Sources(LABELS, np.arange(len(documents)) * 7 // 3 % 2).write(folder)


def by_transformers(model, folder, chosen):
    """The record of an evaluation, one document at a time."""
    packed, sources = PackedRows(folder), Sources.read(folder)
    assert sources is not None
    first = np.cumsum(packed.documents()) - packed.documents()
    sums = {label: np.zeros(3) for label in LABELS}
    for number in chosen:
        row, start = packed.row(number), 0
        for at, length in enumerate(row.lengths.tolist()):
            ids, labels = (
                torch.from_numpy(x[start : start + length].astype(np.int64))
                for x in (row.input_ids, row.labels)
            )
            logits, likeliest = guesses(model, ids.tolist())
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            trained = labels != -100
            counted = losses.double().sum(), trained.sum(), (likeliest == labels)[trained].sum()
            sums[LABELS[sources.of_documents[first[number] + at]]] += np.array(counted, float)
            start += length
    loss, tokens, right = np.sum(list(sums.values()), axis=0).tolist()
    return {
        "eval_loss": loss / tokens,
        "eval_perplexity": math.exp(loss / tokens),
        "eval_token_accuracy": right / tokens,
        **{f"eval_loss/{label}": its[0] / its[1] for label, its in sums.items()},
    }


def greedy(model, prompt, end):
    """The likeliest tokens after a prompt, up to one that ends the answer."""
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        ids.append(int(guesses(model, ids)[1][-1]))
        if ids[-1] == end:
            break
    return ids[len(prompt) :]
