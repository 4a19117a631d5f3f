"""What a run listens at: loopback, and nothing there leads to a pickle that is read."""

import io
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from penstock.engine.distributed.object_unpickler import ObjectPickler, ObjectUnpickler
from tests.cli.command import penstock
from tests.conftest import ROOT
from tests.pipeline.runs import write_chats, write_run
from tests.ranks import on_ranks
from tests.sockets import Observer, Payload, listening
from tests.turns import one_day_in

TWO_RANKS = {"nproc_per_node": 2, "env": {"OMP_NUM_THREADS": "1"}}


@one_day_in(2, of=1)
@pytest.mark.dist
def test_a_run_with_workers_and_two_ranks_listens_on_loopback_and_survives_every_payload(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("penstock.prepare.workers.MIN_BYTES_PER_PROCESS", 1)
    names = [str(write_chats(tmp_path / f"{n}.jsonl", 20, salt=f" {n}")) for n in range(3)]
    config = write_run(
        tmp_path,
        data={"datasets": [{"path": name, "type": "chat"} for name in names]},
        train={
            "data_parallel_mode": "ddp",
            "global_batch_size": 2,
            "max_steps": 40,
            "save_steps": 0,
        },
        launch=TWO_RANKS,
    )
    ran = tmp_path / "payload-ran"
    with Observer(os.getpid(), ran) as observer:
        said = penstock("run", config, "--data.dataset_num_proc=2")
    assert said.code == 0, said.err
    assert any("penstock.engine.launch.torchrun_agent" in command for command in observer.commands)
    assert any("spawn_main" in command for command in observer.commands)
    ranks = {one.pid for one in observer.seen if "penstock.train" in one.command}
    assert len(ranks) == 2, "both ranks listen for each other"
    assert observer.reachable_by_others == set()
    assert observer.stores == []
    assert not ran.exists()
    assert list(Path(os.environ.get("TMPDIR", "/tmp")).glob("torchelastic_*none*")) == []


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.dist
def test_a_flow_and_the_server_of_prefect_that_it_starts_listen_on_loopback(tmp_path):
    config = write_run(tmp_path, train={"max_steps": 2}, pipeline={"stages": ["prepare", "pack"]})
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT")
    }
    environment |= {"PREFECT_HOME": str(tmp_path / "prefect"), "DO_NOT_TRACK": "1"}
    flow = subprocess.Popen(
        [sys.executable, str(ROOT / "flows" / "finetune.py"), str(config)],
        env={**environment, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with Observer(flow.pid, tmp_path / "payload-ran") as observer:
        said = flow.communicate(timeout=180)[0]
    assert flow.returncode == 0, said
    assert any("temporary_server" in one.command for one in observer.seen)
    assert observer.reachable_by_others == set()
    assert not (tmp_path / "payload-ran").exists()


def _send(file: Path) -> str:
    """Rank 1 sends a payload as torch itself would; what rank 0 makes of it."""
    if dist.get_rank() == 1:
        distributed_c10d._pickler = pickle.Pickler
    found: list[object] = [None, None]
    try:
        dist.all_gather_object(found, Payload(file) if dist.get_rank() == 1 else None)
    except pickle.UnpicklingError as error:
        return str(error)
    return "rebuilt"


def test_ranks_refuse_a_pickle_that_names_a_function(tmp_path):
    said = on_ranks(2, _send, tmp_path / "payload-ran")
    assert said == ["posix.mkdir is not a type that ranks may send to one another"] * 2
    assert not (tmp_path / "payload-ran").exists()


@pytest.mark.parametrize(
    "names",
    [
        *(("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("subprocess", "Popen")),
        ("penstock.engine.launch.torchrun", "run_ranks"),
        ("penstock.engine.launch.torchrun", "subprocess.Popen"),
        ("torch.storage", "_load_from_bytes"),
        ("torch.utils.collect_env", "run"),
    ],
)
def test_a_message_of_ranks_may_name_no_function(names):
    with pytest.raises(pickle.UnpicklingError, match="is not a type that ranks may send"):
        ObjectUnpickler(io.BytesIO()).find_class(*names)


def test_tensors_and_arrays_of_every_type_come_as_they_are_sent():
    tensors = [
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3).T,
        torch.zeros(0, 4),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
    ]
    arrays = [np.arange(4, dtype=">i2").reshape(2, 2), np.float32(1.5), np.zeros((0, 2))]
    stream = io.BytesIO()
    ObjectPickler(stream).dump((tensors, arrays))
    stream.seek(0)
    tensors_then, arrays_then = ObjectUnpickler(stream).load()
    for sent, came in zip(tensors, tensors_then, strict=True):
        assert (came.dtype, came.shape) == (sent.dtype, sent.shape)
        assert torch.equal(came.float(), sent.float())
    for sent, came in zip(arrays, arrays_then, strict=True):
        assert (type(came), came.dtype, came.shape) == (type(sent), sent.dtype, sent.shape)
        assert np.array_equal(came, sent)


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_path_comes_as_it_is_whatever_python_sent_it(module):
    # Of protocol 0, so that the bytes can be read here.
    sent = f"c{module}\nPosixPath\n(V/a/folder\ntR.".encode()
    assert ObjectUnpickler(io.BytesIO(sent)).load() == Path("/a/folder")


def test_members_of_enumerations_come_as_they_are_where_python_pickles_them_by_name(monkeypatch):
    # As Python 3.11.0 to 3.11.3 do.
    by_name = lambda member, _: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    stream = io.BytesIO()
    ObjectPickler(stream).dump(list(_MEM_FORMAT_ENCODING))
    stream.seek(0)
    assert ObjectUnpickler(stream).load() == list(_MEM_FORMAT_ENCODING)


def test_the_kernels_table_tells_what_others_reach():
    with socket.create_server(("0.0.0.0", 0)) as far, socket.create_server(("127.0.0.1", 0)) as own:
        found = {one.port: one.is_loopback for one in listening(os.getpid())}
        assert found[far.getsockname()[1]] is False
        assert found[own.getsockname()[1]] is True
