"""What flows are given and what they show, without a server."""

import json
import logging
import secrets
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.loading.cli_overrides import parse_value
from penstock.config.loading.load import load
from penstock.config.schema.pipeline import STAGES
from penstock.core.cache.in_use import pinned_keys
from penstock.core.cache.stage import stage_key
from penstock.core.cache.store import StageResult
from penstock.pipeline.plan import RebuildOptions, plan
from penstock.prepare import process_warnings
from penstock.prepare.stage import SliceProgress
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


def test_a_server_that_is_not_there_is_named_with_its_setting_before_a_flow_starts(
    monkeypatch, capsys
):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    import finetune

    monkeypatch.setattr(sys, "argv", ["finetune.py", "config.yaml"])
    with temporary_settings({PREFECT_API_URL: NOBODY}):
        assert finetune.run_from_command_line(finetune.finetune, "finetune.py") == 3
    told = capsys.readouterr().err
    assert f"Prefect's server at {NOBODY} (PREFECT_API_URL) cannot be reached" in told
    assert "Traceback" not in told


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
        assert finetune.run_from_command_line(finetune.finetune, "finetune.py") == 2
        return capsys.readouterr().err

    value = secrets.token_hex(16)
    with temporary_settings({PREFECT_API_URL: NOBODY}):
        assert "--force prepare" in refused("--force", "prepare")
        told = refused("--data.datasets.0.path", f"s3://key:{value}@bucket/rows.jsonl")
        by_name = refused("--launch.env.WANDB_API_KEY", value)
    assert "--data.datasets.0.path holds a credential" in told
    assert "--launch.env.WANDB_API_KEY holds a credential" in by_name
    assert value not in told + by_name
    assert not (tmp_path / "prepared").exists()


def test_a_flow_marks_the_results_of_all_its_stages_from_the_first_one_on(tmp_path, monkeypatch):
    import finetune

    run = load(write_run(tmp_path))
    planned = plan(run)
    seen = []

    def brought(_planned, name, _wishes):
        marked = {key for step in planned.steps for key in pinned_keys(step.path.parent.parent)}
        seen.append(marked)
        return StageResult(name, "key", "ran", tmp_path, 0.0, {})

    monkeypatch.setattr(finetune, "run_stage_with_retries", brought)
    monkeypatch.setattr(finetune, "get_run_logger", lambda: logging.getLogger("flow"))
    monkeypatch.setattr(finetune, "show_overview", lambda *_: nullcontext([]))
    finetune.run_pipeline(run, RebuildOptions(), ())
    in_roots = {
        key
        for step in planned.steps
        if (key := stage_key(step.stage)).startswith(step.path.name)  # not in a person's own folder
    }
    assert seen == [in_roots] * len(planned.steps)
    assert len(in_roots) == 3


def test_any_json_value_means_itself_as_an_override():
    import parameters

    @given(VALUES)
    def means_itself(value):
        assert parse_value(parameters.format_value(value)) == (value, None)

    means_itself()
    assert parse_value(parameters.format_value("2e-5")) == (2e-5, None)


def test_the_name_of_a_run_tells_what_is_laid_over_its_file_and_no_secret(tmp_path):
    import parameters

    config = write_run(tmp_path, pipeline={"name": "gsm8k"})
    changed = {
        "train.lr": 2e-5,
        "data.datasets.0.path": "https://host/chats.jsonl?signature=hidden",
    }
    run = parameters.load_run(config, changed)
    assert run.train.lr == 2e-5
    title = parameters.build_run_title(run, changed)
    assert title == "gsm8k: train.lr=2e-05, data.datasets.0.path=https://host/chats.jsonl"
    assert parameters.build_run_title(run, None) == "gsm8k"
    assert len(parameters.build_run_title(run, {"pipeline.name": "x" * 500})) == 100


class Said(logging.Handler):
    """What is logged to its `logger`, a line with its level each."""

    def __init__(self) -> None:
        super().__init__()
        self.logger, self.lines = logging.Logger("said"), list[str]()
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def write_records(path: Path, *records: dict, ending: str = "\n") -> None:
    part = path.with_suffix(".part")
    part.write_text("\n".join(map(json.dumps, records)) + ending)
    part.rename(path)


def step(number: int, time: float, **more) -> dict:
    told = {"loss": 1.0 / number, "lr": 0.1, "epoch": 0.5, "tokens_per_second": 100.0}
    return {"step": number, "time": time, **told, **more}


def test_lines_are_read_once_and_a_file_that_is_replaced_from_its_start(tmp_path):
    from penstock.core.file_tail import FileTail

    path = tmp_path / "metrics.jsonl"
    tail = FileTail(path)

    def new_steps() -> list[int]:
        return [json.loads(line)["step"] for line in tail.read_new_lines()]

    assert new_steps() == []
    write_records(path, step(1, 50.0), step(2, 101.0))
    assert new_steps() == [1, 2]
    with path.open("a") as stream:
        stream.write(f"{json.dumps(step(3, 102.0))}\n{json.dumps(step(4, 103.0))[:20]}")
        stream.flush()
        assert new_steps() == [3]
        stream.write(f"{json.dumps(step(4, 103.0))[20:]}\n")
    assert new_steps() == [4]
    # Ranks that were started again go back to their checkpoint and replace the file.
    write_records(path, step(1, 50.0), step(2, 101.0), step(3, 110.0))
    assert new_steps() == [1, 2, 3]


def test_what_is_left_follows_from_the_pace_since_the_run_began_or_went_back(tmp_path):
    import training_progress

    surroundings = tmp_path / "surroundings.json"
    surroundings.write_text(json.dumps({"total_steps": 100}))
    told = training_progress.TrainingProgress()
    told.add_record(step(1, 10.0))
    told.read_total(surroundings)
    assert told.seconds_left is None
    told.add_record(step(11, 30.0))  # two seconds each
    told.add_record({"step": 11, "time": 31.0, "eval_loss": 0.25})
    assert told.seconds_left == pytest.approx(178)
    assert told.summary == "step 11 of 100, loss 0.09091, about 2 min 58 s left"
    assert "| held-out loss | 0.25 (step 11) |" in told.table
    told.add_record(step(5, 60.0))
    assert told.seconds_left is None
    told.add_record(step(6, 61.0))
    assert told.seconds_left == pytest.approx(94)
    assert told.percent == pytest.approx(6)


def test_a_log_that_is_deleted_and_written_anew_is_read_from_its_start_if_it_is_longer(tmp_path):
    from training_log import RankLog

    path, began = tmp_path / "rank_0.log", time.time()

    def write(*lines: str) -> None:
        path.unlink(missing_ok=True)  # whose number the next file may get
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began + 10))
        path.write_text("".join(f"{now},000 {line}\n" for line in lines))

    said = RankLog(path, since=began)
    write("INFO an old line")
    assert list(said.read_new()) == [("INFO", "an old line")]
    write("INFO new", "ERROR failed\nTraceback\n  of two lines", "WARNING odd")
    expected = [("INFO", "new"), ("ERROR", "failed\nTraceback\n  of two lines"), ("WARNING", "odd")]
    assert list(said.read_new()) == expected
    assert list(RankLog(path, since=began + 60).read_new()) == []


def lines_of(training_log, records: list[dict], folder: Path) -> list[str]:
    """What of these records is logged, by a run that began at 0."""
    import training_progress

    said = Said()
    log, known = (
        training_log.TrainingLog(folder, said.logger, since=0.0),
        training_progress.TrainingProgress(),
    )
    for record in records:
        known.add_record(record)
        log.add_record(record, known)
    log.flush()
    return said.lines


def test_lines_of_steps_are_bounded_however_many_there_are_and_the_last_is_among_them(tmp_path):
    import training_log

    short = lines_of(training_log, [step(n, n / 100) for n in range(1, 501)], tmp_path)
    assert short == [
        "INFO step 1: loss 1, lr 0.1, 100 tokens/s",
        *(line for line in short[1:-1] if " left" not in line),
        "INFO step 500: loss 0.002, lr 0.1, 100 tokens/s",
    ]
    assert len(short) == 6  # a second apart
    day = [step(n, float(n)) for n in range(1, 86_401)]
    evaluations = [{"step": n, "time": n + 0.5, "eval_loss": 1.0} for n in range(1, 86_401)]
    both = [record for pair in zip(day, evaluations, strict=True) for record in pair]
    lines = lines_of(training_log, both, tmp_path)
    assert "INFO step 86,400: eval_loss 1" in lines
    assert "INFO step 86,400: loss 1.157e-5, lr 0.1, 100 tokens/s" in lines
    assert len(lines) < 2 * (200 + 200 * 5 + 24 * 60)


def test_words_of_ranks_keep_their_levels_lose_what_is_secret_and_cannot_flood(tmp_path):
    import training_log

    logs = tmp_path / "logs"
    logs.mkdir()
    since = time.time()
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since + 1))
    value = secrets.token_hex(16)
    entries = [
        ("rank_0.log", "INFO attention: sdpa"),
        ("rank_0.log", f"WARNING step 5: see https://host/rows?X-Amz-Signature={value}"),
        ("rank_0.log", "ERROR failed\nTraceback"),
        *(("rank_0.log", f"WARNING step {n}: the loss is 9") for n in range(100)),
        ("watch.log", "WARNING nothing has moved for 1800 s"),
    ]
    for name, text in entries:
        with (logs / name).open("a") as stream:
            stream.write(f"{now},000 {text}\n")
    said = Said()
    log = training_log.TrainingLog(tmp_path, said.logger, since=since)
    log.forward_rank_logs()
    assert said.lines[:2] == ["INFO attention: sdpa", "WARNING step 5: see https://host/rows"]
    assert said.lines[-2:] == [
        f"WARNING 82 more lines are in {logs / 'rank_0.log'}",
        "WARNING nothing has moved for 1800 s",
    ]
    assert len(said.lines) == training_log.MAX_RANK_ENTRIES + 2
    assert value not in "\n".join(said.lines)
    log.forward_rank_logs()
    assert len(said.lines) == training_log.MAX_RANK_ENTRIES + 2


def test_ranks_that_are_started_again_are_told_with_the_step_that_training_is_back_at(tmp_path):
    import training_log

    records = [step(1, 1.0), step(2, 2.0), step(3, 3.0), step(2, 9.0), step(3, 10.0)]
    lines = lines_of(training_log, records, tmp_path)
    assert [line for line in lines if line.startswith("WARNING")] == [
        "WARNING the ranks were started again; training is back at 2"
    ]
    # A file that is published anew brings records again that were read before.
    assert lines_of(training_log, [*records[:3], *records[:3]], tmp_path) == lines[:3]


def test_what_preparing_warns_of_is_in_the_log_of_the_run_once_and_only_while_it_runs(caplog):
    import prefect_artifacts

    said, log = Said(), process_warnings.log
    with prefect_artifacts.forward_prepare_logs(said.logger):
        log.warning("%s%% of it is odd", 3)
        log.info("usual")
    log.warning("later")
    assert said.lines == ["WARNING 3% of it is odd"]
    assert [record.getMessage() for record in caplog.records][-1] == "later"
    assert not log.handlers


def test_what_a_cluster_warns_of_is_in_the_log_of_any_flow(tmp_path, monkeypatch):
    import finetune

    said, result = Said(), StageResult("prepare", "key", "ran", tmp_path, 0.0, {})
    monkeypatch.setattr(finetune, "build_task_runner", lambda _: object())
    monkeypatch.setattr(
        finetune, "tokenize_on_cluster", lambda *_: process_warnings.log.warning("an odd template")
    )
    monkeypatch.setattr(finetune, "run_stage_with_retries", lambda *_: result)
    run = load(write_run(tmp_path))
    bring = finetune.build_stage_runner(run, said.logger)
    assert [bring(plan(run), name, RebuildOptions()) for name in ("prepare", "pack")]
    assert said.lines == ["WARNING an odd template"]


def test_a_share_that_a_worker_prepares_brings_its_warnings_home_once_each():
    import cluster

    class OddStage:
        def prepare_share(self, *_):
            for _ in range(2):
                logging.getLogger("penstock.prepare").warning("an odd template")
            return SliceProgress(slices=3, done=2)

    row = cluster.prepare_share.fn(OddStage(), Path("out"), 2, 4)
    assert (row["share"], row["slices"], row["done"]) == ("2/4", 3, 2)
    assert row["warnings"] == ["an odd template"]


def test_a_notice_that_says_it_is_a_warning_is_logged_as_one():
    import prefect_artifacts

    said = Said()
    prefect_artifacts.log_notice("prepare: warning: 3 of 40 records give no sample", said.logger)
    prefect_artifacts.log_notice("pack: rows of 512 tokens, 100% full", said.logger)
    assert said.lines == [
        "WARNING prepare: warning: 3 of 40 records give no sample",
        "INFO pack: rows of 512 tokens, 100% full",
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Artifact creation outside:FutureWarning")
def test_a_server_that_is_not_there_is_told_of_and_stops_nobody(tmp_path):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    import prefect_artifacts

    (tmp_path / "surroundings.json").write_text(json.dumps({"total_steps": 3}))
    said = Said()
    done = StageResult("train", "0" * 16, "ran", tmp_path, 1.0, {"steps": 3})
    with temporary_settings({PREFECT_API_URL: NOBODY}):
        with prefect_artifacts.show_training(tmp_path, "run", said.logger):
            write_records(tmp_path / "metrics.jsonl", step(1, time.time() + 1))
        assert said.lines[0] == "INFO step 1 of 3: loss 1, lr 0.1, 100 tokens/s"
        assert "WARNING training continues, but its progress cannot be shown" in said.lines[1]
        assert "at present: ConnectError" in said.lines[1]
        assert len(said.lines) == 2
        prefect_artifacts.show_stage_result(done, "run", said.logger)
    assert "the table of train could not be shown" in said.lines[2]
