"""Processes are started again as often as they should be, and none outlives its launcher."""

import http.server
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from penstock.cli.main import main as penstock
from penstock.config.server.config import ServerConfig
from penstock.core import env
from penstock.core.errors import ConfigError, StageError
from penstock.core.process.rendezvous_endpoint import is_loopback_host
from penstock.server.__main__ import main
from penstock.server.launch.addresses import free_port, tcp, workers_address
from penstock.server.launch.child_process import ManagedProcess
from penstock.server.launch.job import ServerJob
from penstock.server.launch.multi_node import FirstNode, OtherNode
from penstock.server.launch.prepare import prepare, read_api_keys
from penstock.server.launch.supervisor import Launcher, managed_processes, serve
from penstock.server.protocol.secret import read_secret, write_secret
from tests.waiting import soon

pytestmark = pytest.mark.slow

FOREVER = "import time; time.sleep(600)"
DEAF = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "open(sys.argv[1], 'w').close(); time.sleep(600)"
)


def child(say, code, *words, name="one", **more):
    return ManagedProcess(
        name, [sys.executable, "-S", "-c", code, *map(str, words)], {}, say, **more
    )


def stop(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


class Saying(list):
    """Lines that were said; what comes of a line that holds a word is done then."""

    def __init__(self, **then):
        super().__init__()
        self.then = then

    def __call__(self, line):
        self.append(line)
        for word, act in list(self.then.items()):
            if word in line:
                del self.then[word]
                act()

    def count_of(self, word):
        return sum(word in line for line in self)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_dies_is_started_again_after_a_pause_that_grows(tmp_path):
    times = tmp_path / "times"
    code = "import sys, time; open(sys.argv[1], 'a').write(f'{time.time()}\\n')"
    said = Saying()
    said.then["again in 2 s"] = stop
    Launcher([child(said, code, times)], said, None).run()
    assert said.count_of("one started") == 3
    assert [line for line in said if "again" in line] == [
        "one ended with status 0; started again in 0.5 s",
        "one ended with status 0; started again in 1 s",
        "one ended with status 0; started again in 2 s",
    ]
    first, second, third = map(float, times.read_text().split())
    assert 0.5 <= second - first < third - second


def test_deaths_long_after_a_start_are_not_counted_together():
    said = Saying()
    one = child(said, FOREVER, most_deaths=1, settled_seconds=0.0)
    one.start()
    for _ in range(3):
        pid = int(said[-1].split("pid ")[1].rstrip(")"))
        os.kill(pid, signal.SIGKILL)
        soon(lambda: one.look() or "again in 0.5 s" in said[-1], 5)
        one._again_at = 0.0
        one.look()
    assert not one.is_given_up
    assert said.count_of("SIGKILL") == 3
    one.ask_to_end()
    one.end()


def test_workers_that_never_come_up_end_the_launcher_and_all_that_it_started():
    said = Saying()
    other = child(said, FOREVER, name="api")
    workers = child(said, "raise SystemExit(3)", name="workers", most_deaths=1)
    with pytest.raises(StageError, match="before they could serve"):
        Launcher([other, workers], said, ("127.0.0.1", 9)).run()
    pid = int(said[0].split("pid ")[1].rstrip(")"))
    assert not is_alive(pid)
    assert "workers ended with status 3, 2 times in a row: not started again" in said


def test_readiness_is_told_once_and_workers_that_die_for_good_afterwards_leave_the_api(tmp_path):
    told = {"workers": "starting"}

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, format, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        gate = tmp_path / "gate"
        dies = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]):\n time.sleep(0.02)"
        said = Saying()
        workers = child(said, dies, gate, name="workers", most_deaths=0)
        said.then["serving at"] = gate.touch
        said.then["not started again"] = lambda: threading.Timer(0.7, stop).start()
        threading.Timer(1.2, told.update, [{"workers": "ready"}]).start()
        began = time.monotonic()
        Launcher([workers], said, ("127.0.0.1", port), tmp_path / "given-up").run()
        server.shutdown()
    assert (tmp_path / "given-up").exists()
    assert said.count_of(f"serving at http://127.0.0.1:{port}") == 1
    assert time.monotonic() - began > 1.2
    assert said[-1] == "stopping (SIGTERM)"


def test_what_does_not_end_when_asked_is_killed(tmp_path):
    said = Saying()
    deaf = child(said, DEAF, tmp_path / "up", stop_seconds=0.3)
    threading.Thread(target=lambda: soon((tmp_path / "up").exists, 10) and stop()).start()
    began = time.monotonic()
    Launcher([deaf], said, None).run()
    assert "one did not end in time and is killed" in said
    assert time.monotonic() - began < 10
    pid = int(said[0].split("pid ")[1].rstrip(")"))
    assert not is_alive(pid)


def test_processes_end_with_a_launcher_that_is_killed(tmp_path):
    config = ServerConfig(model_path="m", output_dir=str(tmp_path))
    job = job_of(tmp_path, config).write()
    (tmp_path / "idle.py").write_text(FOREVER)
    script = textwrap.dedent(
        """
        import os, sys
        from penstock.server.launch.child_process import ManagedProcess
        from penstock.server.launch.supervisor import Launcher
        child = "penstock.server.launch.child_main"
        words = ["-m", child, str(os.getpid()), "an idler", "idle", sys.argv[1]]
        say = lambda line: print(line, flush=True)
        Launcher([ManagedProcess("idle", [sys.executable, *words], {}, say)], say, None).run()
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(job)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout
        pid = int(launcher.stdout.readline().split("pid ")[1].rstrip(")\n"))
        words = Path(f"/proc/{pid}/cmdline")
        # Killed before it asks the kernel to end with its parent, it sees itself who its parent is.
        soon(lambda: b"idle" in words.read_bytes(), 10)
        time.sleep(0.5)
        launcher.kill()
        soon(lambda: not is_alive(pid), 10)


def test_workers_of_several_machines_end_and_start_together(tmp_path):
    first_said, other_said = Saying(), Saying()
    first = child(first_said, FOREVER, together=FirstNode(tmp_path))
    other = child(other_said, FOREVER, together=OtherNode(tmp_path))

    def pid_of(said):
        return int([line for line in said if "pid" in line][-1].split("pid ")[1].rstrip(")"))

    def both_until(done):
        soon(lambda: (first.look(), other.look(), done())[-1], 20, every=0.02)

    other.look()
    assert other_said == []
    both_until(lambda: first_said.count_of("started (") == other_said.count_of("started (") == 1)
    os.kill(pid_of(other_said), signal.SIGKILL)
    both_until(lambda: first_said.count_of("started (") == other_said.count_of("started (") == 2)
    assert first_said.count_of("of another machine ended") == 1
    os.kill(pid_of(first_said), signal.SIGKILL)
    both_until(lambda: first_said.count_of("started (") == other_said.count_of("started (") == 3)
    assert other_said.count_of("of another machine ended") == 1
    for one in (first, other):
        one.ask_to_end()
        one.end()


def job_of(folder, config):
    return ServerJob(
        config=config,
        mode="auto",
        output_dir=folder,
        config_path="builtin:tiny-qwen3",
        weights=None,
        tokenizer="builtin:bytes",
        api_host="127.0.0.1",
        api_port=8000,
        engine_address="tcp://127.0.0.1:1",
        workers_bind="tcp://127.0.0.1:2",
        workers_address="tcp://127.0.0.1:2",
    )


def test_a_job_is_read_as_it_was_written_and_by_its_owner_alone(tmp_path):
    config = ServerConfig.model_validate({"model_path": "m", "lora_rank": 4})
    job = job_of(tmp_path, config)
    file = job.write()
    read = ServerJob.read(file)
    assert read == job
    assert read.config.model_fields_set == {"model_path", "lora_rank"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def tiny(tmp_path, **fields):
    return ServerConfig(
        model_path="builtin:tiny-qwen3",
        tokenizer_path="builtin:bytes",
        output_dir=str(tmp_path / "out"),
        **{"api_port": 0, **fields},
    )


def test_workers_get_variables_that_are_named_and_no_other_secrets(tmp_path, monkeypatch):
    mine = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_TOOL", "OTHER_TOOL")
    for name in (*mine, env.SERVER_KEYS):
        monkeypatch.setenv(name, "x")
    given: dict[str, set[str]] = {}

    class Started:
        pid = 1

        def __init__(self, command, env, **_):
            name = command[4] if "penstock.server.launch.child_main" in command else "workers"
            given[name] = {each for each in mine if each in env} | {
                each for each in env if each.startswith("PENSTOCK_SERVER_")
            }

    prepared = prepare(tiny(tmp_path, pass_env=["MY_TOOL"]), "auto")
    monkeypatch.setattr("penstock.server.launch.child_process.subprocess.Popen", Started)
    for child in managed_processes(prepared, lambda _: None):
        child.start()
    assert given == {
        "api": {env.SERVER_KEYS, env.ENGINE_SECRET},
        "engine": {env.ENGINE_SECRET, env.WORKERS_SECRET},
        "workers": {env.WORKERS_SECRET, "MY_TOOL"},
    }
    with pytest.raises(ConfigError, match="pass_env names NOT_SET_ANYWHERE, which is not set"):
        prepare(tiny(tmp_path, pass_env=["NOT_SET_ANYWHERE"]), "auto")


def test_each_process_is_handed_the_secrets_that_it_needs_and_the_job_has_none(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(env.SERVER_KEYS, "tml-secret, tml-other")
    prepared = prepare(tiny(tmp_path), "auto")
    prepared.publish()
    api, engine, workers = managed_processes(prepared, lambda _: None)
    assert [one.name for one in (api, engine, workers)] == ["api", "engine", "workers"]
    secrets_of_the_server = (env.SERVER_KEYS, env.ENGINE_SECRET, env.WORKERS_SECRET)
    known = {
        one.name: {name for name in secrets_of_the_server if name in one.environment}
        for one in (api, engine, workers)
    }
    assert known == {
        "api": {env.SERVER_KEYS, env.ENGINE_SECRET},
        "engine": {env.ENGINE_SECRET, env.WORKERS_SECRET},
        "workers": {env.WORKERS_SECRET},
    }
    secrets = [prepared.engine_secret, prepared.workers_secret, "tml-secret"]
    everywhere = prepared.file.read_text() + " ".join(
        word for one in (api, engine, workers) for word in one.command
    )
    assert not any(secret in everywhere for secret in secrets)
    assert prepared.keys == ("tml-secret", "tml-other")


def test_a_child_sees_no_secret_of_the_launchers_own_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(env.SERVER_KEYS, "tml-secret")
    seen = tmp_path / "seen"
    code = "import os, sys; open(sys.argv[1], 'w').write(str('PENSTOCK_SERVER_KEYS' in os.environ))"
    one = child(lambda _: None, code, seen)
    one.start()
    soon(lambda: seen.is_file() and seen.read_text(), 10)
    one.end()
    assert seen.read_text() == "False"


def test_other_machines_are_let_in_only_with_keys(tmp_path, monkeypatch):
    monkeypatch.delenv(env.SERVER_KEYS, raising=False)
    assert read_api_keys(tiny(tmp_path)) == ()
    for host in ("0.0.0.0", "::", "10.0.0.1", "node0"):
        with pytest.raises(ConfigError, match="there are no keys"):
            prepare(tiny(tmp_path, api_host=host), "auto")
    file = tmp_path / "keys"
    file.write_text("# of the team\ntml-one\n\n  # of others\n  tml-two\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_api_keys(tiny(tmp_path, api_host="0.0.0.0", api_keys_file=str(file)))
    file.chmod(0o600)
    keyed = tiny(tmp_path, api_host="0.0.0.0", api_keys_file=str(file))
    assert read_api_keys(keyed) == ("tml-one", "tml-two")
    file.write_text("# nobody\n")
    with pytest.raises(ConfigError, match="no keys"):
        read_api_keys(keyed)


@pytest.mark.parametrize(
    ("host", "answer"),
    [("localhost", True), ("127.0.0.3", True), ("::1", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_hosts_of_this_machine_alone_are_told_from_others(host, answer):
    assert is_loopback_host(host) == answer


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path):
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        port = server.server_address[1]
        with pytest.raises(ConfigError, match=f"{port} .api_port.: address already in use"):
            prepare(tiny(tmp_path, api_port=port), "auto")
    assert free_port("127.0.0.1", port, "api_port") == port


def test_an_engine_elsewhere_reads_where_workers_are_and_what_they_know(tmp_path):
    config = tiny(tmp_path, worker_bind_port=free_port("127.0.0.1", 0, ""))
    with pytest.raises(ConfigError, match="--mode workers"):
        prepare(tiny(tmp_path, worker_connection_timeout=0.1), "connect")
    workers = prepare(config, "workers")
    workers.publish()
    engine = prepare(config, "connect")
    assert engine.workers_secret == workers.workers_secret
    assert engine.job.workers_address == tcp("127.0.0.1", config.worker_bind_port)
    assert [one.name for one in managed_processes(engine, lambda _: None)] == ["api", "engine"]
    assert [one.name for one in managed_processes(workers, lambda _: None)] == ["workers"]
    kept = tmp_path / "out" / "server" / "workers.secret"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    kept.chmod(0o640)
    with pytest.raises(ConfigError, match="may be read"):
        prepare(config, "connect")


def test_two_servers_do_not_share_a_folder(tmp_path):
    first, second = prepare(tiny(tmp_path), "auto"), prepare(tiny(tmp_path), "auto")
    first.publish()
    with FileLock(first.lock), pytest.raises(ConfigError, match="another server"):
        serve(second, lambda _: None)
    assert ServerJob.read(first.file) == first.job
    assert second.file == first.file


def test_a_secret_that_is_none_is_refused(tmp_path):
    write_secret(tmp_path / "s", "not hex")
    with pytest.raises(ConfigError, match="holds no secret"):
        read_secret(tmp_path / "s")


def test_an_engine_reaches_every_address_by_loopback_unless_it_is_told_another(tmp_path):
    bind = "tcp://0.0.0.0:5"
    assert workers_address(tiny(tmp_path), bind) == "tcp://127.0.0.1:5"
    elsewhere = tiny(tmp_path, engine_connect_host="node0")
    assert workers_address(elsewhere, bind) == "tcp://node0:5"


def test_a_model_that_is_not_there_is_told_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        prepare(ServerConfig(model_path="./nowhere", output_dir=str(tmp_path)), "auto")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    config = ServerConfig(
        model_path=str(tmp_path / "empty"), tokenizer_path="builtin:bytes", output_dir=str(tmp_path)
    )
    with pytest.raises(ConfigError, match="holds no"):
        prepare(config, "auto")


def test_the_words_of_xorls_launcher_are_read_and_faults_end_it_with_status_2(tmp_path, capsys):
    file = tmp_path / "s.yaml"
    file.write_text(f"model_path: builtin:tiny-qwen3\noutput_dir: {tmp_path}\n")
    words = ["--mode", "auto", "--config", str(file), "--api-port", "x", "--server.lora_rank=0"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "--server.api_port: is the text x" in said
    assert "--server.lora_rank: is 0; it must be at least 1" in said


def test_the_command_tells_all_faults_of_a_file_and_of_options(tmp_path, capsys):
    file = tmp_path / "s.yaml"
    file.write_text("model_path: builtin:tiny-qwen3\nlora_rnk: 4\n")
    with pytest.raises(SystemExit) as ended:
        penstock(["serve", str(file), "--server.api_port", "-2"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{file}:2: lora_rnk: unknown field; did you mean lora_rank?" in said
    assert "--server.api_port: is -2; it must be at least 0" in said
    with pytest.raises(SystemExit) as ended:
        penstock(["serve", str(file), "--mode", "atuo"])
    assert ended.value.code == 2
    assert "--mode atuo is none of auto, connect, workers" in capsys.readouterr().err
