import json
import re

from penstock.cli.run import Request
from penstock.core.cache.diff_identity import differences
from penstock.core.cache.record import write_record
from penstock.core.cache.stage import ATTEMPT, identity, stage_key
from penstock.estimate.costs.device_speed import remember
from penstock.pipeline.plan import plan
from tests.cli.command import penstock, small_run
from tests.stages.prepared import write_lines
from tests.turns import one_day_in


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
    assert standings(longer)["pack"] == "missing"
    assert changed(longer, "pack") == {"sample_packing_sequence_len": (512, 256)}
    told = penstock("plan", config, "--data.sample_packing_sequence_len", 512).out
    assert "sample_packing_sequence_len: 512 here, 256 there" in told

    seeded = penstock("plan", config, "--data.val_set_size", 2, "--json")
    assert changed(seeded, "prepare") == {"val_set_size": (2, None)}
    assert [name.split(".")[:2] for name in changed(seeded, "pack")] == [["inputs", "prepared"]]


def test_what_only_one_result_has_is_one_line_and_long_texts_are_shortened():
    here = {"sources": [{"type": "chat", "template": "{{ one }}\n" * 20}], "seed": 1}
    other = {"type": "text", "limit": None}
    there = {"sources": [{"type": "chat", "template": "{{ two }}"}, other], "seed": 1}
    assert [str(each) for each in differences(here, there)] == [
        "sources.0.template: {{ one }}… (200 characters) here, {{ two }} there",
        "sources.1: (absent) here, 2 fields there",
    ]


def test_plan_names_the_file_whose_content_changed(tmp_path):
    config = small_run(tmp_path)
    penstock("prepare", config)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace("row 3", "Row 3"))
    said = penstock("plan", config, "--json")
    assert standings(said)["prepare"] == "missing"
    (field,) = changed(said, "prepare")
    assert "rows.jsonl" in field
    assert field.endswith("sha256")


def test_plan_says_which_samples_are_longer_than_a_row_before_and_after_data_is_prepared(tmp_path):
    config = small_run(tmp_path)
    short = ("--data.sample_packing_sequence_len", 64)

    def warnings(*words):
        said = penstock("plan", config, "--json", *words)
        assert said.code == 0, said.err
        assert all(line in said.err for line in said.last["warnings"])
        return said.last["warnings"]

    (sampled,) = warnings(*short)
    assert re.search(r"has about \d+ tokens, and a row 64 ", sampled)
    assert "data.datasets.0.max_seq_len: 64" in sampled
    assert penstock("prepare", config, *short).code == 0
    (counted,) = warnings(*short)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    lengths = [len(json.loads(line)["text"]) + 1 for line in lines]
    assert f"{sum(length > 64 for length in lengths)} of 12 train samples" in counted
    assert warnings() == warnings(*short, "--data.datasets.0.max_seq_len", 64) == []
    assert warnings(*short, "--data.sample_packing_method", "wrapped") == []


def test_an_attempt_is_partial(tmp_path):
    config = small_run(tmp_path)
    step = plan(Request(config).load()).step("prepare")
    write_record(step.path / ATTEMPT, {**identity(step.stage), "key": stage_key(step.stage)})
    assert standings(penstock("plan", config, "--json"))["prepare"] == "partial"


def test_plan_builds_nothing_and_says_it_again_the_same(tmp_path):
    config = small_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    first = penstock("plan", config, "--json").out
    assert sorted(tmp_path.rglob("*")) == before
    assert json.loads(penstock("plan", config, "--json").out) == json.loads(first)


def test_plan_tells_what_training_costs_and_counts_what_is_packed(tmp_path):
    config = small_run(tmp_path, train={"output_dir": str(tmp_path / "out"), "num_train_epochs": 3})
    said = penstock("plan", config, "--json").last["costs"]
    assert said["length"]["certain"] == "estimated"
    assert said["fits"]
    assert said["memory"]["total"] == sum(
        size for name, size in said["memory"].items() if name != "total"
    )

    packed = penstock("pack", config, "--json").last["stages"][-1]["facts"]
    told = penstock("plan", config, "--json").last["costs"]
    assert told["length"]["certain"] == "counted"
    assert told["length"]["steps"] == 3 * packed["rows"]["train"]
    assert told["length"]["tokens"] == 3 * packed["tokens"]["train"]
    assert f"{told['length']['steps']} steps of 1 row" in penstock("plan", config).out


@one_day_in(3, of=2)
def test_plan_tells_what_a_reference_takes_until_it_is_there(tmp_path):
    pairs = write_lines(
        tmp_path / "pairs.jsonl",
        [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(9)],
    )
    config = small_run(
        tmp_path,
        data={"datasets": [{"path": str(pairs), "type": "preference"}]},
        train={
            "objective": "preference",
            "output_dir": str(tmp_path / "out"),
            "enable_mixed_precision": False,  # an H100 may choose another
        },
    )
    ask = ("plan", config, "--device-kind", "H100")
    assert penstock(*ask, "--json").last["costs"]["reference_seconds"] > 0
    assert "for the reference log-probs of all completions" in penstock(*ask).out
    free = penstock(*ask, "--preference.loss_type", "simpo", "--json").last["costs"]
    assert free["reference_seconds"] is None
    short = ("--data.sample_packing_sequence_len", 64, "--train.max_steps", 1)
    unread = r"all \d rows are computed, and training reads 1 of them \(train.max_steps\)"
    assert penstock("pack", config, *short).code == 0
    assert re.search(unread, penstock(*ask, *short).out)
    assert "training reads" not in penstock(*ask).out
    made = penstock("reference", config, *short)
    assert made.code == 0
    assert re.search(unread, made.err)
    assert penstock("reference", config).code == 0
    assert penstock(*ask, "--json").last["costs"]["reference_seconds"] is None
    assert "the reference makes" not in penstock(*ask).out


def test_plan_says_what_a_run_chooses_on_these_devices(tmp_path):
    train = {"micro_batch_size": "auto", "global_batch_size": 6, "enable_mixed_precision": False}
    config = small_run(tmp_path, train={"output_dir": str(tmp_path / "out"), **train})
    ask = ("plan", config, "--device-kind", "H100", "--launch.nproc_per_node", 2)
    fsdp = ("--train.data_parallel_mode", "fsdp2")
    said = penstock(*ask, *fsdp)
    assert "layout  enable_gradient_checkpointing: false, micro_batch_size: 3, as about" in said.out
    written = penstock(*ask, *fsdp, "--train.micro_batch_size", 3, "--json").last
    chosen = penstock(*ask, *fsdp, "--json").last
    assert chosen["costs"]["memory"] == written["costs"]["memory"]
    assert [stage["key"] for stage in chosen["stages"]] == [
        stage["key"] for stage in written["stages"]
    ]


def test_plan_proposes_layouts_that_a_config_takes(tmp_path):
    config = small_run(tmp_path)
    ask = ("plan", config, "--devices", 2, "--device-kind", "H100", "--json")
    said = penstock(*ask, "--train.global_batch_size", 4).last
    assert said["costs"]["machine"]["name"] == "H100"
    assert said["costs"]["step"]["total"] > 0
    assert said["layouts"]
    for layout in said["layouts"]:
        written = [
            word
            for name, value in layout["settings"].items()
            for word in (f"--train.{name}", str(value).lower())
        ]
        checked = penstock("plan", config, *written, "--launch.nproc_per_node", 2, "--json")
        assert checked.last["costs"]["layout"] == layout["layout"]

    nobody = penstock("plan", config, "--device-kind", "H1")
    assert nobody.code == 2
    assert "H1 is not known" in nobody.err
    data_alone = penstock("plan", config, "--devices", 2, "--pipeline.stages", "[prepare, pack]")
    assert data_alone.code == 2
    assert "does not train" in data_alone.err


def test_a_measured_machine_has_steps_of_a_known_length(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE_HOME", str(tmp_path / "cache"))
    config = small_run(tmp_path)
    assert penstock("plan", config, "--json").last["costs"]["step"] is None
    assert "penstock doctor --measure" in penstock("plan", config).out
    remember({"name": None, "fp32": 1e10, "bf16": 4e10, "bandwidth": 1e9})
    mixed, full = (
        penstock("plan", config, "--train.enable_mixed_precision", mixed, "--json").last["costs"]
        for mixed in ("true", "false")
    )
    assert full["step"]["products"] == 4 * mixed["step"]["products"]
    assert mixed["machine"]["known_by"] == "measured"
