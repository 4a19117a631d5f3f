"""Prefect's servers that Penstock starts or describes answer nobody without their password."""

import base64
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect
from websockets.typing import Origin

from penstock.cli import flow as cli_flow
from penstock.cli.console import Console
from penstock.cli.doctor import DoctorCheck, check_prefect_password
from tests.conftest import ROOT
from tests.flows.server import FLOW, PREFECT, Prefect, free_port
from tests.pipeline.runs import write_run
from tests.sockets import listening
from tests.turns import one_day_in
from tests.waiting import soon

COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
CHROMIUM = shutil.which("chromium")

PAGE = """
<body><script>
const api = "API", results = [];
async function attempt(name, options, read) {
  try {
    const answer = await fetch(api + "/deployments/filter", {method: "POST", ...options});
    results.push(name + " " + answer.type + " " + answer.status);
  } catch (error) { results.push(name + " refused"); }
}
(async () => {
  await attempt("cors", {headers: {"content-type": "application/json"}, body: "{}"});
  await attempt("no-cors", {mode: "no-cors", body: new Blob(["{}"])});
  await fetch(api + "/work_pools/", {method: "POST", mode: "no-cors",
    body: new Blob(['{"name": "of-a-page", "type": "process"}'])}).catch(() => 0);
  document.body.textContent = results.join("; ") + "; done";
})();
</script></body>
"""


def password_of(*variables: str) -> dict[str, str]:
    """What deploy/passwords.sh writes, as compose gives it to the server and to its clients."""
    script = ROOT / "deploy" / "passwords.sh"
    text = subprocess.run(["sh", script], capture_output=True, text=True, check=True).stdout
    auth = dict(line.split("=", 1) for line in text.splitlines())["PREFECT_API_AUTH_STRING"]
    return dict.fromkeys(variables, auth)


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """A server with the password and the origins of compose.yaml."""
    server = Prefect(tmp_path_factory.mktemp("closed"))
    origins = COMPOSE["services"]["server"]["environment"]["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
    server.environment |= {
        **password_of("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"),
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": origins,
    }
    auth = server.environment["PREFECT_API_AUTH_STRING"]
    try:
        server.start()
        server.api.headers["authorization"] = f"Basic {base64.b64encode(auth.encode()).decode()}"
        yield server
    finally:
        server.stop()


class Rebound(SimpleHTTPRequestHandler):
    """Serves a page, and answers as the server at `api` does afterwards: what a browser meets at a
    name that is bound to loopback once its page was read.
    """

    def __init__(self, *args, api: str, **kwargs):
        self.api = api
        super().__init__(*args, **kwargs)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {"host": self.headers["host"], "content-type": "application/json"}
        url = self.api + self.path.removeprefix("/api")
        answer = httpx.post(url, content=body, headers=headers)
        self.send_response(answer.status_code)
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)


@contextmanager
def page_on_another_port(folder: Path, api: str):
    handler = partial(Rebound, directory=str(folder), api=api)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield site.server_port
        site.shutdown()


def _send_event(address: str) -> None:
    with connect(address, origin=Origin("http://attacker.example")) as websocket:
        websocket.send("{}")
        websocket.recv(10)


@pytest.mark.slow
def test_no_name_of_the_host_and_no_socket_replaces_the_password(closed):
    api = str(closed.api.base_url).rstrip("/")
    hosts = ["127.0.0.1", "attacker.example", f"attacker.example:{closed.port}", "localhost/health"]
    for host in hosts:  # a name that is bound anew to loopback brings its own Host
        for method, path in (("POST", "/flows/filter"), ("GET", "/admin/settings")):
            answer = httpx.request(method, api + path, headers={"host": host}, json={})
            assert answer.status_code == 401, (host, path)
    for path in ("/events/in", "/events/out", "/logs/out"):
        with pytest.raises(WebSocketException):
            _send_event(api.replace("http", "ws", 1) + path)
    assert closed.api.post("/flows/filter", json={}).status_code == 200


@pytest.mark.slow
def test_only_the_pages_of_the_server_itself_may_read_its_answers(closed):
    def allowed(origin):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        answer = httpx.options(f"{closed.api.base_url}flows/filter", headers=asked)
        return answer.headers.get("access-control-allow-origin")

    assert allowed("http://127.0.0.1:4200") == "http://127.0.0.1:4200"
    assert allowed("http://attacker.example") is None
    assert allowed("null") is None


def visit(server: Prefect, folder: Path, *, rebound: bool = False) -> str:
    """What a page of another origin reports of its requests to the server, or to its own name that
    is bound anew to the server.
    """
    assert CHROMIUM
    folder.mkdir()
    api = str(server.api.base_url).rstrip("/")
    (folder / "index.html").write_text(PAGE.replace("API", "/api" if rebound else api))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--host-resolver-rules=MAP attacker.example 127.0.0.1"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000"]
    with page_on_another_port(folder, api) as port:
        done = subprocess.run(
            [*command, "--dump-dom", f"http://attacker.example:{port}"],
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_page_of_another_origin_in_a_browser_reads_and_makes_nothing(closed, prefect, tmp_path):
    assert "cors refused; no-cors opaque 0; done" in visit(closed, tmp_path / "closed")
    rebound = visit(closed, tmp_path / "rebound", rebound=True)
    assert "cors basic 401; no-cors basic 401; done" in rebound
    assert closed.api.get("/work_pools/of-a-page").status_code == 404
    # The same page with a server that is started without a password.
    assert "cors cors 200; no-cors opaque 0; done" in visit(prefect, tmp_path / "open")
    assert prefect.api.get("/work_pools/of-a-page").status_code == 200
    prefect.api.delete("/work_pools/of-a-page")


@pytest.mark.slow
def test_doctor_names_a_server_that_answers_without_a_password(closed, prefect):
    def check_of(server: Prefect) -> DoctorCheck:
        """Asks again where a busy server takes longer than doctor waits."""

        def answered() -> DoctorCheck | None:
            [check] = check_prefect_password(str(server.api.base_url))
            return None if "gave no answer" in check.mend else check

        return soon(answered)

    assert check_of(prefect).standing == "absent"
    assert "answers without a password" in check_of(prefect).mend
    assert check_of(closed).standing == "ok"
    [unreachable] = check_prefect_password(f"http://127.0.0.1:{free_port()}/api")
    assert unreachable.standing == "absent"
    assert "gave no answer" in unreachable.mend
    assert check_prefect_password("") == []


class Answering(BaseHTTPRequestHandler):
    """A server that answers every request with this status."""

    status = 200

    def do_GET(self):
        self.send_response(self.status)
        self.end_headers()


@pytest.mark.parametrize(("status", "warns"), [(200, True), (401, False), (503, False)])
def test_deploying_and_flows_warn_of_a_server_without_a_password(
    tmp_path, monkeypatch, capsys, status, warns
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Answering, "status", status)
    monkeypatch.setattr(cli_flow, "_prefect", lambda *_, **__: SimpleNamespace(returncode=0))
    require_server = runpy.run_path(str(ROOT / "flows" / "prefect_server.py"))["require_server"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        monkeypatch.setattr(cli_flow, "prefect_api_url", lambda: url)
        cli_flow.deploy(Console(), "pool")
        deployed = "".join(capsys.readouterr())
        with temporary_settings({PREFECT_API_URL: url}):
            assert require_server()
        started = "".join(capsys.readouterr())
        server.shutdown()
    for output in (deployed, started):
        assert (f"{url} answers without a password" in output) == warns


@pytest.mark.slow
def test_a_run_may_not_say_what_its_worker_executes_unless_the_worker_allows_it(closed, tmp_path):
    worker = [sys.executable, str(ROOT / "deploy" / "worker.py"), PREFECT]
    closed.spawn([*worker, "worker", "start", "--pool=penstock", "--type=process"], "worker")
    soon(lambda: closed.api.get("/work_pools/penstock").status_code == 200)
    closed.run(PREFECT, "--no-prompt", "deploy", "--name", "prepare")
    deployment = closed.api.get("/deployments/name/prepare/prepare").json()["id"]
    ran = tmp_path / "ran"
    for variables in ({"command": f"touch {ran}"}, {"env": {"PYTHONPATH": str(tmp_path)}}):
        asked = closed.post(
            f"/deployments/{deployment}/create_flow_run",
            {"parameters": {"config": "configs/quickstart.yaml"}, "job_variables": variables},
        )
        ended = closed.ended(asked.json()["id"])
        assert ended["state_type"] == "CRASHED"
        assert f"takes no {next(iter(variables))} from a flow run" in ended["state"]["message"]
    assert not ran.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed", marks=one_day_in(4, of=0)),
        pytest.param(signal.SIGTERM, id="ended", marks=one_day_in(4, of=2)),
    ],
)
def test_the_temporary_server_of_a_flow_asks_for_a_password_and_dies_with_its_flow(
    tmp_path, number
):
    config = write_run(tmp_path, train={"max_steps": 100_000, "num_train_epochs": 1000})
    environment = {name: value for name, value in os.environ.items() if "PREFECT" not in name}
    environment |= {"PREFECT_HOME": str(tmp_path / "prefect"), "DO_NOT_TRACK": "1"}
    flow = subprocess.Popen([*FLOW, str(config)], env=environment, stderr=subprocess.DEVNULL)

    def serving() -> tuple[int, str] | None:
        for found in listening(flow.pid):
            if "temporary_server.py" in found.command:
                address = f"http://127.0.0.1:{found.port}/api"
                with suppress(httpx.TransportError):
                    if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                        return found.pid, address
        return None

    try:
        server, address = soon(serving)
        assert httpx.post(f"{address}/flows/filter", json={}).status_code == 401
        soon((tmp_path / "out" / "metrics.jsonl").exists)
    finally:
        flow.send_signal(number)
        flow.wait(100)

    def refused() -> bool:
        try:
            httpx.get(f"{address}/health", timeout=5)
        except httpx.TransportError:
            return True
        return False

    soon(lambda: not Path(f"/proc/{server}").exists(), 20)
    soon(refused, 5)
