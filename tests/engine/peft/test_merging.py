"""Adapters that become part of the weights every so many steps, judged by PEFT's merging and by
products that are written out."""

from itertools import combinations
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from penstock.adapters.names import EMBEDDING, parse_lora_name
from penstock.core.errors import ArtifactError
from penstock.rows.reader import PackedRows
from tests.engine import runs
from tests.engine.inputs import write_bases
from tests.engine.loops import each, loop_of, parameters_of, save, step
from tests.engine.traces import loss_of_transformers
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]

RANK, ALPHA, LR = 4, 6, 0.3
ADAPTED = {"enable_lora": True, "lora_rank": RANK, "lora_alpha": ALPHA}
MERGED = {**ADAPTED, "merge_lora_interval": 2}
# Roundings of weights to fp32 at every merge, and of sums of products that are small beside these,
# whose order differs between processors.
RELATIVE = 2e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merging")
    runs.write_rows(folder / "packed", 16)
    write_bases(folder)
    return folder


def job_of(folder, out, lora, base="dense", **train):
    settings = {"optimizer": "sgd", "lr": LR, "max_grad_norm": 0, "weight_decay": 0, **train}
    run = runs.run_config(
        folder / out,
        folder / base,
        model={"model_path": str(folder / base)},
        lora=lora,
        data_parallel_mode="none",
        **settings,
    )
    return runs.job_of(run, folder / "packed")


def seen(job, steps=2):
    """The rows of each step, the parameters before the first one and after each, and how many steps
    the optimizer knows of each parameter then."""
    loop = loop_of(job)
    rows, weights, known = [], [parameters_of(loop)], [{}]
    states = loop.built.engine.optimizer.state
    for _ in range(steps):
        rows.append(loop.batches.rows(loop.at.cursor).tolist())
        step(loop)
        weights.append(parameters_of(loop))
        of_each = {
            local_param.name: states.get(local_param.parameter)
            for local_param in loop.built.train_state.params
        }
        known.append({name: int(state["step"]) for name, state in of_each.items() if state})
    return rows, weights, known


def far(got, want):
    """How far an array is from another, relative to it."""
    return np.linalg.norm(got - want) / np.linalg.norm(want)


TARGETS = ["k_proj", "v_proj", "o_proj", "down_proj", "embed_tokens", "lm_head"]


def bearing_factors(model, weights):
    """PEFT's model around that one, with factors as ours have them."""
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS)
    )
    ours = {
        (factor.hf_module, factor.side): torch.tensor(array)
        for name, array in weights.items()
        if (factor := parse_lora_name(name))
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                layer, _, end = name.removeprefix("base_model.model.").partition(".lora_")
                parameter.copy_(ours.pop((layer, f"lora_{'A' if 'A' in end else 'B'}")))
    assert not ours
    return model


@pytest.mark.slow
def test_weights_are_those_of_a_loop_that_merges_with_peft(folder):
    job = job_of(folder, "merged", {**MERGED, "lora_target_modules": TARGETS})
    [(rows, weights, _)] = on_ranks(1, seen, job, 4)
    packed = PackedRows(folder / "packed" / "data" / "train")
    first = transformers.AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)
    whole: Any = first
    model: Any = first
    for number, step_rows in enumerate(rows):
        if number % 2 == 0:
            model = bearing_factors(whole, weights[number])
        loss_of_transformers(model, packed, step_rows).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(LR * parameter.grad)
        model.zero_grad()
        if number % 2 == 1:
            whole = model.merge_and_unload()
            moved = 0
            for name, parameter in whole.named_parameters():
                ours = weights[number + 1][name]
                assert far(ours, parameter.detach().numpy()) <= RELATIVE, name
                moved += far(ours, weights[0][name]) > 1e-3
            assert moved == 2 * 4 + 2, "all that is adapted has changed, and nothing else"
    starts = [weights[number] for number in (0, 2, 4)]
    for name in starts[0]:
        if (factor := parse_lora_name(name)) is None:
            continue
        of_each = [start[name] for start in starts]
        if factor.side == ("lora_A" if factor.is_embedding else "lora_B"):
            assert not np.any(of_each), f"{name} does not start at zero"
        else:
            assert all(far(one, other) > 0.5 for one, other in combinations(of_each, 2)), name
            if not factor.is_embedding:
                ends = [np.abs(array).max() * array.shape[1] ** 0.5 for array in of_each]
                assert all(0.8 < end <= 1 for end in ends), name


FORMS = {
    "some": ("experts", {"lora_target_modules": ["v_proj", "experts.*.up_proj"]}),
    "all": ("experts", {"lora_target_modules": ["all-linear", "lm_head", "embed_tokens"]}),
    "shared": ("experts", {"moe_shared_lora": True, "use_rslora": True}),
    "half shared": ("experts", {"moe_hybrid_shared_lora": True}),
    "in one": ("sinks", {"lora_bias": "lora_only"}),
    "in one, shared": ("sinks", {"moe_shared_lora": True}),
}


def merged_by_hand(weights, scale):
    """Every weight with its product, in fp64."""
    made = {
        name: array.astype(np.float64)
        for name, array in weights.items()
        if not parse_lora_name(name)
    }
    for name, array in weights.items():
        factor = parse_lora_name(name)
        if factor is None or factor.side != "lora_A":
            continue
        b = weights[name.replace("lora_A", "lora_B")].astype(np.float64)
        product = scale * (b @ array.astype(np.float64))
        if factor.hf_module == EMBEDDING:
            made[f"{EMBEDDING}.weight"] += product.T
        elif not factor.is_expert:
            made[f"{factor.hf_module}.weight"] += product
        elif (fused := factor.hf_module.replace(".*", "")) in made:
            made[fused] += np.swapaxes(product, -1, -2)
        else:
            for number in range(8):
                its = product[number] if product.ndim == 3 else product
                made[f"{factor.hf_module.replace('*', str(number))}.weight"] += its
    return made


@one_day_in(3, of=2)
def test_adapters_of_every_form_become_part_of_their_weights(folder):
    jobs = {
        f"{form} {kind}": job_of(folder, f"{form} {kind}", {**lora, **written}, base)
        for form, (base, written) in FORMS.items()
        for kind, lora in (("apart", ADAPTED), ("merged", MERGED))
    }
    [found] = on_ranks(1, each, seen, jobs)
    for form, (_, written) in FORMS.items():
        apart, merged = found[f"{form} apart"][1][2], found[f"{form} merged"][1][2]
        scale = ALPHA / (RANK**0.5 if "use_rslora" in written else RANK)
        by_hand = merged_by_hand(apart, scale)
        for name, want in by_hand.items():
            assert far(merged[name], want) <= RELATIVE, f"{form}: {name}"
            if np.array_equal(want, apart[name]):
                assert np.array_equal(merged[name], want), f"{form}: {name} bears no adapter"
        assert sum(far(apart[name], want) > 1e-3 for name, want in by_hand.items()) >= 4


def test_after_every_merge_adapters_start_from_numbers_that_none_had_before(folder):
    job = job_of(folder, "restarted", {**MERGED, "merge_lora_interval": 1})
    [(_, weights, _)] = on_ranks(1, seen, job, 3)
    factors = [name for name in weights[0] if parse_lora_name(name)]
    assert factors
    for name in factors:
        starts = [each[name] for each in weights]
        if "lora_B" in name:
            assert not np.any(starts), name
        else:
            assert all(far(one, other) > 0.5 for one, other in combinations(starts, 2)), name


def test_the_optimizer_forgets_adapters_alone_at_a_merge_if_that_is_written(folder):
    lora = {**MERGED, "lora_bias": "all"}
    jobs = {
        name: job_of(folder, name, {**lora, **written}, optimizer="adamw", lr=0.01)
        for name, written in (("kept", {}), ("forgotten", {"reset_optimizer_on_merge": True}))
    }
    [found] = on_ranks(1, each, after_a_merge, jobs)
    for name, (weights, known) in found.items():
        biases = {n for n in known[1] if n.endswith(".bias")}
        assert known[1] == dict.fromkeys(known[1], 1)
        assert known[2] == dict.fromkeys(known[1] if name == "kept" else biases, 2)
        assert biases < known[1].keys()
        # The first update of an Adam is as long as the rate, whatever the gradient.
        updates = [np.abs(array).ravel() for n, array in weights[3].items() if "lora_B" in n]
        lengths = np.median(np.concatenate(updates))
        assert (abs(lengths - 0.01) < 1e-5) == (name == "forgotten")


def after_a_merge(job):
    """What is seen in three steps, but for the rows."""
    return seen(job, 3)[1:]


def kinds(saving, others):
    """Checkpoints of some runs, and what others say that are told to go on from them."""
    for job in saving:
        save(loop_of(job))
    said = []
    for job in others:
        try:
            loop_of(job)._resume()
        except ArtifactError as error:
            said.append(str(error))
    return said


def test_a_checkpoint_of_another_kind_is_refused(folder):
    lora = {"apart": ADAPTED, "merged": MERGED, "all": {}}
    saving = [job_of(folder, f"saved {kind}", written) for kind, written in lora.items()]
    pairs = [(here, there) for here in lora for there in lora if here != there]
    others = [
        job_of(
            folder,
            f"{here} of {there}",
            lora[here],
            load_checkpoint_path=str(folder / f"saved {there}" / "checkpoints" / "global_step_0"),
        )
        for here, there in pairs
    ]
    words = {
        "apart": "adapters only",
        "merged": "a model with merged adapters",
        "all": "a full model",
    }
    [said] = on_ranks(1, kinds, saving, others)
    assert len(said) == len(pairs)
    for (here, there), text in zip(pairs, said, strict=True):
        assert f"holds {words[there]}, and this run trains {words[here]}" in text
