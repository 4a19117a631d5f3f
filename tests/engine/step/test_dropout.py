"""What a training step drops, and where: watched at every place that may drop something."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.estimate.machine import check_machine
from penstock.models.layers.dropout import Dropout
from penstock.train.dataloader import read
from penstock.train.metrics.jsonl import read_metrics
from tests.engine import runs
from tests.engine.inputs import MODELS
from tests.engine.loops import decoder_of, each, looked_at, loop_of, step
from tests.ranks import on_ranks
from tests.turns import one_day_in

pytestmark = pytest.mark.dist

HIDDEN, OF_ADAPTERS = 0.3, 0.2
RISING = {"hidden": HIDDEN, "warmup_steps": 4}
DEEPER = {"hidden": HIDDEN, "depth_scaling": True}
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dropout")
    runs.write_rows(folder / "packed", 8)
    runs.write_config(folder / "model")
    return folder


def job(folder, out, **train):
    settings = {
        "data_parallel_mode": "none",
        "enable_gradient_checkpointing": False,
        "data": {"pad_to_multiple_of": 2},
        **train,
    }
    run = runs.run_config(folder / out, folder / "model", **settings)
    return runs.job_of(run, folder / "packed")


def dropped(job):
    """Of each site: the share of its input that it drops in the second step, whether the rest is
    scaled by what is written, and the same in an evaluation."""
    loop = loop_of(job)
    step(loop)
    seen = {}

    def watch(module, arguments, output):
        (x,) = arguments
        gone = (output == 0) & (x != 0)
        scale = torch.where(gone | (x == 0), 1, output / x)
        seen.setdefault(module.site, []).append((gone.float().mean().item(), scale.max().item()))

    for module in decoder_of(loop).modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(watch)
    step(loop)
    in_training = {site: calls[:] for site, calls in seen.items()}
    seen.clear()
    looked_at(loop, read(loop.rows, [[0, 1]], loop.reading))
    return in_training, dict(seen)


def test_sites_drop_as_much_as_is_written_and_nothing_in_an_evaluation(folder):
    adapters = {"enable_lora": True, "lora_target_modules": list(PARTS)}
    jobs = {
        "none": job(folder, "none", lora=adapters),
        "hidden": job(folder, "hidden", lora=adapters, dropout={"hidden": HIDDEN}),
        "ffn": job(folder, "ffn", lora=adapters, dropout={"ffn": HIDDEN}),
        "adapters": job(folder, "adapters", lora={**adapters, "lora_dropout": OF_ADAPTERS}),
        "rising": job(folder, "rising", lora=adapters, dropout=RISING),
        "deeper": job(folder, "deeper", lora=adapters, dropout=DEEPER),
    }
    [found] = on_ranks(1, each, dropped, jobs)
    blocks = {f"model.layers.{n}.{part}" for n in range(2) for part in ("self_attn", "mlp")}
    linears = {f"model.layers.{n}.self_attn.{part}" for n in range(2) for part in PARTS}
    within = {f"model.layers.{n}.mlp.act_fn" for n in range(2)}
    rates = {
        "none": {},
        "ffn": dict.fromkeys(within, HIDDEN),
        "hidden": dict.fromkeys(blocks, HIDDEN),
        "adapters": dict.fromkeys(linears, OF_ADAPTERS),
        # The second of four steps, and the second of two layers.
        "rising": dict.fromkeys(blocks, HIDDEN / 4),
        "deeper": {site: HIDDEN / 2 for site in blocks if ".1." in site},
    }
    for name, (in_training, in_evaluation) in found.items():
        # Without a rate, adapters do not call theirs.
        sites = blocks | within | (linears if name == "adapters" else set())
        assert in_training.keys() == in_evaluation.keys() == sites
        for site, calls in in_training.items():
            rate = rates[name].get(site, 0.0)
            assert len(calls) == 4  # rows of a step
            # Thousands of draws.
            assert sum(share for share, _ in calls) / 4 == pytest.approx(rate, abs=0.03)
            for share, scale in calls:
                assert (share > 0) == (rate > 0)
                assert scale == pytest.approx(1 / (1 - rate), rel=1e-3)
        assert {call for calls in in_evaluation.values() for call in calls} == {(0.0, 1.0)}


def test_dropping_within_experts_is_refused_before_anything_starts(tmp_path):
    for name, refused in (
        ("qwen3-moe", pytest.raises(ConfigError, match="this qwen3_moe has exp")),
        ("qwen3", nullcontext()),
    ):
        model = Path(f"builtin:tiny-{name}")
        with refused:
            check_machine(runs.run_config(tmp_path, model, dropout={"ffn": 0.1}))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("layers of one part", nullcontext()),
        (
            "experts without a gate",
            pytest.raises(ConfigError, match=r"dropout\.ffn is 0\.1, and this nemotron_h has exp"),
        ),
    ],
)
def test_a_hybrid_model_has_experts_only_where_a_layer_has(tmp_path, layers, expected):
    # As transformers writes config.json: the number of experts is there in any case.
    model = runs.write_config(tmp_path / "model", **{"n_routed_experts": 8, **MODELS[layers]})
    run = runs.run_config(tmp_path, model, dropout={"ffn": 0.1})
    with expected:
        check_machine(run)
    balanced = runs.run_config(tmp_path, model, moe_z_loss_coef=0.1)
    with nullcontext() if layers != "layers of one part" else pytest.raises(ConfigError):
        check_machine(balanced)


def results(job):
    """Loss and gradient norm of every step."""
    runs.train_here(job)
    records = list(read_metrics(job.output_dir / "metrics.jsonl"))
    return [(record["loss"], record["grad_norm"]) for record in records]


def test_weights_of_attention_are_dropped_as_much_as_is_written_and_in_training_alone(folder):
    some = {"dropout": {"attention": HIDDEN}}
    jobs = {
        "none": job(folder, "kept"),
        "some": job(folder, "some", **some),
        "recomputed": job(folder, "recomputed", enable_gradient_checkpointing=True, **some),
        "rising": job(folder, "later", dropout={"attention": HIDDEN, "warmup_steps": 2}),
    }
    [found] = on_ranks(1, each, stepped, jobs)
    steps = {name: losses for name, (losses, _) in found.items()}
    for _, evaluated in found.values():
        assert evaluated == pytest.approx(found["none"][1], rel=1e-6)
    assert steps["recomputed"] == steps["some"]
    assert steps["rising"][0] == pytest.approx(steps["none"][0], rel=1e-6)
    assert steps["rising"][1] != pytest.approx(steps["none"][1], rel=1e-6)
    assert steps["some"][0] != pytest.approx(steps["none"][0], rel=1e-6)


def stepped(job):
    """The losses of two steps, and that of an evaluation before them."""
    loop = loop_of(job)
    before = looked_at(loop, read(loop.rows, [[0, 1]], loop.reading))
    return [step(loop)["loss"] for _ in range(2)], before[0]


@one_day_in(2, of=1)
def test_adapters_of_and_beside_experts_drop_alike_where_ranks_share_out_tokens(folder):
    sparse = runs.write_config(
        folder / "sparse",
        model_type="ernie4_5_moe",
        architectures=["Ernie4_5_MoeForCausalLM"],
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=16,
        moe_num_shared_experts=1,
    )
    settings = {
        "model": {"config_path": str(sparse)},
        "dropout": {"hidden": HIDDEN, "attention": HIDDEN},
        "lora": {
            "enable_lora": True,
            "lora_target_modules": [
                *("o_proj", "shared_experts.gate_proj", "mlp.down_proj"),
                *("experts.*.gate_proj", "experts.*.up_proj", "experts.*.down_proj"),
            ],
            "lora_dropout": OF_ADAPTERS,
        },
        "optimizer": "sgd",
        "lr": 0.5,
        "max_steps": 2,
    }
    over_two = {**settings, "tensor_parallel_size": 2}
    over_experts = {
        **settings,
        "data_parallel_mode": "fsdp2",
        "data_parallel_shard_size": 2,
        "expert_parallel_size": 2,
    }
    [alone] = on_ranks(1, results, job(folder, "alone", **settings))
    [found, _] = on_ranks(
        2,
        each,
        results,
        {
            "whole": job(folder, "whole", **over_two),
            "split": job(folder, "split", sequence_parallel=True, **over_two),
            "exchanged": job(folder, "exchanged", **over_experts),
            "gates recomputed": job(
                folder,
                "gates",
                **over_experts,
                enable_gradient_checkpointing=True,
                moe_checkpoint_method="moe_act",
            ),
        },
    )
    for name in found:
        for got, want in zip(found[name], alone, strict=True):
            assert got == pytest.approx(want, rel=1e-5), name
