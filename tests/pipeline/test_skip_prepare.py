"""`data.skip_prepare_dataset`: prepared data is taken as it lies, and its sources may be gone."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from datasets import Dataset, DatasetDict

from penstock.api.status import stage_status
from penstock.config.loading.cli_overrides import Override
from penstock.config.loading.load import load
from penstock.core.cache.stage import stage_key
from penstock.core.errors import ArtifactError, ConfigError, StageError
from penstock.pipeline.plan import Plan, RebuildOptions, execute_stage, plan
from tests.pipeline.runs import write_run
from tests.stages.prepared import table_of

pytestmark = pytest.mark.usefixtures("warm_ranks")

TAKEN = {"skip_prepare_dataset": True}


def planned(config: Path, *stages, **data) -> Plan:
    overrides = [Override(f"data.{name}", yaml.safe_dump(value)) for name, value in data.items()]
    return plan(load(config, overrides), stages or ("pack",))


def done(config: Path, *stages, **data):
    made = planned(config, *stages, **data)
    return [execute_stage(step, made.run, RebuildOptions(), lambda _: None) for step in made.steps]


@pytest.fixture
def prepared(tmp_path):
    """A prepared and packed run: its config, and what became of its stages."""
    config = write_run(tmp_path)
    return config, done(config)


def lose_the_source(config: Path) -> None:
    (config.parent / "chats.jsonl").unlink()


def test_data_is_taken_from_the_root_and_what_follows_keeps_its_key_without_any_source(prepared):
    config, before = prepared
    lose_the_source(config)
    after = done(config, **TAKEN)
    assert [o.status for o in after] == ["skipped", "cached"]
    assert [(o.key, o.path, o.facts) for o in after] == [(o.key, o.path, o.facts) for o in before]
    assert stage_status(planned(config, **TAKEN).steps[0]).standing == "skipped"


def test_what_the_data_was_not_prepared_with_is_told_and_what_it_was_is_not(prepared):
    config, _ = prepared
    assert planned(config, **TAKEN).notes == ()
    others = {
        "val_set_size": 5,
        "train_on_turns": "last",
        "chat_template_kwargs": {"x": 1},
        "sample_packing_sequence_len": 128,
    }
    used = {"chat_template": "null", "train_on_turns": "all", "val_set_size": "4"}
    lines = sorted(planned(config, **others, **TAKEN).notes)
    for line, (name, value) in zip(lines, used.items(), strict=True):
        assert line.startswith(f"data.{name}: ")
        assert "is not used, since data.skip_prepare_dataset is true" in line
        assert line.endswith(f"the prepared data was made with {value}")


def test_a_folder_named_itself_is_taken_where_it_lies_and_wherever_it_is_moved(prepared, tmp_path):
    config, (made, packed) = prepared
    lose_the_source(config)
    [itself, again] = done(config, dataset_prepared_path=str(made.path), **TAKEN)
    assert (itself.path, again.path, again.status) == (made.path, packed.path, "cached")

    moved = shutil.move(made.path, tmp_path / "moved")
    [itself, again] = done(config, dataset_prepared_path=str(moved), **TAKEN)
    assert (itself.key, again.key, again.status) == (made.key, packed.key, "ran")
    assert again.path == tmp_path / "moved" / "pack" / packed.key
    assert again.facts == packed.facts


def test_of_several_this_runs_own_is_taken_and_without_its_sources_all_are_named(prepared):
    config, (made, _) = prepared
    [other, _] = done(config, val_set_size=5)
    assert done(config, **TAKEN)[0].path == made.path
    assert done(config, val_set_size=5, **TAKEN)[0].path == other.path
    with pytest.raises(ConfigError, match="None of them is this run's") as none_is:
        planned(config, val_set_size=6, **TAKEN)
    lose_the_source(config)
    with pytest.raises(ConfigError, match=r"chats\.jsonl does not exist") as unknown:
        planned(config, **TAKEN)
    for error in none_is, unknown:
        for outcome in made, other:
            assert str(outcome.path) in str(error.value)
        assert "36 train, 4 validation" in str(error.value)
        assert "35 train, 5 validation" in str(error.value)


def test_what_is_not_sealed_is_never_taken(prepared):
    config, (made, _) = prepared
    (made.path / "manifest.json").rename(made.path / "attempt.json")
    with pytest.raises(ConfigError, match=f"{made.path} is an unfinished attempt"):
        planned(config, **TAKEN)
    slices = config.parent / "prepared" / "slices"
    with pytest.raises(ConfigError, match="holds no finished prepared data"):
        planned(config, dataset_prepared_path=str(slices), **TAKEN)
    shutil.rmtree(config.parent / "prepared")
    with pytest.raises(ConfigError, match="prepared does not exist"):
        planned(config, **TAKEN)


def edit(file: Path, change) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def test_a_seal_that_was_edited_is_not_believed(prepared):
    config, (made, _) = prepared
    edit(made.path / "manifest.json", lambda m: m["settings"].update(seed=7))
    with pytest.raises(ArtifactError, match="do not match its digest"):
        planned(config, **TAKEN)


def test_a_file_that_was_cut_off_is_noticed(prepared):
    config, (made, _) = prepared
    file = next(made.path.glob("data/train/*.arrow"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=file.name):
        done(config, **TAKEN)


def test_data_that_goes_away_after_planning_is_not_made_anew(prepared):
    config, (made, _) = prepared
    step, *_ = planned(config, **TAKEN).steps
    shutil.rmtree(made.path)
    with pytest.raises(StageError, match="complete when this run started"):
        execute_stage(step, load(config, []), RebuildOptions(), lambda _: None)
    assert not made.path.exists()


def test_data_of_another_vocabulary_is_refused_and_of_a_copy_elsewhere_is_taken(prepared, tmp_path):
    from penstock.rows.tokenizer import byte_tokenizer

    config, _ = prepared
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    own = [Override("model.tokenizer_path", str(tmp_path / "tokenizer"))]
    skipping = [*own, Override("data.skip_prepare_dataset", "true")]
    with pytest.raises(ConfigError, match="builtin bytes there, files here"):
        plan(load(config, skipping), ("pack",))

    [step, *_] = plan(load(config, own), ("pack",)).steps
    execute_stage(step, load(config, own), RebuildOptions(), lambda _: None)
    skipping.append(Override("data.dataset_prepared_path", str(step.path)))
    tokenizer_config = tmp_path / "tokenizer" / "tokenizer_config.json"
    edit(tokenizer_config, lambda c: c.update(model_max_length=77))
    assert stage_key(plan(load(config, skipping), ("pack",)).steps[0].stage) == stage_key(
        step.stage
    )
    edit(tmp_path / "tokenizer" / "tokenizer.json", lambda t: t["model"].update(unk_token="x"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json differ"):
        plan(load(config, skipping), ("pack",))


@pytest.mark.slow
def test_forcing_what_is_skipped_is_refused(prepared):
    config, _ = prepared
    made = planned(config, **TAKEN)
    with pytest.raises(ConfigError, match="--force prepare"):
        execute_stage(
            made.steps[0], made.run, RebuildOptions(frozenset({"prepare"})), lambda _: None
        )


def write_tokens(folder: Path, layout: str) -> Path:
    """Thirty samples of tokens as other programs leave them; a test split lies beside them."""
    rows = [{"input_ids": [n, *range(n)], "labels": [-100, *range(n)]} for n in range(2, 32)]
    train, test = Dataset.from_list(rows), Dataset.from_list(rows[:3])
    if layout == "saved":
        train.save_to_disk(str(folder))
    elif layout == "saved with splits":
        DatasetDict({"train": train, "test": test}).save_to_disk(str(folder))
    else:
        folder.mkdir()
        train.to_parquet(str(folder / "train-0.parquet"))
        test.to_parquet(str(folder / "test-0.parquet"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["saved", "saved with splits", "parquet"])
def test_tokens_of_another_program_are_packed_as_a_source_of_tokens_is(layout, tmp_path):
    folder = write_tokens(tmp_path / "tokens", layout)
    config = write_run(tmp_path)
    kind = {"ds_type": "parquet"} if layout == "parquet" else {}
    named = [{"path": str(folder), "type": "tokenized", **kind}]
    as_source = done(config, datasets=named, val_set_size=5)
    taken = done(config, dataset_prepared_path=str(folder), val_set_size=5, **TAKEN)
    assert [o.status for o in taken] == ["ran", "ran"]
    assert taken[0].facts["rows"] == {"train": 25, "validation": 5}
    assert taken[1].facts == as_source[1].facts
    for split in "train", "validation":
        assert table_of(taken[0].path, split) == table_of(as_source[0].path, split)
    again = done(config, dataset_prepared_path=str(folder), val_set_size=5, **TAKEN)
    assert [o.status for o in again] == ["cached", "cached"]


@pytest.mark.slow
def test_tokens_that_changed_are_read_anew_and_those_in_a_folder_below_are_pointed_to(tmp_path):
    config = write_run(tmp_path)
    folder = write_tokens(tmp_path / "tokens" / "below", "saved")
    with pytest.raises(ConfigError, match=f"another program: {folder}"):
        planned(config, dataset_prepared_path=str(folder.parent), **TAKEN)
    before = done(config, dataset_prepared_path=str(folder), **TAKEN)[0]
    shutil.copytree(folder / "prepare", tmp_path / "kept")
    shutil.rmtree(folder)
    Dataset.from_list([{"input_ids": [1, 2], "labels": [1, 2]}] * 9).save_to_disk(str(folder))
    shutil.move(tmp_path / "kept", folder / "prepare")
    after = done(config, dataset_prepared_path=str(folder), **TAKEN)[0]
    assert (after.status, after.facts["rows"]) == ("ran", {"train": 5, "validation": 4})
    assert after.key != before.key


@pytest.mark.slow
def test_training_goes_over_given_data_and_resumes(prepared):
    config, (made, _) = prepared
    lose_the_source(config)
    first = done(config, "train", **TAKEN)[-1]
    again = done(config, "train", **TAKEN)
    assert (first.status, [o.status for o in again]) == ("ran", ["skipped", "cached", "cached"])
    (first.path / "manifest.json").rename(first.path / "attempt.json")
    resumed = done(config, "train", **TAKEN)[-1]
    assert (resumed.status, resumed.key) == ("resumed", first.key)
    assert resumed.facts == first.facts
    assert again[0].key == made.key
