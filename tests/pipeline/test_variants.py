"""The runs that a tick is made of, planned and not run."""

from penstock.config.loading.load import load
from penstock.core.cache.stage import short, stage_key
from penstock.pipeline.plan import plan
from penstock.pipeline.variants import as_eval_only, train_step_on, with_own_output_dir
from tests.pipeline.test_preference_chain import write_preferences


def test_a_run_in_its_own_folder_keeps_its_stages_and_keys_and_what_they_read(tmp_path):
    config = write_preferences(tmp_path, push={"url": (tmp_path / "there").as_uri()})
    planned = plan(load(config), ("push",))
    moved = with_own_output_dir(planned)
    stages = {step.stage.name: step.stage for step in moved.steps}
    assert [*stages] == ["prepare", "pack", "reference", "train", "export", "push"]
    assert [stage_key(each) for each in stages.values()] == [
        stage_key(s.stage) for s in planned.steps
    ]
    trained = moved.step("train")
    assert trained.path == tmp_path / "out" / short(stage_key(trained.stage))
    assert stages["export"].inputs["trained"] == trained.artifact


def test_a_model_is_evaluated_on_what_the_plan_says_of_its_reference_model(tmp_path):
    planned = plan(load(write_preferences(tmp_path)), ("train",))
    evaluated = train_step_on(as_eval_only(planned.run), planned).stage.inputs
    for name, stage in {"packed": "pack", "reference": "reference"}.items():
        assert evaluated[name] == planned.step(stage).artifact
