"""What needs no training runs on any machine, whatever layout the run is trained in."""

import pytest

from penstock.config.loading.load import loads
from penstock.core import env
from penstock.core.cache.stage import stage_key
from penstock.core.errors import ConfigError
from penstock.core.machine import linux
from penstock.pipeline.plan import RebuildOptions, StageName, execute_stage, plan
from tests.manifests import write_manifest


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run in a layout of two processes, on a machine that would start one."""
    monkeypatch.setattr(env, "num_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)
    return loads(
        {
            "model": {"config_path": "builtin:tiny-qwen3"},
            "data": {"datasets": [{"path": "dummy"}]},
            "train": {"output_dir": "out", "tensor_parallel_size": 2, "global_batch_size": 4},
        }
    )


def test_data_is_prepared_where_the_layout_does_not_fit(run):
    assert [step.stage.name for step in plan(run, ("pack",)).steps] == ["prepare", "pack"]


def test_a_layout_that_does_not_fit_is_told_before_any_stage_and_not_of_a_model_that_is_there(run):
    wishes: tuple[tuple[StageName, ...] | None, ...] = (None, ("export",))
    for wanted in wishes:
        with pytest.raises(ConfigError, match=r"Or write launch\.nproc_per_node: 2"):
            plan(run, wanted)
    fitting = run.model_copy(update={"launch": run.launch.model_copy(update={"nproc_per_node": 2})})
    trained = plan(fitting).step("train")
    trained.path.mkdir(parents=True)
    write_manifest(trained.path, stage="train", key=stage_key(trained.stage))
    there = plan(run)
    assert stage_key(there.step("export").stage) == stage_key(plan(fitting).step("export").stage)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2"):
        execute_stage(
            there.step("train"), run, RebuildOptions(force=frozenset({"train"})), lambda _: None
        )


def test_a_cpu_without_bfloat16_units_trains_in_float32_unless_it_is_written_or_begun(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(env, "num_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)

    dummy = {"datasets": [{"path": "dummy", "type": "tokenized"}]}

    def planned(flags, **train):
        (tmp_path / "cpuinfo").write_text(f"flags\t: fpu avx2 {flags}\n")
        monkeypatch.setattr(linux, "PROC", tmp_path)
        train = {"output_dir": "out", "data_parallel_mode": "none", **train}
        model = {"config_path": "builtin:tiny-qwen3"}
        found = plan(loads({"model": model, "data": dummy, "train": train}))
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        return found

    able, unable = planned("avx512_bf16"), planned("")
    assert (able.run.train.computes_in, able.notes) == ("bfloat16", ())
    assert unable.run.train.computes_in == "float32"
    (note,) = unable.notes
    assert "float32" in note
    assert "\n" not in note
    written = planned("", enable_mixed_precision=False)
    assert unable.step("train").artifact.key == written.step("train").artifact.key
    assert unable.step("pack").artifact.key == able.step("pack").artifact.key
    kept = planned("", enable_mixed_precision=True)
    assert kept.step("train").artifact.key == able.step("train").artifact.key
    (note,) = kept.notes
    assert "slower than float32" in note
    trained = able.step("train")
    trained.path.mkdir()
    write_manifest(trained.path, stage="train", key=trained.artifact.key)
    assert planned("").step("train").artifact.key == trained.artifact.key
