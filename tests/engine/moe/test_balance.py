"""What a run asks of routers and tells of them; on other layouts in `test_invariance.py`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from penstock.core.errors import ConfigError
from penstock.engine.checkpoint.checkpoint_manager import CheckpointManager
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.hf.config import read_hf_config
from penstock.engine.hf.state_dict import in_checkpoint
from penstock.engine.moe.balancing_settings import BIAS_FAMILIES, MOE_FAMILIES
from penstock.engine.moe.routers import Routers
from penstock.models.registry import LANGUAGE_MODELS, get_family
from penstock.pipeline.plan import check_machine
from penstock.rows.reader import PackedRows
from tests.engine import runs
from tests.engine.loops import each, loop_of, parameters_of, step
from tests.models.families import FAMILIES
from tests.models.twins import NEEDED, hf_model
from tests.models.twins import SPARSE as SHAPES
from tests.ranks import on_ranks

LOAD, RATE = 0.5, 0.25
IN_FP16 = {"precision": "fp16_mixed", "enable_mixed_precision": True}
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balance")
    runs.write_rows(folder / "packed", 8)
    for family in ("qwen3_moe", "glm4_moe"):
        hf_model(family, tied=False, vocab_size=runs.VOCAB).save_pretrained(folder / family)
    return folder


def job(folder, out, family="qwen3_moe", **train):
    model = {"model_path": str(folder / family), **train.pop("model", {})}
    settings = {"optimizer": "sgd", "data_parallel_mode": "none", "max_grad_norm": 0, **train}
    run = runs.run_config(folder / out, folder / family, model=model, **settings)
    return runs.job_of(run, folder / "packed")


def told(job):
    """The numbers of the rows of a step, its record, and whether anybody looked at routers."""
    loop = loop_of(job)
    rows = loop.batches.rows(loop.at.cursor).tolist()
    return rows, step(loop), loop.built.engine.part(Routers) is not None


def of_transformers(folder, rows):
    """Of a step with the balance of all its rows: that loss, and the norm of all gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3_moe", dtype=torch.float32)
    packed = PackedRows(folder / "packed" / "data" / "train")
    loss, trained, logits = torch.zeros(()), 0, []
    for number in rows:
        row = packed.row(number)
        ids, labels = (torch.tensor(x, dtype=torch.int64) for x in (row.input_ids, row.labels))
        ends = np.cumsum(row.lengths).tolist()
        for first, end in zip([0, *ends], ends, strict=False):
            out = model(input_ids=ids[None, first:end], use_cache=False, output_router_logits=True)
            targets = labels[first:end]
            summed = torch.nn.functional.cross_entropy(out.logits[0], targets, reduction="sum")
            loss, trained = loss + summed, trained + int((targets != -100).sum())
            logits.append(out.router_logits)
    layers = [torch.cat(layer) for layer in zip(*logits, strict=True)]
    balance = torch.stack(
        [load_balancing_loss_func((layer,), num_experts=8, top_k=3) for layer in layers]  # pyright: ignore[reportArgumentType]
    ).mean()
    z = torch.cat(layers).logsumexp(-1).square().mean()
    (loss / trained + LOAD * balance).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return (loss / trained).item(), balance.item(), z.item(), norm.item()


@pytest.mark.dist
@pytest.mark.slow
def test_losses_of_routers_are_asked_for_and_told_as_is_written(folder):
    model_says = {"output_router_logits": True, "router_aux_loss_coef": LOAD}
    whole = {"moe_global_load_balancing": True}
    jobs = {
        name: job(folder, name, **train)
        for name, train in {
            "unset": {},
            "off": {"log_router_stats": False},
            "the model's": {"model": {"foundation": model_says}},
            "not the model's": {"model": {"foundation": model_says}, "moe_aux_loss_coef": 0},
            "of rows": {"moe_aux_loss_coef": LOAD},
            "of steps": {"moe_aux_loss_coef": LOAD, **whole},
            "in fp16": {"moe_aux_loss_coef": LOAD, **whole, **IN_FP16},
            "z": {"moe_z_loss_coef": 0.1},
        }.items()
    }
    [found] = on_ranks(1, each, told, jobs)
    records = {name: record for name, (_, record, _) in found.items()}
    assert [name for name, (_, _, looked) in found.items() if not looked] == ["off"]
    assert {name for name, record in records.items() if "aux_loss" in record} == {
        *("the model's", "of rows", "of steps", "in fp16"),
    }
    assert {name for name, record in records.items() if "z_loss" in record} == {"z"}
    # The loss is that of the tokens alone, whatever else moves weights.
    in_fp16 = records.pop("in fp16")
    assert len({record["loss"] for record in records.values()}) == 1
    norms = {name: record["grad_norm"] for name, record in records.items()}
    assert norms["unset"] == norms["off"] == norms["not the model's"]
    assert norms["the model's"] == norms["of rows"]
    assert len(set(norms.values())) == 4
    loss, balance, z, norm = of_transformers(folder, found["of steps"][0])
    record = records["of steps"]
    assert record["loss"] == pytest.approx(loss, rel=1e-5)
    assert record["aux_loss"] == pytest.approx(balance, rel=1e-5)
    assert record["grad_norm"] == pytest.approx(norm, rel=1e-5)
    # Ten bits of a mantissa. Gradients of the balance are scaled as those of the tokens are.
    assert in_fp16["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert abs(norms["unset"] - norm) > 3e-3 * norm
    assert records["z"]["z_loss"] == pytest.approx(z, rel=1e-5)
    # Single rows are less even than all of them.
    assert records["of rows"]["aux_loss"] > balance
    assert "routers" not in records["off"]
    routers = records["unset"]["routers"]
    assert routers["layers"] == [0, 2]
    for at, counts in enumerate(routers["counts"]):
        assert sum(counts) == 3 * record["tokens"]
        assert (routers["most"][at], routers["least"][at]) == (max(counts), min(counts))
        assert routers["imbalance"][at] == pytest.approx(max(counts) / np.mean(counts), rel=1e-5)
        assert 0 < routers["entropy"][at] < 1


def dtypes(job):
    return {p.name: p.parameter.dtype for p in loop_of(job).built.engine.model.params}


@pytest.mark.dist
def test_routers_that_compute_in_fp32_stay_in_it_where_weights_are_in_bf16(folder):
    [found] = on_ranks(1, dtypes, job(folder, "bf16", "glm4_moe", precision="bf16"))
    routers = {name for name in found if ".mlp.gate." in name}
    assert routers
    assert {name for name, dtype in found.items() if dtype == torch.float32} == routers
    assert {found[name] for name in found.keys() - routers} == {torch.bfloat16}


def moved(job):
    """What experts were chosen by before and after a step, the step's record, and what is saved."""
    loop = loop_of(job)
    before = parameters_of(loop)
    record = step(loop)
    CheckpointManager(job.output_dir, loop.built.train_state, init_process_group(60)).save(
        1, {"step": 1}
    )
    return before, parameters_of(loop), record


@pytest.mark.dist
@pytest.mark.parametrize(
    "shape", [{}, pytest.param({"data_parallel_mode": "fsdp2"}, marks=pytest.mark.slow)], ids=str
)
def test_biases_move_towards_experts_that_got_few_tokens_and_are_saved(folder, shape, request):
    name = f"biases {request.node.name}"
    made = job(folder, name, "glm4_moe", moe_bias_update_rate=RATE, **shape)
    world = 2 if shape else 1
    before, after, record = on_ranks(world, moved, made)[0]
    hf_config = read_hf_config(str(folder / "glm4_moe"), {})
    family = get_family(hf_config)
    names = family.weight_map(family.read(hf_config))
    reader = CheckpointReader(folder / name / "global_step_1")
    stored = in_checkpoint(reader, names).read([BIAS.format(layer) for layer in (1, 2)])
    assert record["routers"]["layers"] == [1, 2]
    for layer, counts in zip((1, 2), record["routers"]["counts"], strict=True):
        bias = BIAS.format(layer)
        wanted = [RATE if n < np.mean(counts) else -RATE * (n > np.mean(counts)) for n in counts]
        assert (after[bias] - before[bias]).tolist() == pytest.approx(wanted, abs=1e-6)
        assert torch.equal(stored[bias], torch.tensor(after[bias]))


@pytest.mark.parametrize(
    ("family", "asked", "reason"),
    [
        ("qwen3", {"moe_aux_loss_coef": 0.1}, "moe_aux_loss_coef is 0.1, and the model has no exp"),
        ("qwen3", {"moe_z_loss_coef": 0.1}, "moe_z_loss_coef is 0.1, and the model has no experts"),
        ("qwen3", {"moe_global_load_balancing": True}, "is true, and the model has no experts"),
        ("qwen3-moe", {"moe_global_load_balancing": True}, "moe_aux_loss_coef is unset"),
        ("qwen3-moe", {"moe_bias_update_rate": 0.1}, "qwen3_moe are not chosen by a bias"),
    ],
    ids=str,
)
def test_what_routers_cannot_do_is_refused_before_anything_starts(tmp_path, family, asked, reason):
    model = Path(f"builtin:tiny-{family}")
    run = runs.run_config(tmp_path, model, **asked)
    with pytest.raises(ConfigError, match=reason):
        check_machine(run)
    run = runs.run_config(tmp_path, model, moe_aux_loss_coef=0)
    check_machine(run)


def test_the_families_with_experts_and_with_biases_are_those_that_are_listed():
    sizes = {"vocab_size": 8, "hidden_size": 48, "intermediate_size": 16, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 8}
    found = {
        name: family.read({**sizes, **NEEDED.get(name, {}), **SHAPES.get(name, {})}).experts
        for name, family in {**FAMILIES, **LANGUAGE_MODELS}.items()
    }
    assert {name for name, experts in found.items() if experts} == set(MOE_FAMILIES)
    assert {n for n, experts in found.items() if experts and experts.selection_bias} == set(
        BIAS_FAMILIES
    )
