"""What the settings of a run do to it: its model, its adapters, its checkpoints, what it says."""

import json
import os
import re
from contextlib import redirect_stderr
from io import StringIO
from threading import current_thread, main_thread

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from penstock.core.errors import CapabilityError
from penstock.engine.checkpoint import checkpoint_manager
from penstock.engine.checkpoint.folders import read_state
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles
from penstock.pipeline.plan import check_machine
from penstock.train.metrics.jsonl import read_metrics
from penstock.train.rank import run_by_hand
from tests.engine import runs
from tests.engine.checkpoint.test_resume import train_until
from tests.engine.loops import (
    before_each_update,
    decoder_of,
    each,
    gradients_of,
    loop_of,
    parameters_of,
    step,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.dist

job = runs.short_job


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    runs.write_rows(folder / "packed", 10)
    runs.write_config(folder / "model")
    runs.write_config(folder / "other", hidden_size=16)
    return folder


def shapes(job):
    """Of every parameter, by name."""
    [model] = loop_of(job).built.engine.model.parts
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_the_model_is_the_one_that_is_configured(folder):
    models = {
        "fused": {},
        "apart": {"merge_qkv": False},
        "three layers": {"foundation": {"num_hidden_layers": 3}},
        "narrow": {"config_path": str(folder / "other")},
        "of transformers": {"backend": "transformers"},
    }
    jobs = {name: job(folder, name, model=model) for name, model in models.items()}
    [found] = on_ranks(1, each, shapes, jobs)
    layer = "model.layers.0.self_attn"
    assert found["fused"][f"{layer}.qkv_proj.weight"] == (64, 32)  # 4 heads and twice 2, of 8
    assert f"{layer}.q_proj.weight" not in found["fused"]
    assert found["apart"][f"{layer}.q_proj.weight"] == (32, 32)
    assert found["apart"][f"{layer}.v_proj.weight"] == (16, 32)
    assert f"{layer}.qkv_proj.weight" not in found["apart"]
    norms = {f"model.layers.{index}.input_layernorm.weight" for index in range(3)}
    assert norms & found["fused"].keys() < norms == norms & found["three layers"].keys()
    assert found["narrow"]["model.embed_tokens.weight"] == (runs.VOCAB, 16)
    # Its projections are apart whatever is merged in ours.
    assert not any(name.endswith("qkv_proj.weight") for name in found["of transformers"])
    assert (32, 32) in found["of transformers"].values()


class Fused(TorchFunctionMode):
    """Counts calls of PyTorch's fused attention."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.calls += function is torch.nn.functional.scaled_dot_product_attention
        return function(*arguments, **(options or {}))


def fused_calls(job):
    loop = loop_of(job)
    with Fused() as fused:
        step(loop)
    return fused.calls


def test_attention_runs_on_the_backend_that_is_named(folder):
    jobs = {
        str(name): job(folder, f"attention {name}", model={"attn_implementation": name})
        for name in ("eager", "sdpa", None)
    }
    [found] = on_ranks(1, each, fused_calls, jobs)
    assert found["eager"] == 0
    assert found["sdpa"] == found["None"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is refused")
def test_a_backend_that_cannot_run_here_is_refused(folder):
    made = job(folder, "native", model={"attn_implementation": "native"})
    with pytest.raises(CapabilityError, match="attn_implementation is native, which needs a CUDA"):
        check_machine(made.config)


def adapters(job):
    """Shapes of what is trained, and its gradients in the first step."""
    loop = loop_of(job)
    seen = before_each_update(loop, lambda: gradients_of(loop))
    step(loop)
    trained = {n: tuple(p.shape) for n, p in decoder_of(loop).named_parameters() if p.requires_grad}
    return trained, seen[0]


def test_adapters_have_the_rank_the_targets_and_the_weight_that_are_written(folder):
    targets = {"lora_target_modules": ["o_proj", "fc1", "v_proj"], "missing_targets": "skip"}
    lora = {"enable_lora": True, **targets, "lora_rank": 4}
    settings = {
        "off": {"enable_lora": False},
        "alpha 4": {**lora, "lora_alpha": 4},
        "alpha 12": {**lora, "lora_alpha": 12},
        "all": {"enable_lora": True},
    }
    jobs = {
        name: job(folder, name, lora=written, max_grad_norm=0) for name, written in settings.items()
    }
    [found] = on_ranks(1, each, adapters, jobs)
    assert not any("lora" in name for name in found["off"][0])
    trained, gradients = found["alpha 4"]
    parts = {"o_proj": (32, 32), "qkv_proj": (32, 16)}
    leaves = {"o_proj": "o_proj", "qkv_proj": "v_proj"}
    assert trained == {
        f"model.layers.{index}.self_attn.{module}.lora_{side}.{leaves[module]}": (
            (4, width) if side == "A" else (out, 4)
        )
        for index in range(2)
        for module, (width, out) in parts.items()
        for side in "AB"
    }
    # The second factor starts at zero, so its gradient alone says how much the adapter weighs.
    for name, gradient in gradients.items():
        if "lora_B" in name:
            assert np.abs(gradient).max() > 0
            three = found["alpha 12"][1][name]
            np.testing.assert_allclose(three, 3 * gradient, rtol=1e-4, atol=1e-8)
    everywhere = {name.split(".lora_")[0].rpartition(".")[2] for name in found["all"][0]}
    assert everywhere == {"qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {shape[0] for name, shape in found["all"][0].items() if "lora_A" in name} == {16}


def test_a_run_with_adapters_saves_them_alone(folder):
    made = job(folder, "adapters saved", lora={"enable_lora": True})
    [facts] = on_ranks(1, runs.train_here, made)
    saved = CheckpointReader(made.output_dir / facts["checkpoint"]).shapes()
    assert saved
    assert all("lora_" in name for name in saved)


SAVED = {
    "every two steps": ({"save_steps": 2}, [2, 4, 5]),
    "at the end": ({}, [5]),
    "every epoch": ({"save_epochs": 1.0}, [2, 4, 5]),
    "twice an epoch": ({"save_epochs": 0.5}, [1, 2, 3, 4, 5]),
    "every epoch and a half": ({"save_epochs": 1.5}, [3, 5]),
    "every step, the last two kept": ({"save_steps": 1, "save_total_limit": 2}, [4, 5]),
}


def test_checkpoints_are_saved_as_often_as_asked(folder):
    # Ten rows, four to a step: two steps make an epoch.
    jobs = {what: job(folder, what, max_steps=5, **train) for what, (train, _) in SAVED.items()}
    on_ranks(1, each, runs.train_here, jobs)
    for what, (_, steps) in SAVED.items():
        root = jobs[what].output_dir / "checkpoints"
        found = sorted(int(path.name.removeprefix("global_step_")) for path in root.iterdir())
        assert found == steps, what
        assert all((root / f"global_step_{at}" / "COMPLETE").is_file() for at in steps)


def writers(job):
    """The threads that write the checkpoints of a run."""
    write, threads = checkpoint_manager.write_boxes, []
    checkpoint_manager.write_boxes = lambda *given: (
        threads.append(current_thread()) or write(*given)
    )
    runs.train_here(job)
    checkpoint_manager.write_boxes = write
    return [thread is main_thread() for thread in threads]


def test_checkpoints_are_written_behind_training_when_asked(folder):
    jobs = {
        str(asked): job(folder, f"save_async {asked}", max_steps=2, save_steps=1, save_async=asked)
        for asked in (True, False)
    }
    [found] = on_ranks(1, each, writers, jobs)
    assert found == {"True": [False, False], "False": [True, True]}


def forgetful(jobs):
    """Two starts of each run, the second from the checkpoint of which step; and what a run comes to
    whose optimizer forgets all there."""
    stops = set()
    for its in jobs.values():
        assert train_until(its, 2) is None
        [found] = (its.output_dir / "checkpoints").iterdir()
        stops.add(read_state(found)["step"])
        assert runs.train_here(its)
    [stop] = stops
    loop = loop_of(jobs["states"])
    for number in range(4):
        if number == stop:
            loop.built.engine.optimizer.state.clear()
        step(loop)
    return stop, parameters_of(loop)


def test_without_the_optimizers_states_a_run_that_goes_on_says_that_it_is_another_one(folder):
    jobs = {
        "states": job(folder, "with states", max_steps=4),
        "none": job(folder, "without states", max_steps=4, save_optimizer=False),
        # This optimizer keeps nothing.
        "sgd": job(folder, "nothing", max_steps=4, save_optimizer=False, optimizer="sgd"),
    }
    [(stop, forgot)] = on_ranks(1, forgetful, jobs)
    ends, told = {}, {}
    for name, its in jobs.items():
        root = its.output_dir / "checkpoints"
        kept = CheckpointFiles(root / f"global_step_{stop}").read_metadata().state_dict_metadata
        assert any(tensor.startswith("optimizer.") for tensor in kept) == (name == "states")
        reader = CheckpointReader(root / "global_step_4")
        ends[name] = reader.read(reader.shapes())
        records = list(read_metrics(its.output_dir / "metrics.jsonl"))
        told[name] = [(r["step"], r["warning"]) for r in records if "warning" in r]
        assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4]
    assert ends["none"].keys() == forgot.keys()
    for name, weight in forgot.items():
        assert np.array_equal(ends["none"][name].numpy(), weight), name
    assert any(not torch.equal(ends["states"][name], ends["none"][name]) for name in forgot)
    [(at, warning)] = told["none"]
    assert at == stop
    assert f"global_step_{stop} was saved without the optimizer's states" in warning
    assert told["states"] == told["sgd"] == []


def test_auto_goes_on_from_the_newest_checkpoint(folder):
    made = job(folder, "auto", max_steps=4, load_checkpoint_path="auto")
    assert on_ranks(1, train_until, made, 2) == [None]
    (made.output_dir / "metrics.jsonl").unlink()
    on_ranks(1, runs.train_here, made)
    lines = (made.output_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4]


def said(job):
    """What a run tells a person whose terminal has room for the whole line."""
    os.environ["COLUMNS"] = "200"
    with redirect_stderr(StringIO()) as told:
        runs.train_here(job)
    return told.getvalue()


def test_the_log_format_is_a_bar_or_lines_or_objects(folder):
    styles = ("structured", "progress_bar", "json")
    jobs = {style: job(folder, style, max_steps=3, log_format=style) for style in styles}
    jobs["seldom"] = job(folder, "seldom", max_steps=3, log_interval=2)
    [found] = on_ranks(1, each, said, jobs)
    assert "step=1 " in found["structured"]
    assert "3/3" not in found["structured"]
    assert "3/3" in found["progress_bar"]
    for word in ("loss ", "lr ", "norm ", "tok/s", " GiB", "ETA"):
        assert word in found["progress_bar"]
    assert "step=1 " not in found["progress_bar"]
    objects = [json.loads(line) for line in found["json"].splitlines() if line.startswith("{")]
    assert [each["step"] for each in objects if "loss" in each] == [1, 2, 3]
    assert {each["total_steps"] for each in objects} == {3}
    lines = [line for line in found["seldom"].splitlines() if line.startswith("step=")]
    assert [line.split()[0] for line in lines if " loss=" in line] == ["step=2", "step=3"]
    # Whatever is shown, the file has every step, once.
    kept = [
        json.loads(line) for line in (folder / "seldom" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [each["step"] for each in kept if "loss" in each] == [1, 2, 3]


def said_by_each(jobs):
    """What this rank says in each run, of two ranks that are of one machine or of two."""
    own = os.environ["LOCAL_RANK"]
    found = {}
    for name, job in jobs.items():
        os.environ["LOCAL_RANK"] = "0" if "two machines" in name else own
        found[name] = said(job)
    return found


def test_ranks_beside_the_first_speak_where_that_is_written(folder):
    settings = {"tensor_parallel_size": 2}
    written = {
        "usual, two machines": {},
        "local0": {"log_ranks": "local0"},
        "local0, two machines": {"log_ranks": "local0"},
        "all": {"log_ranks": "all"},
    }
    jobs = {name: job(folder, name, **settings, **its) for name, its in written.items()}
    first, second = on_ranks(2, said_by_each, jobs)
    assert len({text.count("train: ") for text in first.values()}) == 1
    assert not any("rank 0" in text for text in first.values())
    assert [name for name, text in second.items() if text] == ["local0, two machines", "all"]
    for name in ("local0, two machines", "all"):
        assert "train, rank 1: attention: " in second[name]
    kept = (jobs["local0"].output_dir / "logs" / "rank_1.log").read_text()
    assert "attention: " in kept


def timeouts(job):
    """The limit on a collective operation that a rank of its own joins with, in seconds."""
    torch.distributed.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    limits = []
    join = torch.distributed.init_process_group

    def noted(*arguments, **options):
        limits.append(options["timeout"].total_seconds())
        join(*arguments, **options)

    torch.distributed.init_process_group = noted
    run_by_hand(job)
    torch.distributed.init_process_group = join
    return limits


def test_collective_operations_wait_as_long_as_a_step_may(folder):
    # Ten seconds longer than the launcher, which asks the ranks for their stacks while they hang.
    jobs = {}
    for limit in (None, 77.0):
        made = job(folder, f"limit {limit}")
        launch = made.config.launch.model_copy(update={"timeout": limit})
        run = made.config.model_copy(update={"launch": launch})
        jobs[str(limit)] = runs.job_of(run, folder / "packed")
    assert on_ranks(1, each, timeouts, jobs) == [{"None": [1810.0], "77.0": [87.0]}]


def test_how_long_a_run_was_in_coming_back_is_told_if_wanted(folder):
    jobs = {}
    for name, wanted in (("told", True), ("not told", False)):
        settings = {"log_recovery_timing": wanted}
        jobs[name] = [job(folder, name, max_steps=end, **settings) for end in (1, 3)]
    on_ranks(1, runs_of, [one for starts in jobs.values() for one in starts])
    told = {
        name: [record.get("recovery_seconds") for record in read_metrics(metrics_of(starts[0]))]
        for name, starts in jobs.items()
    }
    assert told["not told"] == [None] * 3
    assert told["told"][0] is told["told"][2] is None
    found = told["told"][1]
    assert found
    whole = found.pop("all")
    wanted = {"starting", "loading_the_model", "reading_the_checkpoint", "first_step"}
    assert wanted <= found.keys()
    assert min(found.values()) >= 0
    assert whole == pytest.approx(sum(found.values()), abs=0.01)


def metrics_of(job):
    return job.output_dir / "metrics.jsonl"


def runs_of(jobs):
    for its in jobs:
        runs.train_here(its)


def rounding_warnings(job):
    with redirect_stderr(StringIO()):
        runs.train_here(job)
    records = read_metrics(job.output_dir / "metrics.jsonl")
    warnings = [record["warning"] for record in records if "warning" in record]
    return [text for text in warnings if "bfloat16 rounds" in text]


def test_updates_that_bfloat16_rounds_away_are_measured_at_the_peak_learning_rate(folder):
    """Nothing is said of a rate that moves weights, of other roundings, and during warmup."""
    small = {"precision": "bf16", "enable_mixed_precision": True, "lr": 1e-5, "max_steps": 2}
    cases = {
        "small": small,
        "warmup": {**small, "lr": 1e-2, "lr_warmup_steps": 1, "lr_start": 1e-6},
        "large": {**small, "lr": 1e-2},
        "stochastic": {**small, "stochastic_rounding": True},
        "mixed": {**small, "precision": "bf16_mixed"},
    }
    jobs = {name: job(folder, f"rounding {name}", **train) for name, train in cases.items()}
    [found] = on_ranks(1, each, rounding_warnings, jobs)
    assert {name for name, lines in found.items() if lines} == {"small"}
    (line,) = found["small"]
    match = re.search(r"changed ([\d.]+)% of", line)
    assert match
    share = float(match[1])
    # An update of about 1e-5 changes what is below 2^9 times that: 5 % of weights around 0.05.
    assert 0 < share < 25
    assert "train.stochastic_rounding: true" in line
