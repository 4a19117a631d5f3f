"""What flows are given and what they show, without a server."""

import json
import secrets
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.overrides import parse_value
from penstock.config.pipeline import STAGES
from penstock.core.store import Outcome
from tests.conftest import ROOT
from tests.pipeline.runs import write_run

# pyright: reportMissingImports=false

pytestmark = pytest.mark.usefixtures("scripts")

NOBODY = "http://127.0.0.1:9/api"
"""Where no server is."""

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner | st.text(), max_size=3)
        | st.dictionaries(st.text(), inner | st.text(), max_size=3)
    ),
)


def test_the_chain_and_each_of_its_stages_are_flows_and_deployments():
    import finetune

    described = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    entrypoints = {name: f"flows/finetune.py:{name}" for name in ("finetune", *STAGES)}
    entrypoints["recurring"] = "flows/recurring.py:recurring"
    assert sorted((each["name"], each["entrypoint"]) for each in described) == sorted(
        entrypoints.items()
    )
    assert [getattr(finetune, name).name for name in STAGES] == list(STAGES)


def test_words_that_no_flow_understands_or_that_are_secret_are_refused_before_prefect_knows_of_them(
    tmp_path, monkeypatch, capsys
):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    import finetune

    config = str(write_run(tmp_path))

    def refused(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["finetune.py", config, *words])
        assert finetune.by_hand(finetune.finetune, "finetune.py") == 2
        return capsys.readouterr().err

    value = secrets.token_hex(16)
    with temporary_settings({PREFECT_API_URL: NOBODY}):
        assert "--force prepare" in refused("--force", "prepare")
        told = refused("--data.datasets.0.path", f"s3://key:{value}@bucket/rows.jsonl")
    assert "--data.datasets.0.path holds a credential" in told
    assert value not in told
    assert not (tmp_path / "prepared").exists()


def test_any_json_value_means_itself_as_an_override():
    import parameters

    @given(VALUES)
    def means_itself(value):
        assert parse_value(parameters.text_of(value)) == (value, None)

    means_itself()
    assert parse_value(parameters.text_of("2e-5")) == (2e-5, None)


def test_the_name_of_a_run_tells_what_is_laid_over_its_file_and_no_secret(tmp_path):
    import parameters

    config = write_run(tmp_path, pipeline={"name": "gsm8k"})
    changed = {
        "train.lr": 2e-5,
        "data.datasets.0.path": "https://host/chats.jsonl?signature=hidden",
    }
    run = parameters.loaded(config, changed)
    assert run.train.lr == 2e-5
    title = parameters.title_of(run, changed)
    assert title == "gsm8k: train.lr=2e-05, data.datasets.0.path=https://host/chats.jsonl"
    assert parameters.title_of(run, None) == "gsm8k"
    assert len(parameters.title_of(run, {"pipeline.name": "x" * 500})) == 100


def write_records(path: Path, *records: dict, ending: str = "\n") -> None:
    part = path.with_suffix(".part")
    part.write_text("\n".join(map(json.dumps, records)) + ending)
    part.rename(path)


def step(number: int, time: float, **more) -> dict:
    told = {"loss": 1.0 / number, "lr": 0.1, "epoch": 0.5, "tokens_per_second": 100.0}
    return {"step": number, "time": time, **told, **more}


def test_records_are_read_once_and_those_of_an_earlier_run_are_not(tmp_path):
    import figures

    path = tmp_path / "metrics.jsonl"
    tail = figures.Tail(path, since=100.0)
    assert list(tail.more()) == []
    write_records(path, step(1, 50.0), step(2, 101.0))
    assert [record["step"] for record in tail.more()] == [2]
    with path.open("a") as stream:
        stream.write(f"{json.dumps(step(3, 102.0))}\n{json.dumps(step(4, 103.0))[:20]}")
        stream.flush()
        assert [record["step"] for record in tail.more()] == [3]
        stream.write(f"{json.dumps(step(4, 103.0))[20:]}\n")
    assert [record["step"] for record in tail.more()] == [4]
    # Ranks that were started again go back to their checkpoint, and publish the file anew.
    write_records(path, step(1, 50.0), step(2, 101.0), step(3, 110.0))
    assert [record["step"] for record in tail.more()] == [2, 3]


def test_what_is_left_follows_from_the_pace_since_the_run_began_or_went_back(tmp_path):
    import figures

    surroundings = tmp_path / "surroundings.json"
    surroundings.write_text(json.dumps({"total_steps": 100}))
    told = figures.Figures()
    told.take(step(1, 10.0))
    assert told.with_total(surroundings).left is None
    told.take(step(11, 30.0))  # two seconds each
    told.take({"step": 11, "time": 31.0, "eval_loss": 0.25})
    assert told.left == pytest.approx(178)
    assert told.in_brief == "step 11 of 100, loss 0.09091, about 2 min 58 s left"
    assert "| held-out loss | 0.25 (step 11) |" in told.table
    told.take(step(5, 60.0))
    assert told.left is None
    told.take(step(6, 61.0))
    assert told.left == pytest.approx(94)
    assert told.percent == pytest.approx(6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Artifact creation outside:FutureWarning")
def test_a_server_that_is_not_there_is_told_of_and_stops_nobody(tmp_path):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    import showing

    (tmp_path / "surroundings.json").write_text(json.dumps({"total_steps": 3}))
    said: list[str] = []
    done = Outcome("train", "0" * 16, "ran", tmp_path, 1.0, {"steps": 3})
    with temporary_settings({PREFECT_API_URL: NOBODY}):
        with showing.training_shown(tmp_path, "run", said.append):
            write_records(tmp_path / "metrics.jsonl", step(1, time.time() + 1))
        assert len(said) == 1
        assert "training goes on: ConnectError" in said[0]
        showing.show(done, "run", said.append)
    assert "the table of train could not be shown" in said[1]
