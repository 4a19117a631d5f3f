"""Models of several clients on one base: each learns as it would alone, and as others teach it.

PEFT with torch's optimizer, a step of training and the same model without company are the judges.
"""

import gc
import weakref
from itertools import pairwise

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.core.errors import ConfigError
from penstock.engine.checkpoint.dcp_io import read_boxes, whole_box
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles
from penstock.engine.multi_lora.optim_step import NotFiniteError
from penstock.rows.collate import collate
from penstock.server.protocol.requests import ZeroGrad
from penstock.server.protocol.results import ForwardBackwardResult, OptimStepResult
from penstock.server.protocol.types import OptimizerConfig
from penstock.server.protocol.worker_commands import (
    CreateModelCommand,
    ExportCommand,
    UnloadModelCommand,
)
from penstock.server.worker.batching import _row
from penstock.server.worker.datums import build_samples
from tests.ranks import on_ranks
from tests.server.workers.orders import (
    MIXTURE,
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
from tests.turns import over_days

pytestmark = [
    pytest.mark.slow,
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]


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


def losses_of(results):
    """What passes told, also those that only looked."""
    return [each.metrics["loss:sum"] for each in results if isinstance(each, ForwardBackwardResult)]


def check_norms(results):
    """Those of types of layers, told with the pass before a step, make up the step's."""
    for passed, stepped in pairwise(results):
        if isinstance(stepped, OptimStepResult):
            parts = [norm for name, norm in passed.metrics.items() if "grad_norm/" in name]
            together = sum(part**2 for part in parts) ** 0.5
            assert len(parts) > 1
            assert stepped.metrics["grad_norm"] == pytest.approx(together, rel=1e-5)


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
    "pp 2": (2, {"pipeline_parallel_size": 2}),
    "ep 2": (2, {"expert_parallel_size": 2, "data_parallel_mode": "fsdp2"}),
}


@pytest.mark.parametrize("layout", over_days(LAYOUTS, 5))
def test_models_that_take_turns_end_as_each_would_alone(model, tmp_path, layout):
    world, settings = LAYOUTS[layout]
    if "expert_parallel_size" in settings:
        model = write_model(tmp_path / "model", **MIXTURE)
    settings = {**settings, "log_grad_norm": "layers"}
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
        check_norms(mine)
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
    factors = {one.name: one.parameter for one in workers.models.substrate.factors}
    rests = [p[8:] if ".lora_A." in name else p[:, 8:] for name, p in factors.items()]
    assert rests
    assert not any(rest.any() for rest in rests)
    assert all(p.abs().sum() > 0 for p in factors.values())


@pytest.mark.parametrize("shared", over_days(("", "moe_shared_lora", "moe_hybrid_shared_lora"), 3))
def test_adapters_of_experts_may_be_smaller_than_the_base_has_room_for(tmp_path, shared):
    form = {shared: True} if shared else {}
    its = write_model(tmp_path / "model", **MIXTURE)
    orders = {
        name: script("a", tmp_path / name, rank=4, lr=0.02, seed=3) for name in ("wide", "own")
    }
    export = ExportCommand(model="a", folder=str(tmp_path / "sampler"), dtype="float32")
    done(its, tmp_path, [*orders["wide"], export], lora=form)
    done(its, tmp_path, orders["own"], lora={"lora_rank": 4, **form})
    assert apart(saved(tmp_path / "wide" / "a"), saved(tmp_path / "own" / "a")) < 1e-5
    exported = load_file(tmp_path / "sampler" / "adapter_model.safetensors")
    ranks = {min(tensor.shape) for name, tensor in exported.items() if ".experts." in name}
    assert ranks == {4}


@pytest.mark.parametrize("format", over_days(("nf4", "nvfp4"), 2))
def test_models_share_a_base_that_is_quantized(model, tmp_path, format):
    both, alone = tmp_path / "both", tmp_path / "alone"
    quantized = {"lora": {"enable_qlora": True, "quant_format": format}}
    one = script("a", both, rank=8, lr=0.02, seed=3)
    other = script("b", both, rank=16, lr=0.005, seed=4)
    done(model, tmp_path, in_turn(one, other), **quantized)
    done(model, tmp_path, script("a", alone, rank=8, lr=0.02, seed=3), **quantized)
    assert apart(saved(both / "a"), saved(alone / "a")) < 1e-5


def test_passes_and_a_step_are_a_step_of_training(model, tmp_path):
    given = data(6, seed=9)
    settings = {"max_grad_norm": 1.0, "weight_decay": 0.1}
    workers = operations(model, tmp_path, **settings)
    numbers = {"eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 1.0}
    mine = [
        opening("a"),
        passing("a", given, loss_reduction="token"),
        stepping("a", 0.02, **numbers),
    ]
    told = [workers.do(order) for order in mine][-1].metrics
    workers.do(saving("a", tmp_path / "mine"))

    engine = operations(model, tmp_path, **settings).models.substrate.built.engine
    samples = build_samples(passing("a", given), 320)
    for sample in samples:
        sample.targets[sample.loss_inputs["factors_T"] == 0] = -100
    rows = [[_row(0, samples[:3])], [_row(1, samples[3:])]]
    step = engine.step(collate(rows, pad_to_multiple_of=16).micro_batches(), 0.02, 0)
    assert told["grad_norm"] == pytest.approx(step.grad_norm, rel=1e-5)
    trained = {
        piece.tensor: piece.view(one.parameter.detach())
        for one in engine.model.trainable
        for piece in one.shards
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
    workers.do(ExportCommand(model="a", folder=str(tmp_path / "start"), dtype="float32"))
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
    workers.do(ExportCommand(model="a", folder=str(tmp_path / "end"), dtype="float32"))
    mine = load_file(tmp_path / "end" / "adapter_model.safetensors")
    theirs = peft.get_peft_model_state_dict(tuned, save_embedding_layers=False)
    assert apart(mine, theirs) < 1e-5


@pytest.mark.parametrize("reduction", ["sum", "token"])
def test_gradients_of_several_passes_are_those_of_one(model, tmp_path, reduction):
    given = data(6, seed=11)
    whole = [
        opening("a"),
        passing("a", given, loss_reduction=reduction),
        stepping("a"),
        saving("a", tmp_path / "whole"),
    ]
    parts = [
        opening("a"),
        *(passing("a", given[at : at + 2], loss_reduction=reduction) for at in range(0, 6, 2)),
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
    assert all(one.parameter.grad is None for one in workers.models.substrate.trainable)
    with pytest.raises(ConfigError, match="no gradients"):
        workers.do(stepping("a"))
    learnt = workers.do(passing("a", data(4)))
    assert looked.outputs == learnt.outputs
    assert looked.metrics["loss:sum"] == learnt.metrics["loss:sum"]


def test_gradients_that_are_dropped_are_not_stepped_along(model, tmp_path):
    workers = operations(model, tmp_path)
    for order in (opening("a"), passing("a", data(4)), ZeroGrad(model="a")):
        workers.do(order)
    with pytest.raises(ConfigError, match="no gradients"):
        workers.do(stepping("a"))


def test_gradients_that_are_not_finite_move_nothing(model, tmp_path):
    workers = operations(model, tmp_path)
    for order in (opening("a"), passing("a", data(2)), stepping("a")):
        workers.do(order)
    # With the optimizer's states, and how many steps it took.
    workers.do(saving("a", tmp_path / "before"))
    flawed = data(2, advantages=1.0, logprobs=1e4)
    passed = workers.do(passing("a", flawed, loss="importance_sampling"))
    assert not abs(passed.metrics["loss:sum"]) < float("inf")
    with pytest.raises(NotFiniteError, match="left as they were"):
        workers.do(stepping("a"))
    workers.do(saving("a", tmp_path / "after"))
    assert apart(everything(tmp_path / "before"), everything(tmp_path / "after")) == 0
    workers.do(passing("a", data(2)))
    assert workers.do(stepping("a")).metrics["step"] == 2


def everything(folder):
    """The tensors of a checkpoint, the optimizer's too."""
    files = CheckpointFiles(folder)
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in files.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    assert any(name.startswith("optimizer.") for name in found)
    read_boxes({name: [whole_box(tensor)] for name, tensor in found.items()}, files)
    return {name: tensor.float() for name, tensor in found.items()}


def test_norms_of_a_whole_mixture_are_told_by_all_types_of_its_layers(tmp_path):
    its = write_model(tmp_path / "model", **MIXTURE)
    orders = [CreateModelCommand(model="a", lora=None), passing("a", data(4)), stepping("a")]
    results = done(its, tmp_path, orders, log_grad_norm="layers", lora={"enable_lora": False})
    check_norms(results)
    found = {name for name in results[1].metrics if "grad_norm/" in name}
    types = ("attention", "embed_tokens", "experts", "lm_head", "norm", "router")
    assert found == {f"grad_norm/{kind}:max" for kind in types}
    assert all(results[1].metrics[name] > 0 for name in found)


def test_without_eps_a_step_is_refused_only_where_it_would_be_divided_by(model, tmp_path):
    workers = operations(model, tmp_path)
    workers.do(
        CreateModelCommand(model="sgd", lora=None, optimizer_config=OptimizerConfig(kind="sgd"))
    )
    workers.do(opening("adam"))
    for name in ("sgd", "adam"):
        workers.do(passing(name, data(2)))
    assert workers.do(stepping("sgd", eps=0.0)).metrics["step"] == 1
    with pytest.raises(ConfigError, match="eps is 0"):
        workers.do(stepping("adam", eps=0.0))
    # What was gathered is still there.
    assert workers.do(stepping("adam")).metrics["step"] == 1


def test_nothing_is_kept_of_a_model_that_was_closed(model, tmp_path):
    workers = operations(model, tmp_path)
    for name in ("a", "b"):
        for order in (opening(name), passing(name, data(2)), stepping(name)):
            workers.do(order)
    workers.do(passing("a", data(2)))
    workers.do(passing("b", data(2)))
    there = workers.models.get("a")
    assert there.weights
    kept = [there, there.optimizer, *there.weights, *there.gradients.values()]
    kept += [
        value
        for states in there.optimizer.state.values()
        for value in states.values()
        if isinstance(value, torch.Tensor)
    ]
    alive = [weakref.ref(each) for each in kept]
    assert len(alive) > 50
    del there, kept
    workers.do(UnloadModelCommand(model="a"))
    gc.collect()
    assert not any(each() is not None for each in alive)


def test_an_optimizer_that_cannot_be_is_refused_and_the_workers_go_on(model, tmp_path):
    workers = operations(model, tmp_path)
    nesterov = OptimizerConfig(kind="sgd", kwargs={"nesterov": True})
    with pytest.raises(ConfigError, match="needs momentum above 0"):
        workers.do(CreateModelCommand(model="a", lora=None, optimizer_config=nesterov))
    with pytest.raises(ConfigError, match="eps is sent with each step"):
        workers.do(
            CreateModelCommand(
                model="a", lora=None, optimizer_config=OptimizerConfig(kwargs={"eps": 0.1})
            )
        )
    workers.do(opening("a"))


@pytest.mark.parametrize("interval", [None, 2])
def test_an_adapter_starts_from_the_seed_that_its_client_gives(model, tmp_path, interval):
    settings = {} if interval is None else {"lora": {"merge_lora_interval": interval}}
    for seed in (3, 4):
        workers = operations(model, tmp_path, seed=3, **settings)
        workers.do(opening("a", seed=seed))
        workers.do(saving("a", tmp_path / f"{seed}"))
    one, other = (saved(tmp_path / seed) for seed in ("3", "4"))
    differing = {name for name, tensor in one.items() if not torch.equal(tensor, other[name])}
    assert differing == {name for name in one if ".lora_A." in name}
