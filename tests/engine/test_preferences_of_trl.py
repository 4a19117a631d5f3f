"""The losses of preferences and their gradients, as TRL computes them for the same batch."""

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from penstock.rows.tokenizer import byte_tokenizer
from tests.engine import runs
from tests.engine.answering import Asked, scores_of, write_answers, write_reference
from tests.engine.inputs import MODELS, SHAPE
from tests.engine.laid import alone
from tests.engine.traces import trace_here
from tests.ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CLOSE = 1e-5
"""Sums of fp32 numbers in another order."""

QUESTIONS = {
    "prompt": ["q", "w", "z"],
    "chosen": ["yes, it is", "no", "so it goes"],
    "rejected": ["never", "maybe so, maybe not", "go"],
}
"""Prompts of one token: TRL's ORPO counts prompts in, from their second token on."""

OF_PAIRS = {
    "sigmoid": ("dpo", {"loss_type": ["sigmoid"], "beta": 0.3}, {"beta": 0.3}),
    "ipo": ("dpo", {"loss_type": ["ipo"], "beta": 0.2}, {"beta": 0.2}),
    "orpo": ("orpo", {"beta": 0.25}, {"pref_loss_ratio": 0.25}),
    "simpo": (
        "cpo",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0},
        {"beta": 2.0, "simpo_gamma": 0.7},
    ),
}
"""A trainer of TRL's, what it is told, and what is written for it."""


def the_class(module: str, name: str):
    place = "trl" if module in ("dpo", "kto") else f"trl.experimental.{module}"
    return getattr(importlib.import_module(place), name)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model, its folder, and another one to compare with."""
    folder = tmp_path_factory.mktemp("models")
    config = transformers.AutoConfig.for_model(**{**runs.TINY, **SHAPE, **MODELS["tied"]})
    config.dtype, found = torch.float32, []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(transformers.AutoModelForCausalLM.from_config(config))
    found[0].save_pretrained(folder / "tied")
    return folder, *found


def trainer_of(kind, models, out, told, records):
    """TRL's, with fresh copies of the models."""
    from datasets import Dataset

    trainer, config = (the_class(kind, f"{kind.upper()}{name}") for name in ("Trainer", "Config"))
    _, model, other = models
    model = type(model).from_pretrained(models[0] / "tied", dtype=torch.float32)
    args = config(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=len(records["prompt"]),
        gradient_checkpointing=False,
        disable_dropout=True,
        **told,
    )
    references = {"ref_model": other} if kind in ("dpo", "kto") else {}
    return trainer(
        model=model,
        args=args,
        processing_class=byte_tokenizer(),
        train_dataset=Dataset.from_dict(records),
        **references,
    )


def loss_and_gradients(trainer):
    """Of its one batch, and the batch."""
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    named = trainer.model.named_parameters()
    return loss.item(), {n: p.grad.numpy() for n, p in named if p.grad is not None}, batch


def parted(ids, is_answer) -> tuple[list[int], list[int]]:
    """A row's prompt and answer, without padding."""
    first = int(is_answer.nonzero()[0])
    return ids[:first].tolist(), ids[is_answer.bool()].tolist()


def ours(models, out, samples, loss, preference):
    """The loss and the gradients of one step, by the names in a checkpoint."""
    kind = "kto" if loss == "kto" else "preference"
    write_answers(out / "packed", samples)
    write_reference(out / "scores", samples, scores_of(models[2], samples))
    job = alone("tied").job(
        models[0],
        str(out / "run"),
        objective="preference",
        max_grad_norm=1e9,
        global_batch_size=1,
        max_steps=2,
        num_train_epochs=2,
        data={"pad_to_multiple_of": 1, "datasets": [{"path": "dummy", "type": kind}]},
        preference={"loss_type": loss, **preference},
    )
    has_reference = job.config.preference.has_reference
    job = replace(job, packed=out / "packed", scores=out / "scores" if has_reference else None)
    [trace] = on_ranks(1, trace_here, job)
    return trace.losses[0], trace.gradients[0]


def assert_equal(found, wanted):
    (loss, gradients), (its_loss, its_gradients) = found, wanted
    assert loss == pytest.approx(its_loss, rel=CLOSE)
    assert gradients.keys() == its_gradients.keys()
    whole = np.sqrt(sum((each**2).sum() for each in its_gradients.values()))
    apart = np.sqrt(sum(((gradients[n] - its_gradients[n]) ** 2).sum() for n in gradients))
    assert whole > 1e-3
    assert apart / whole < CLOSE


@pytest.mark.dist
@pytest.mark.parametrize("loss", OF_PAIRS)
def test_pairs_are_learnt_from_as_trl_does(loss, models, tmp_path):
    kind, told, written = OF_PAIRS[loss]
    trainer = trainer_of(kind, models, tmp_path, told, QUESTIONS)
    its_loss, gradients, batch = loss_and_gradients(trainer)
    samples = list(pairs_in(batch))
    assert_equal(ours(models, tmp_path, samples, loss, written), (its_loss, gradients))


def pairs_in(batch):
    """The samples of a batch of TRL's."""
    if "chosen_input_ids" in batch:
        sides = [
            [
                parted(*row)
                for row in zip(
                    batch[f"{side}_input_ids"], batch[f"{side}_labels"] != -100, strict=True
                )
            ]
            for side in ("chosen", "rejected")
        ]
    else:
        rows = [
            parted(*row) for row in zip(batch["input_ids"], batch["completion_mask"], strict=True)
        ]
        sides = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    for (prompt, chosen), (same, rejected) in zip(*sides, strict=True):
        assert prompt == same
        yield Asked(prompt, (chosen, rejected))


@pytest.mark.dist
def test_judged_answers_are_learnt_from_as_trl_does(models, tmp_path):
    records = {
        "prompt": ["how", "why", "who", "what"],
        "completion": ["so it is", "never", "me and you", "this"],
        "label": [True, False, True, False],
    }
    weights = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8}
    trainer = trainer_of("kto", models, tmp_path, weights, records)
    its_loss, gradients, batch = loss_and_gradients(trainer)
    samples = []
    for index, label in enumerate(batch["label"]):
        prompt, answer = parted(batch["input_ids"][index], batch["completion_mask"][index])
        same, other = parted(batch["KL_input_ids"][index], batch["KL_completion_mask"][index])
        assert prompt == same
        samples.append(Asked(prompt, (answer, other), bool(label)))
    assert_equal(ours(models, tmp_path, samples, "kto", weights), (its_loss, gradients))
