"""A server sends a model to an inference server that asks for a key, which nobody else is told."""

from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from tests.server.serving import Server, post, write_model
from tests.server.sync.receiver import receiving

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(280)]

KEY = "tml-of-theirs-alone"


def said_by(server, path, body):
    answer = httpx.post(f"{server.url}/{path}", json=body, timeout=60)
    return answer.status_code, answer.text


def test_weights_arrive_at_a_server_with_a_key_that_is_found_nowhere(tmp_path):
    model = write_model(tmp_path / "model")
    server = Server(tmp_path / "served", model, log_level="DEBUG").start()
    try:
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
                server, "create_model", {"model_id": "default", "base_model": str(model)}
            )
            assert created.status_code == 200
            answers.append(said_by(server, "sync_inference_weights", {"flush_cache": True}))
            assert answers[-1][0] == 200, answers[-1]
            got = receiver.tensors()
        answers.append((0, httpx.get(f"{server.url}/list_inference_endpoints").text))
        processes = [Path(f"/proc/{pid}") for pid in server.processes().values()]
        told = [
            file.read_bytes() for one in processes for file in (one / "cmdline", one / "environ")
        ]
    finally:
        server.stop()
    want = load_file(model / "model.safetensors")
    # A new adapter changes nothing.
    assert want.keys() == got.keys()
    assert all(tensor.bfloat16().equal(got[name]) for name, tensor in want.items())
    assert not any(KEY.encode() in each for each in told)
    assert KEY not in f"{answers} {server.log}"
    kept = [path for path in server.folder.rglob("*") if path.is_file()]
    holding = [path.name for path in kept if KEY.encode() in path.read_bytes()]
    assert holding == ["endpoints.json"]
