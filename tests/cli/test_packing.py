from tests.cli.command import penstock, small_run


def methods(said, split="train"):
    (pack,) = [stage for stage in said.last["stages"] if stage["stage"] == "pack"]
    assert pack["status"] == "skipped"
    return {one["method"]: one for one in pack["facts"]["methods"] if one["split"] == split}


def test_a_dry_run_tells_what_every_method_would_give_and_writes_no_row(tmp_path):
    config = small_run(tmp_path, data={"val_set_size": 3, "pad_to_multiple_of": 64})
    said = penstock("pack", config, "--dry-run", "--json")
    assert said.code == 0
    assert not (tmp_path / "data" / "pack").exists()
    told = methods(said)
    assert list(told) == ["sequential", "multipack", "unpacked"]
    assert [one["chosen"] for one in told.values()] == [True, False, False]
    for method in ("sequential", "multipack"):
        run = penstock("pack", config, "--data.sample_packing_method", method, "--json")
        facts = run.last["stages"][-1]["facts"]
        assert told[method]["rows"] == facts["rows"]["train"] >= told[method]["bound"]
        assert told[method]["fill"] == facts["fill"]["train"]
        assert 0 < told[method]["padding"] < 64 * told[method]["rows"] / facts["tokens"]["train"]
    assert told["unpacked"]["rows"] == 9
    assert told["unpacked"]["padding"] > told["multipack"]["padding"]
    assert methods(said, "validation")["unpacked"]["rows"] == 3


def test_a_dry_run_prints_a_table_and_prepares_only_if_it_may(tmp_path):
    config = small_run(tmp_path, data={"eval_sample_packing": False, "val_set_size": 3})
    refused = penstock("pack", config, "--dry-run", "--no-upstream")
    assert refused.code == 1
    assert "pack needs prepare" in refused.err
    said = penstock("pack", config, "--dry-run")
    assert said.code == 0
    lines = [line.split() for line in said.out.splitlines()]
    assert ["split", "method", "rows", "bound", "fill", "padding"] in lines
    chosen = [line[:2] for line in lines if line[-2:] == ["as", "configured"]]
    assert chosen == [["train", "sequential"], ["validation", "unpacked"]]
    assert penstock("pack", config, "--dry-run", "--force", "pack").code == 2
