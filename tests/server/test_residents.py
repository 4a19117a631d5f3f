"""Models of several clients on one base: each learns as it would alone, and as others teach it.

PEFT with torch's optimizer, a step of training and the same model without company are the judges.
"""

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from penstock.core.errors import ConfigError
from penstock.engine.resident_steps import NotFiniteError
from penstock.rows.collate import collate
from penstock.server.protocol.commands import Export, Forget
from penstock.server.protocol.results import Passed
from penstock.server.worker.dealing import _row
from penstock.server.worker.samples import samples_of
from tests.ranks import on_ranks
from tests.server.orders import (
    apart,
    data,
    done,
    each_done,
    opening,
    operations,
    passing,
    saved,
    saving,
    stepping,
    write_model,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("base"))


def script(name, out, *, rank, lr, seed):
    """A look, two passes and a step, twice; then a save."""
    steps = [
        order
        for number in range(2)
        for order in (
            passing(name, data(2, seed=seed + 2 * number), forward_only=True),
            passing(name, data(5, seed=seed + 2 * number)),
            passing(name, data(3, seed=seed + 2 * number + 1)),
            stepping(name, lr, grad_clip_norm=1.0, weight_decay=0.1),
        )
    ]
    return [opening(name, rank, seed=seed), *steps, saving(name, out / name)]


def in_turn(one, other):
    """Orders of two scripts, one of each after the other."""
    return [order for pair in zip(one, other, strict=True) for order in pair]


MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def losses_of(results):
    """What passes told, also those that only looked."""
    return [each.metrics["loss:sum"] for each in results if isinstance(each, Passed)]


LAYOUTS = {
    "one process": (1, {}),
    "shard 2, gathered once": (
        2,
        {
            "data_parallel_mode": "fsdp2",
            "data_parallel_shard_size": 2,
            "reshard_after_forward": False,
        },
    ),
    "tp 2": (2, {"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_that_take_turns_end_as_each_would_alone(model, tmp_path, layout):
    world, settings = LAYOUTS[layout]
    both, alone = tmp_path / "both", tmp_path / "alone"
    small = {"rank": 8, "lr": 0.02, "seed": 3}
    large = {"rank": 16, "lr": 0.005, "seed": 4}
    scripts = [
        in_turn(script("a", both, **small), script("b", both, **large)),
        script("a", alone, **small),
        script("b", alone, **large),
    ]
    if world == 1:
        told, *alones = each_done(model, tmp_path, scripts, settings)
    else:
        [told, *alones], *_ = on_ranks(world, each_done, model, tmp_path, scripts, settings)
    for mine, its in zip((told[::2], told[1::2]), alones, strict=True):
        assert losses_of(mine) == pytest.approx(losses_of(its), rel=1e-5)
    for name, rank in (("a", 8), ("b", 16)):
        found = saved(both / name)
        assert apart(found, saved(alone / name)) < 1e-5
        assert {
            tensor.shape[0] for its, tensor in found.items() if its.endswith("lora_A.q_proj")
        } == {rank}


def test_a_smaller_adapter_in_a_wide_base_learns_as_in_one_of_its_own_width(model, tmp_path):
    orders = {
        name: script("a", tmp_path / name, rank=8, lr=0.02, seed=3) for name in ("wide", "own")
    }
    done(model, tmp_path, orders["wide"])
    done(model, tmp_path, orders["own"], lora={"lora_rank": 8})
    assert apart(saved(tmp_path / "wide" / "a"), saved(tmp_path / "own" / "a")) < 1e-5


def test_what_a_smaller_adapter_leaves_of_the_base_stays_zeros_exactly(model, tmp_path):
    workers = operations(model, tmp_path)
    for order in script("a", tmp_path, rank=8, lr=0.02, seed=3):
        workers.do(order)
    factors = {one.name: one.parameter for one in workers.residents.substrate.factors}
    rests = [p[8:] if ".lora_A." in name else p[:, 8:] for name, p in factors.items()]
    assert rests
    assert not any(rest.any() for rest in rests)
    assert all(p.abs().sum() > 0 for p in factors.values())


@pytest.mark.parametrize("form", [{}, {"moe_shared_lora": True}, {"moe_hybrid_shared_lora": True}])
def test_adapters_of_experts_may_be_smaller_than_the_base_has_room_for(tmp_path, form):
    its = write_model(tmp_path / "model", **MIXTURE)
    orders = {
        name: script("a", tmp_path / name, rank=4, lr=0.02, seed=3) for name in ("wide", "own")
    }
    export = Export(model="a", folder=str(tmp_path / "sampler"), dtype="float32")
    done(its, tmp_path, [*orders["wide"], export], lora=form)
    done(its, tmp_path, orders["own"], lora={"lora_rank": 4, **form})
    assert apart(saved(tmp_path / "wide" / "a"), saved(tmp_path / "own" / "a")) < 1e-5
    exported = load_file(tmp_path / "sampler" / "adapter_model.safetensors")
    ranks = {min(tensor.shape) for name, tensor in exported.items() if ".experts." in name}
    assert ranks == {4}


@pytest.mark.parametrize("format", ["nf4", "nvfp4"])
def test_models_share_a_base_that_is_quantised(model, tmp_path, format):
    both, alone = tmp_path / "both", tmp_path / "alone"
    quantised = {"lora": {"enable_qlora": True, "quant_format": format}}
    one = script("a", both, rank=8, lr=0.02, seed=3)
    other = script("b", both, rank=16, lr=0.005, seed=4)
    done(model, tmp_path, in_turn(one, other), **quantised)
    done(model, tmp_path, script("a", alone, rank=8, lr=0.02, seed=3), **quantised)
    assert apart(saved(both / "a"), saved(alone / "a")) < 1e-5


def test_passes_and_a_step_are_a_step_of_training(model, tmp_path):
    given = data(6, seed=9)
    settings = {"max_grad_norm": 1.0, "weight_decay": 0.1}
    workers = operations(model, tmp_path, **settings)
    numbers = {"eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 1.0}
    mine = [opening("a"), passing("a", given, per="token"), stepping("a", 0.02, **numbers)]
    told = [workers.do(order) for order in mine][-1].metrics
    workers.do(saving("a", tmp_path / "mine"))

    engine = operations(model, tmp_path, **settings).residents.substrate.built.engine
    samples = samples_of(passing("a", given), 320)
    for sample in samples:
        sample.targets[sample.told["factors_T"] == 0] = -100
    rows = [[_row(0, samples[:3])], [_row(1, samples[3:])]]
    step = engine.step(collate(rows, pad_to_multiple_of=16).micro_batches(), 0.02, 0)
    assert told["grad_norm"] == pytest.approx(step.grad_norm, rel=1e-5)
    trained = {
        piece.tensor: piece.of(one.parameter.detach())
        for one in engine.layout.trainable
        for piece in one.pieces
    }
    assert apart(saved(tmp_path / "mine"), trained) < 1e-5


def peft_gradients(tuned, given):
    """Of the sum of the samples' losses, each passed by itself."""
    for datum in given:
        ids = torch.tensor(datum.tokens.numpy().astype("int64"))[None]
        targets = torch.tensor(datum.inputs["target_tokens"].numpy())
        weights = torch.tensor(datum.inputs["weights"].numpy())
        losses = F.cross_entropy(tuned(ids).logits[0].float(), targets, reduction="none")
        (losses * weights).sum().backward()


def test_steps_are_those_of_peft_and_torch(model, tmp_path):
    workers = operations(model, tmp_path)
    workers.do(opening("a", 8, alpha=24, seed=5))
    workers.do(Export(model="a", folder=str(tmp_path / "start"), dtype="float32"))
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "start", is_trainable=True)
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    # An eps that no rounding shows beside.
    numbers = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.05}
    judge = torch.optim.AdamW(trained, lr=0.02, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.05)
    for number in range(3):
        given = data(4, seed=20 + number)
        workers.do(passing("a", given))
        told = workers.do(stepping("a", 0.02, grad_clip_norm=0.7, **numbers)).metrics
        peft_gradients(tuned, given)
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.7)
        judge.step()
        judge.zero_grad()
        assert told["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    workers.do(Export(model="a", folder=str(tmp_path / "end"), dtype="float32"))
    mine = load_file(tmp_path / "end" / "adapter_model.safetensors")
    theirs = peft.get_peft_model_state_dict(tuned, save_embedding_layers=False)
    assert apart(mine, theirs) < 1e-5


def test_gradients_of_several_passes_are_those_of_one(model, tmp_path):
    given = data(6, seed=11)
    whole = [opening("a"), passing("a", given), stepping("a"), saving("a", tmp_path / "whole")]
    parts = [
        opening("a"),
        *(passing("a", given[at : at + 2]) for at in range(0, 6, 2)),
        stepping("a"),
        saving("a", tmp_path / "parts"),
    ]
    found = each_done(model, tmp_path, [whole, parts], {})
    norms = [results[-2].metrics["grad_norm"] for results in found]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    # What is nearly nothing moves as far as anything else in Adam's first step.
    assert apart(saved(tmp_path / "whole"), saved(tmp_path / "parts")) < 1e-3


def test_a_pass_that_only_looks_leaves_no_gradients_and_sees_the_same(model, tmp_path):
    workers = operations(model, tmp_path)
    workers.do(opening("a"))
    looked = workers.do(passing("a", data(4), forward_only=True))
    assert all(one.parameter.grad is None for one in workers.residents.substrate.trainable)
    with pytest.raises(ConfigError, match="no gradients"):
        workers.do(stepping("a"))
    learnt = workers.do(passing("a", data(4)))
    assert looked.outputs == learnt.outputs
    assert looked.metrics["loss:sum"] == learnt.metrics["loss:sum"]


def test_gradients_that_are_dropped_are_not_stepped_along(model, tmp_path):
    workers = operations(model, tmp_path)
    for order in (opening("a"), passing("a", data(4)), Forget(model="a")):
        workers.do(order)
    with pytest.raises(ConfigError, match="no gradients"):
        workers.do(stepping("a"))


def test_gradients_that_are_not_finite_move_nothing(model, tmp_path):
    workers = operations(model, tmp_path)
    workers.do(opening("a"))
    workers.do(saving("a", tmp_path / "before"))
    flawed = data(2, advantages=1.0, logprobs=1e4)
    passed = workers.do(passing("a", flawed, loss="importance_sampling"))
    assert not abs(passed.metrics["loss:sum"]) < float("inf")
    with pytest.raises(NotFiniteError, match="left as they were"):
        workers.do(stepping("a"))
    workers.do(saving("a", tmp_path / "after"))
    assert apart(saved(tmp_path / "before"), saved(tmp_path / "after")) == 0
    workers.do(passing("a", data(2)))
    assert workers.do(stepping("a")).metrics["step"] == 1
