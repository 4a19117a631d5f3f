import json

from penstock.cli.run import Request
from penstock.core.files import write_json
from penstock.core.stage import ATTEMPT, identity, key_of
from penstock.plan import plan
from tests.cli.command import penstock, small_run


def standings(said):
    return {each["stage"]: each["standing"] for each in said.last["plan"]}


def changed(said, stage):
    (verdict,) = [each for each in said.last["plan"] if each["stage"] == stage]
    return {each["field"]: (each["here"], each["there"]) for each in verdict["changed"]}


def test_plan_says_what_is_there_and_exactly_what_changed(tmp_path):
    config = small_run(tmp_path)
    fresh = penstock("plan", config, "--json")
    assert set(standings(fresh).values()) == {"missing"}
    assert list(standings(fresh)) == ["prepare", "pack", "train", "export"]

    assert penstock("pack", config).code == 0
    done = standings(penstock("plan", config, "--json"))
    assert done == {"prepare": "cached", "pack": "cached", "train": "missing", "export": "missing"}

    longer = penstock("plan", config, "--data.sample_packing_sequence_len", 512, "--json")
    assert standings(longer)["prepare"] == "cached"
    assert standings(longer)["pack"] == "stale"
    assert changed(longer, "pack") == {"sample_packing_sequence_len": (512, 256)}
    told = penstock("plan", config, "--data.sample_packing_sequence_len", 512).out
    assert "sample_packing_sequence_len: 512 here, 256 there" in told

    seeded = penstock("plan", config, "--data.val_set_size", 2, "--json")
    assert changed(seeded, "prepare") == {"val_set_size": (2, None)}
    assert [name.split(".")[:2] for name in changed(seeded, "pack")] == [["inputs", "prepared"]]


def test_plan_names_the_file_whose_content_changed(tmp_path):
    config = small_run(tmp_path)
    penstock("prepare", config)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace("row 3", "Row 3"))
    said = penstock("plan", config, "--json")
    assert standings(said)["prepare"] == "stale"
    (field,) = changed(said, "prepare")
    assert "rows.jsonl" in field
    assert field.endswith("sha256")


def test_an_attempt_is_partial(tmp_path):
    config = small_run(tmp_path)
    step = plan(Request(config).load()).step("prepare")
    write_json(step.path / ATTEMPT, {**identity(step.stage), "key": key_of(step.stage)})
    assert standings(penstock("plan", config, "--json"))["prepare"] == "partial"


def test_plan_builds_nothing_and_says_it_again_the_same(tmp_path):
    config = small_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    first = penstock("plan", config, "--json").out
    assert sorted(tmp_path.rglob("*")) == before
    assert json.loads(penstock("plan", config, "--json").out) == json.loads(first)
