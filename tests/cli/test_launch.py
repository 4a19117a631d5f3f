"""What `penstock launch --print` prints is what bash, Slurm, Kubernetes and torchrun take."""

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from torch.distributed.run import get_args_parser

from penstock.config.loading.load import load
from penstock.config.schema.pipeline import LaunchConfig
from penstock.core.env import be_rank_of_slurm, rank_variables
from tests.cli.command import Said, penstock, small_run

OVER = {"train": {"data_parallel_mode": "fsdp2", "global_batch_size": 8}}
TWO = ("--launch.nnodes=2", "--launch.nproc_per_node=4")
STOP_TIMEOUT = LaunchConfig().stop_timeout
CLUSTER = ("--image", "registry/penstock:1", "--claim", "shared")


def closed(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """The schema of a mapping that has no other members: a misspelt one is a fault."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


# A DNS label of RFC 1123, as names of objects that become parts of host names must be.
LABEL = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 0}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = closed({"name": LABEL}, labels=STRINGS)


def several(entry: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": entry, "minItems": 1}


MOUNT = closed({"name": LABEL, "mountPath": TEXT}, readOnly={"type": "boolean"})
QUANTITIES = {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}
CONTAINER = closed(
    {"name": LABEL, "image": TEXT, "command": several(TEXT)},
    resources=closed({}, limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=several(MOUNT),
    workingDir=TEXT,
    envFrom=several(closed({"secretRef": closed({"name": TEXT})})),
)
VOLUME = closed(
    {"name": LABEL},
    configMap=closed({"name": LABEL}),
    emptyDir=closed({}, medium={"enum": ["", "Memory"]}),
    persistentVolumeClaim=closed({"claimName": TEXT}),
)
POD = closed(
    {"restartPolicy": {"enum": ["Never", "OnFailure"]}, "containers": several(CONTAINER)},
    terminationGracePeriodSeconds=COUNT,
    volumes=several(VOLUME),
    subdomain=LABEL,
)
RULE = closed(
    {"action": {"enum": ["Ignore", "FailJob", "Count", "FailIndex"]}},
    onPodConditions=several(closed({"type": TEXT, "status": {"enum": ["True", "False"]}})),
    onExitCodes=closed({"operator": {"enum": ["In", "NotIn"]}, "values": several(COUNT)}),
)
JOB = closed(
    {"template": closed({"spec": POD}, metadata=closed({}, labels=STRINGS))},
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    completions=COUNT,
    parallelism=COUNT,
    backoffLimit=COUNT,
    podFailurePolicy=closed({"rules": several(RULE)}),
)
SERVICE = closed(
    {"selector": STRINGS}, clusterIP=TEXT, publishNotReadyAddresses={"type": "boolean"}
)
SCHEMAS = {
    ("batch/v1", "Job"): {"spec": JOB},
    ("v1", "Service"): {"spec": SERVICE},
    ("v1", "ConfigMap"): {"data": STRINGS},
}


def printed(folder: Path, *words: str, **changes: dict[str, Any]) -> Said:
    config = small_run(folder, **{**OVER, **changes})
    return penstock("launch", config, "--print", *words)


def objects(folder: Path, *words: str, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What would be sent to Kubernetes, by kind, every field of it known there."""
    places = {
        "data": {"dataset_prepared_path": "prepared"},
        "train": {"output_dir": "out"},
        "pipeline": {"artifacts_path": "artifacts"},
    }
    for name, values in places.items():
        base = OVER.get(name, {}) | (
            {"datasets": [{"path": "rows.jsonl"}]} if name == "data" else {}
        )
        changes[name] = {**base, **values, **changes.get(name, {})}
    said = printed(folder, "kubernetes", *words, **changes)
    assert said.code == 0, said.err
    found = {each["kind"]: each for each in yaml.safe_load_all(said.out)}
    for kind, each in found.items():
        head = {"apiVersion": {"const": each["apiVersion"]}, "kind": {"const": kind}}
        body = SCHEMAS[each["apiVersion"], kind]
        jsonschema.validate(each, closed({**head, "metadata": METADATA, **body}))
    return found


def test_a_kubernetes_job_has_a_pod_for_each_machine_which_meet_by_name(tmp_path):
    pipeline = {"name": "My Run_1", "artifacts_path": "artifacts"}
    found = objects(
        tmp_path, *TWO, *CLUSTER, "--secret", "tokens", "--launch.max_restarts=3", pipeline=pipeline
    )
    assert set(found) == {"ConfigMap", "Service", "Job"}
    job, name = found["Job"]["spec"], found["Job"]["metadata"]["name"]
    assert (job["completions"], job["parallelism"]) == (2, 2)
    assert job["completionMode"] == "Indexed"
    assert job["backoffLimit"] == 6
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > STOP_TIMEOUT + 5
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert container["command"][-1] == "--launch.node_rank=$(JOB_COMPLETION_INDEX)"
    assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert pod["subdomain"] == found["Service"]["metadata"]["name"]
    assert found["Service"]["spec"]["clusterIP"] == "None"
    # The label that the job's controller gives its pods.
    assert found["Service"]["spec"]["selector"] == {"job-name": name}
    # What the pods read is the run that was written, which a second pod takes as well.
    file = tmp_path / "read.yaml"
    file.write_text(found["ConfigMap"]["data"]["run.yaml"])
    for number in (0, 1):
        override = [*_overrides(f"--launch.node_rank={number}")]
        run = load(file, override)
        assert run.launch.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:29500"
        assert (run.launch.nnodes, run.launch.nproc_per_node) == (2, 4)
        assert run.train.global_batch_size == 8
    alone = objects(tmp_path, *CLUSTER, "--launch.nproc_per_node=2", "--gpus=0", "--cpus=8")
    assert set(alone) == {"ConfigMap", "Job"}
    (container,) = alone["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": 8}}


def _overrides(*words: str):
    from penstock.config.loading.cli_overrides import split_overrides

    return split_overrides(words)[1]


def test_a_slurm_script_runs_one_launcher_on_each_node(tmp_path):
    said = printed(tmp_path, "slurm", *TWO, "--train.lr", "2e-5", "--launch.rdzv_endpoint=x:29511")
    assert said.code == 0, said.err
    script = tmp_path / "job.sh"
    script.write_text(said.out)
    subprocess.run(["bash", "-n", script], check=True)
    for line in (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--requeue",
        "--exclusive",
    ):
        assert f"#SBATCH {line}" in said.out.splitlines()
    (notice,) = [line for line in said.out.splitlines() if "--signal=TERM@" in line]
    assert int(notice.rpartition("@")[2]) > STOP_TIMEOUT + 5
    if shutil.which("sbatch"):
        # Without a controller it can only say what it does not understand.
        checked = subprocess.run(
            ["sbatch", "--test-only", script], capture_output=True, text=True, check=False
        )
        assert "invalid option" not in checked.stderr.lower()
        assert "unrecognized" not in checked.stderr.lower()
    # Run with stand-ins for Slurm's commands, each node is told its number and where they meet.
    for name, text in {
        "scontrol": "printf 'rack1\\nrack2\\n'",
        "penstock": 'printf "%s " "$@"; echo',
        "srun": 'shift 3; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
    }.items():
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/bash\n{text}\n")
        tool.chmod(0o755)
    path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "rack[1-2]"}
    ran = subprocess.run(["bash", script], capture_output=True, text=True, check=True, env=path)
    first, second = (line.split() for line in ran.stdout.splitlines())
    assert first[0] == "run"
    assert [word for word in first if word not in second] == ["--launch.node_rank=0"]
    assert [word for word in second if word not in first] == ["--launch.node_rank=1"]
    run = load(Path(second[1]), _overrides(*second[2:]))
    assert run.launch.rdzv_endpoint == "rack1:29511"
    assert (run.launch.nnodes, run.launch.nproc_per_node, run.launch.node_rank) == (2, 4, 1)
    assert run.train.lr == 2e-5


@pytest.mark.parametrize("gpus", ["", "0"])
def test_a_slurm_script_is_that_of_the_nodes_and_not_of_this_machine(tmp_path, monkeypatch, gpus):
    """A layout of 4 processes is printed where there is no GPU, and where there is one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    split = {"train": {"tensor_parallel_size": 4, "data_parallel_mode": "none"}}
    said = printed(tmp_path, "slurm", **split)
    assert said.code == 0, said.err
    assert "#SBATCH --exclusive" in said.out.splitlines()
    assert "--gpus-per-node" not in said.out
    assert "--launch.nproc_per_node=auto" in said.out
    known = printed(tmp_path, "slurm", "--gpus=4", "--cpus=32", **split).out
    assert "#SBATCH --gpus-per-node=4" in known.splitlines()
    assert "exclusive" not in known
    assert "--launch.nproc_per_node=4" in known


def test_a_torchrun_line_for_each_machine_is_what_torchrun_takes(tmp_path):
    place = "--launch.rdzv_endpoint=node0:29511"
    said = printed(tmp_path, "torchrun", *TWO, place, "--launch.env={NAME: 'a b'}")
    lines = [line for line in said.out.splitlines() if not line.startswith("#")]
    assert len(lines) == 2
    for number, line in enumerate(lines):
        words = shlex.split(line)
        assert "NAME=a b" in words
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words
        told = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
        assert (told.nnodes, told.node_rank, told.nproc_per_node) == ("2", number, "4")
        # The other rendezvous of torch's unpickle what they are sent.
        assert (told.master_addr, told.master_port, told.rdzv_backend) == ("node0", 29511, "static")
        assert told.module
        assert told.training_script == "penstock.cli.train"
        run = load(Path(told.training_script_args[0]), _overrides(*told.training_script_args[1:]))
        assert run.launch.nproc_per_node == 4


def test_all_ways_are_printed_under_titles_and_say_what_they_lack(tmp_path):
    said = printed(tmp_path, *TWO, "--json")
    texts = said.last["launch"]
    assert set(texts) == {"torchrun", "slurm", "kubernetes"}
    assert "launch.rdzv_endpoint: 2 nodes need a rendezvous endpoint" in texts["torchrun"]
    assert "--nodes=2" in texts["slurm"]
    assert "--image" in texts["kubernetes"]
    titled = printed(tmp_path, *TWO).out
    assert [f"# ---- {way} ----" in titled for way in texts] == [True] * 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("pbs",), "Write one of torchrun, slurm, kubernetes"),
        (("kubernetes", "--launch.nnodes=2"), "Add --launch.nproc_per_node"),
        (("slurm", "--gpus=3"), "global_batch_size is 8"),
        (("torchrun", *TWO), "write rdzv_endpoint: HOST:29500"),
        (("kubernetes", *TWO), "Add --image"),
        (("kubernetes", *TWO, "--image", "x"), "lost with its pod.\n  Add --claim"),
        (("kubernetes", *TWO, *CLUSTER), "is not below /data"),
        (("slurm", "--launch.nproc_per_node=3"), "global_batch_size is 8"),
        (
            ("kubernetes", *TWO, *CLUSTER, "--data.datasets.0.path=https://u:hunter2@host/x.jsonl"),
            "data.datasets[0].path is a URL with a password",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused_with_what_to_write(tmp_path, monkeypatch, words, says):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = printed(tmp_path, *words)
    assert said.code == 2
    assert says in said.err
    assert "hunter2" not in said.err


@pytest.mark.parametrize("option", ["--image=x", "--mount=/x", "--gpus=0"])
def test_options_of_other_machines_are_refused_without_print(tmp_path, option):
    said = penstock("launch", small_run(tmp_path), option)
    assert said.code == 2
    assert "Add --print" in said.err


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("gpu[08-11,20]", "gpu08"),
        ("rack[1-2]node[08,10-12],login", "rack1node08"),
        ("r[3,5]x,y[1-2]", "r3x"),
    ],
)
def test_a_process_of_srun_is_the_rank_that_its_step_says(monkeypatch, nodes, first):
    import os

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    # Of an allocation alone nothing follows: the launcher runs in one, too.
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    be_rank_of_slurm()
    assert rank_variables() is None
    step = {"PROCID": "5", "LOCALID": "1", "STEP_NUM_TASKS": "8", "STEP_NODELIST": nodes}
    for name, value in {**step, "STEP_ID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    be_rank_of_slurm()
    assert rank_variables() == (5, 1, 8)
    assert os.environ["MASTER_ADDR"] == first
    port = os.environ["MASTER_PORT"]
    assert 20000 <= int(port) < 30000
    # Torchrun's own variables are left as they are.
    monkeypatch.setenv("SLURM_PROCID", "6")
    be_rank_of_slurm()
    assert rank_variables() == (5, 1, 8)
