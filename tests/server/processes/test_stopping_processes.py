"""Processes of a server: where they listen, who is told a key, and how they are stopped."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from safetensors.torch import load_file
from tinker.lib.retryable_exception import RetryableException

from penstock.config.server.config import ServerConfig
from penstock.server.api.wire.response_bodies import OPTIMIZER_STEP
from penstock.server.launch.child_process import ManagedProcess
from penstock.server.launch.multi_node import OtherNode
from penstock.server.launch.prepare import prepare
from penstock.server.launch.supervisor import Launcher, managed_processes
from tests.server.processes.test_kills import data, done
from tests.server.serving import Server, post, soon, write_model
from tests.server.sync.receiver import receiving
from tests.sockets import Observer
from tests.turns import one_day_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

LEAVES = """
import os, signal, sys, time
up, told, asked = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: open(asked, "w").close())
open(up, "w").close()
while not os.path.exists(told):
    time.sleep(0.02)
time.sleep(0.5)
"""
"""Workers that end by themselves some time after they were told to."""

TELLS = """
import signal, sys, time
def end(*_):
    open(sys.argv[2], "w").close()
    raise SystemExit(int(sys.argv[3]))
signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "w").close()
time.sleep(600)
"""
"""An engine that tells workers to leave, and ends with a status."""


@pytest.mark.parametrize("status", [0, 1])
def test_workers_that_leave_by_themselves_are_not_asked_by_a_signal(tmp_path, status):
    said = []
    up, told, asked = (tmp_path / name for name in ("up", "told", "asked"))

    def child(name, code, *words):
        return ManagedProcess(
            name, [sys.executable, "-S", "-c", code, *map(str, words)], {}, said.append
        )

    engine = child("engine", TELLS, tmp_path / "engine-up", told, status)
    workers = child("workers", LEAVES, up, told, asked)

    def stop():
        soon(lambda: up.exists() and (tmp_path / "engine-up").exists(), 20)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    Launcher([engine, workers], said.append, None, is_ready=True).run()
    assert asked.exists() == (status != 0)
    assert said[-1] == "stopping (SIGTERM)"


def test_workers_of_another_machine_than_the_engines_are_left_to_it_for_a_while(tmp_path):
    said = []
    up, told, asked = (tmp_path / name for name in ("up", "told", "asked"))
    words = [sys.executable, "-S", "-c", LEAVES, str(up), str(told), str(asked)]
    together = OtherNode(tmp_path)
    (tmp_path / "start").write_text("one")
    workers = ManagedProcess("workers", words, {}, said.append, together=together)

    def stop():
        soon(up.exists, 20)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
        told.touch()

    threading.Thread(target=stop).start()
    Launcher([workers], said.append, None).run()
    assert not asked.exists()
    assert said[-1] == "stopping (SIGTERM)"


def test_the_engine_has_as_long_to_save_as_is_written(tmp_path):
    config = ServerConfig(
        model_path="builtin:tiny-qwen3",
        tokenizer_path="builtin:bytes",
        output_dir=str(tmp_path),
        api_port=0,
        stop_timeout=123.0,
    )
    api, engine, _ = managed_processes(prepare(config, "auto"), lambda _: None)
    assert 123 < engine.stop_seconds < 140
    assert api.stop_seconds < 20


def test_a_second_signal_does_not_wait_for_what_is_saved(tmp_path):
    said = []
    up, heard = tmp_path / "up", tmp_path / "heard"
    deaf = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[2], 'w').close())\n"
        "open(sys.argv[1], 'w').close()\n"
        "while True: time.sleep(1)"
    )
    words = [sys.executable, "-S", "-c", deaf, str(up), str(heard)]
    engine = ManagedProcess("engine", words, {}, said.append, stop_seconds=600.0)

    def stop():
        for file in (up, heard):
            soon(file.exists, 20)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    began = time.monotonic()
    Launcher([engine], said.append, None).run()
    assert time.monotonic() - began < 30
    assert "engine did not end in time and is killed" in said


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Of two ranks; tests take it on from one another, and the last one stops it for good."""
    folder = tmp_path_factory.mktemp("two")
    sizes = {"nproc_per_node": 2, "data_parallel_shard_size": 2}
    server = Server(
        folder / "served",
        write_model(folder / "model"),
        data_parallel_mode="fsdp2",
        log_level="DEBUG",
        **sizes,
    ).start()
    yield server
    server.stop()


@one_day_in(3, of=0)
@pytest.mark.dist
def test_a_server_of_two_ranks_listens_on_loopback_and_survives_every_payload(server, tmp_path):
    ran = tmp_path / "payload-ran"
    with Observer(server.pid, ran) as observer:
        soon(lambda: observer.seen, 60)
    processes = server.processes()
    assert {"api", "engine", "rank 0", "rank 1"} <= processes.keys()
    assert processes["rank 1"] in {one.pid for one in observer.seen}
    assert observer.reachable_by_others == set()
    assert observer.stores == []
    assert not ran.exists()
    assert httpx.get(f"{server.url}/health", timeout=30).json()["workers"] == "ready"


@one_day_in(3, of=0)
def test_a_server_that_is_stopped_has_the_same_weights_after_its_next_start(server):
    def outputs():
        told = done(server, "forward", {"model_id": "m", "forward_input": data(1)})
        return told["loss_fn_outputs"]

    def step():
        done(server, "forward_backward", {"model_id": "m", "forward_backward_input": data(2)})
        body = {"model_id": "m", "adam_params": {"learning_rate": 1e-2}}
        return done(server, "optim_step", body)["metrics"]

    done(server, "create_model", {"model_id": "m", "base_model": str(server.model)})
    first = outputs()
    step()
    step()
    before = outputs()
    assert before != first
    server.stop()
    assert server.status == 0
    assert "model m is saved at step 2: m/weights/checkpoint-" in server.log
    # Ranks that die of a signal have torchrun tell of a failure.
    assert "exitcode" not in server.log
    assert "is killed" not in server.log
    server.start()
    assert outputs() == before
    assert step()["step"] == 3


KEY = "tml-of-theirs-alone"


def said_by(server, path, body):
    answer = httpx.post(f"{server.url}/{path}", json=body, timeout=60)
    return answer.status_code, answer.text


@one_day_in(3, of=0)
@pytest.mark.dist
def test_weights_arrive_at_a_server_with_a_key_that_is_found_nowhere(server, tmp_path):
    with receiving(tmp_path) as receiver:
        receiver.key, receiver.info = KEY, {"tp_size": 1, "api_key": KEY}
        there = {"host": "127.0.0.1", "port": receiver.endpoint.port}
        answers = [
            said_by(server, "add_inference_endpoint", body)
            for body in (
                there,
                {**there, "api_key": KEY, "world_size": 3},
                {**there, "api_key": KEY},
            )
        ]
        assert [status for status, _ in answers] == [400, 400, 200]
        assert "HTTP 401" in answers[0][1]
        assert "its tp_size is 1" in answers[1][1]
        created = post(
            server, "create_model", {"model_id": "default", "base_model": str(server.model)}
        )
        assert created.status_code == 200
        answers.append(said_by(server, "sync_inference_weights", {"flush_cache": True}))
        assert answers[-1][0] == 200, answers[-1]
        got = receiver.tensors()
    answers.append((0, httpx.get(f"{server.url}/list_inference_endpoints").text))
    processes = [Path(f"/proc/{pid}") for pid in server.processes().values()]
    told = [file.read_bytes() for one in processes for file in (one / "cmdline", one / "environ")]
    server.stop()
    want = load_file(server.model / "model.safetensors")
    # A new adapter changes nothing.
    assert want.keys() == got.keys()
    assert all(tensor.bfloat16().equal(got[name]) for name, tensor in want.items())
    assert not any(KEY.encode() in each for each in told)
    assert KEY not in f"{answers} {server.log}"
    kept = [path for path in server.folder.rglob("*") if path.is_file()]
    holding = [path.name for path in kept if KEY.encode() in path.read_bytes()]
    assert holding == ["endpoints.json"]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_a_client_of_the_sdk_that_tries_again_goes_on_over_a_stop(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    server = Server(tmp_path / "served", write_model(tmp_path / "model")).start()
    enough = threading.Event()
    steps: list[float] = []
    faults: list[str] = []

    def train():
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-of-tests")
        training = service.create_lora_training_client(
            base_model=str(server.model), rank=4
        ).result()
        tokens = list(range(100))
        inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * 99}
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs
        )
        while not enough.is_set():
            try:
                passed = training.forward_backward([datum], "cross_entropy")
                stepped = training.optim_step(tinker.AdamParams(learning_rate=1e-3))
                passed.result()
                metrics = stepped.result().metrics
                assert metrics is not None
                steps.append(metrics[OPTIMIZER_STEP])
            except (RetryableException, tinker.RequestFailedError) as error:
                faults.append(str(error))

    try:
        with ThreadPoolExecutor(1) as pool:
            trained = pool.submit(train)
            soon(lambda: trained.done() or len(steps) > 4, 60)
            server.stop()
            before = len(steps)
            server.start()
            try:
                soon(lambda: trained.done() or len(steps) > before + 4, 90)
            finally:
                enough.set()
            trained.result(60)
    finally:
        server.stop()
    assert "Traceback" not in server.log
    assert "exitcode" not in server.log
    # A future that was open is gone with the API, and lost gradients are told once; no step is.
    assert len(faults) <= 3, faults
    assert all(0 < after - before <= 2 for before, after in pairwise(steps)), steps
