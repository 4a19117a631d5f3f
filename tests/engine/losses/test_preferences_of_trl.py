"""The losses of preferences and their gradients, as TRL computes them for the same batch."""

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from penstock.config.schema.preference import PreferenceConfig
from penstock.losses.preference import PreferenceInputs, preference_losses
from penstock.pack.plan_rows import build_row_samples
from penstock.pack.settings import PackSettings
from penstock.pack.shards import write_shard
from penstock.rows.bin_plan import PackingPlan
from penstock.rows.prepared import PreparedSamples
from penstock.rows.reader import PackedRows
from penstock.rows.ref_logprobs import write_scores
from penstock.rows.tokenizer import byte_tokenizer
from tests.engine import loops, runs
from tests.engine.inputs import MODELS, SHAPE
from tests.engine.laid import alone
from tests.engine.losses.answering import Asked, scores_of, write_answers, write_reference
from tests.engine.traces import trace_here
from tests.ranks import on_ranks
from tests.stages.pack.test_preference_samples import branches, stored

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CLOSE = 1e-5
"""Sums of fp32 numbers in another order."""

QUESTIONS = {
    "prompt": ["q: why", "w", "how, then? "],
    "chosen": ["yes, it is", "no", "so it goes"],
    "rejected": ["never", "maybe so, maybe not", "go"],
}
OF_PAIRS = {
    "sigmoid": ("dpo", {"loss_type": ["sigmoid"], "beta": 0.3}, {"beta": 0.3}),
    "hinge": ("dpo", {"loss_type": ["hinge"], "beta": 0.3}, {"beta": 0.3}),
    "ipo": ("dpo", {"loss_type": ["ipo"], "beta": 0.2}, {"beta": 0.2}),
    "nca_pair": ("dpo", {"loss_type": ["nca_pair"], "beta": 0.3}, {"beta": 0.3}),
    "sppo_hard": ("dpo", {"loss_type": ["sppo_hard"], "beta": 0.3}, {"beta": 0.3}),
    "sigmoid, sft": (
        "dpo",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 0.25], "beta": 0.3},
        {"beta": 0.3, "pref_loss_ratio": 0.5, "sft_loss_ratio": 0.25},
    ),
    "orpo": (
        "orpo",
        {"beta": 0.25},
        {"pref_loss_ratio": 0.25, "sft_loss_scope": "prompt_and_answer"},
    ),
    "simpo": (
        "cpo",
        {
            **{"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0},
            "label_smoothing": 0.1,
        },
        {"beta": 2.0, "simpo_gamma": 0.7, "label_smoothing": 0.1},
    ),
    "cpo": (
        "cpo",
        {"loss_type": "sigmoid", "beta": 0.3, "cpo_alpha": 0.5, "label_smoothing": 0.1},
        {"beta": 0.3, "sft_loss_ratio": 0.5, "label_smoothing": 0.1},
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

    told = dict(told)
    trainer, config = (the_class(kind, f"{kind.upper()}{name}") for name in ("Trainer", "Config"))
    _, model, other = models
    model = type(model).from_pretrained(models[0] / "tied", dtype=torch.float32)
    args = config(
        output_dir=str(out / "trl"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=told.pop("batch", len(records["prompt"])),
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
    job = replace(
        job, packed_dir=out / "packed", ref_logprobs=out / "scores" if has_reference else None
    )
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
    assert_equal(
        ours(models, tmp_path, samples, loss.partition(",")[0], written), (its_loss, gradients)
    )


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


STEPS, BATCH, RATE = 10, 4, 0.2


LIMIT = 15
"""Tokens of a sequence of KTO."""


def random_texts(*names: str) -> dict[str, list]:
    """Columns of texts of 2 to 12 letters."""
    rng, letters = np.random.default_rng(0), list("abcdefgh ,.")
    sizes = rng.integers(2, 13, size=(len(names), STEPS * BATCH))
    return {
        name: ["".join(rng.choice(letters, size)) for size in row]
        for name, row in zip(names, sizes, strict=True)
    }


def ten_steps_here(job) -> tuple[list[int], list[float]]:
    """The row of each step, and its loss."""
    loop, rows, losses = loops.loop_of(job), [], []
    for _ in range(STEPS):
        [row] = loop.batches.rows(loop.at.cursor).tolist()
        rows.append(row)
        losses.append(loops.step(loop)["loss"])
    return rows, losses


@torch.no_grad()
def score(model, ids, labels) -> float:
    """The log-probability of what is trained of an answer; labels are shifted."""
    log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    places = [place for place, label in enumerate(labels) if label >= 0]
    return log_probs[places, [labels[place] for place in places]].double().sum().item()


def ten_steps(models, out, kind, samples, packs, preference):
    """Of a run on samples as they are prepared, each batch a row."""
    prepared = PreparedSamples(stored(out / "prepared", kind, samples).path, "train")
    form = build_row_samples(prepared, PackSettings(**packs))
    bins = PackingPlan(np.arange(STEPS * BATCH), np.arange(BATCH, STEPS * BATCH + 1, BATCH))
    folder = out / "packed" / "data" / "train"
    folder.mkdir(parents=True)
    write_shard(form, bins, form.sample_lengths(), folder / "rows-00000-of-00001.arrow")
    found = branches(PackedRows(folder))
    scores = [[score(models[2], *branch) for branch in both[:2]] for both in found.values()]
    write_scores(out / "scores", list(found), np.array(scores))
    job = alone("tied").job(
        models[0],
        str(out / "run"),
        objective="preference",
        lr=RATE,
        lr_decay_style="constant",
        max_grad_norm=1e9,
        global_batch_size=1,
        max_steps=STEPS,
        data={"pad_to_multiple_of": 1, "datasets": [{"path": "dummy", "type": kind}]},
        preference=preference,
    )
    has_reference = job.config.preference.has_reference
    job = replace(
        job, packed_dir=out / "packed", ref_logprobs=out / "scores" if has_reference else None
    )
    [found] = on_ranks(1, ten_steps_here, job)
    return found


def losses_of(trainer, order: list[int]) -> list[float]:
    """Of its ten steps, the batches of its data taken in this order."""
    trainer.train_dataset = trainer.train_dataset.select(
        [BATCH * batch + place for batch in order for place in range(BATCH)]
    )
    computed, found = trainer.compute_loss, []

    def kept(*arguments, **named):
        loss = computed(*arguments, **named)
        found.append(loss.item())
        return loss

    trainer.compute_loss = kept
    trainer.train()
    return found


OF_TEN_STEPS = {
    "batch": BATCH,
    "optim": "sgd",
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1e9,
    "max_steps": STEPS,
    "logging_steps": 1,
    "save_strategy": "no",
    "train_sampling_strategy": "sequential",
}


@pytest.mark.dist
def test_ten_steps_of_orpo_are_those_of_trl(models, tmp_path):
    trainer = trainer_of(
        "orpo",
        models,
        tmp_path,
        {"beta": 0.4, **OF_TEN_STEPS},
        random_texts("prompt", "chosen", "rejected"),
    )
    samples = [
        [(row[f"{side}_input_ids"], row[f"{side}_labels"]) for side in ("chosen", "rejected")]
        for row in trainer.train_dataset
    ]
    preference = {"pref_loss_ratio": 0.4, "sft_loss_scope": "prompt_and_answer"}
    wanted: list[float] = []
    for shares in (True, False):
        order, losses = ten_steps(
            models,
            tmp_path / str(shares),
            "preference",
            samples,
            {"share_prompts": shares},
            {"loss_type": "orpo", **preference},
        )
        wanted = wanted or losses_of(trainer, order)
        assert losses == pytest.approx(wanted, rel=CLOSE)


@pytest.mark.dist
def test_ten_steps_of_kto_are_those_of_trl(models, tmp_path):
    records = random_texts("prompt", "completion")
    # Samples fit the limit, and some mismatched pairs do not.
    for place, prompt in enumerate(records["prompt"]):
        records["completion"][place] = records["completion"][place][: LIMIT - 1 - len(prompt)]
    records["label"] = [number % 3 > 0 for number in range(STEPS * BATCH)]
    weights = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8}
    limit = {"max_length": LIMIT}
    trainer = trainer_of("kto", models, tmp_path, {**weights, **limit, **OF_TEN_STEPS}, records)
    samples = []
    for row in trainer.train_dataset:
        prompt, answer = row["prompt_ids"], row["completion_ids"]
        samples.append(((prompt + answer, [-100] * len(prompt) + answer), row["label"]))
    packs = {"kl_pairing": "rotate", "kl_rotation_size": BATCH, "kl_max_len": LIMIT}
    order, losses = ten_steps(
        models, tmp_path, "kto", samples, packs, {"loss_type": "kto", **weights}
    )
    assert losses == pytest.approx(losses_of(trainer, order), rel=CLOSE)
    kl = [record["kl"] for record in trainer.state.log_history if "kl" in record]
    assert sum(each > 0.1 for each in kl) > 2


def test_odds_near_certainty_in_float32_are_those_of_trl_in_float64():
    log1mexp = importlib.import_module("trl.experimental.orpo.orpo_trainer").log1mexp
    near = torch.tensor([-2e-7, -1e-6, -1e-4, -1e-2, -0.5, -0.69, -0.7, -2.0, -9.0, -40.0])
    ratios_DA = torch.cartesian_prod(near, near).requires_grad_()
    losses = preference_losses(PreferenceInputs(ratios_DA), PreferenceConfig(loss_type="orpo"))
    losses.sum().backward()
    wide_DA = ratios_DA.detach().double().requires_grad_()
    chosen_D, rejected_D = (wide_DA - log1mexp(wide_DA)).unbind(1)
    wanted = -torch.nn.functional.logsigmoid(chosen_D - rejected_D)
    wanted.sum().backward()
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-6)
    assert ratios_DA.grad is not None
    torch.testing.assert_close(ratios_DA.grad.double(), wide_DA.grad, rtol=1e-5, atol=1e-6)
