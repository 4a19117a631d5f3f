"""A stand-in for an inference server that takes weights as SGLang does: an HTTP front in a thread
of the test, and a process for each of its ranks, which joins the trainer's group by torch's own
machinery and keeps what it receives."""

import datetime
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from penstock.server.protocol.types import Endpoint
from tests.ranks import warm_server

SECONDS = 30
COMMANDS = {
    "/init_weights_update_group": "join",
    "/update_weights_from_distributed": "receive",
    "/destroy_weights_update_group": "leave",
}


@dataclass
class Fault:
    """What goes wrong, from the `nth` request to `path` on."""

    path: str
    how: Literal[
        "refuses", "redirects", "says no", "dies", "dies midway", "takes nothing", "is silent"
    ]
    nth: int = 1


@dataclass
class Receiver:
    """One of them, from the test's side."""

    endpoint: Endpoint
    pipes: list[Any]
    processes: list[Any]
    folder: Path
    fault: Fault | None = None
    elsewhere: str = ""
    """Where it redirects to."""
    key: str | None = None
    """What it asks of whoever asks anything but whether it lives."""
    info: dict[str, Any] | None = None
    """What it says of itself; None: it has no such route."""
    flushes: bool = True
    """Whether it has a route for that."""
    paused: bool = False
    paths: list[str] = field(default_factory=list)
    """Of all that was posted, in order."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def updates(self) -> list[dict[str, Any]]:
        """The bodies of the updates."""
        named = zip(self.paths, self.bodies, strict=True)
        return [body for path, body in named if path == "/update_weights_from_distributed"]

    def tensors(self, rank: int = 0) -> dict[str, Any]:
        """What a rank has received."""
        import torch

        file = self.folder / f"{self.endpoint.port}_{rank}.pt"
        [kept] = self.ask("keep", str(file), only=rank)
        assert kept == (True, "kept"), kept
        return torch.load(file, weights_only=True)

    def groups(self) -> list[list[str]]:
        """The groups that each rank is in."""
        return [json.loads(said) for _, said in self.ask("tell", None)]

    def ask(self, command: str, body: Any, only: int | None = None) -> list[tuple[bool, str]]:
        """What each rank says, or one of them."""
        pipes = self.pipes if only is None else [self.pipes[only]]
        with self.lock:
            for pipe in pipes:
                with suppress(OSError):
                    pipe.send((command, body))
            return [_said(pipe) for pipe in pipes]

    def strikes(self, path: str) -> str | None:
        """How this request fails, if it does."""
        fault = self.fault
        if fault is None or fault.path != path:
            return None
        fault.nth -= 1
        return None if fault.nth > 0 else fault.how


def _said(pipe: Any) -> tuple[bool, str]:
    try:
        return pipe.recv() if pipe.poll(SECONDS) else (False, "no word")
    except (EOFError, OSError):
        return (False, "gone")


@contextmanager
def receiving(folder: Path, world: int = 1) -> Iterator[Receiver]:
    """A receiver of so many ranks, alive within."""
    context = warm_server()
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(theirs, rank), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    front = _Server(("127.0.0.1", 0), _Front)
    endpoint = Endpoint(host="127.0.0.1", port=front.server_address[1], world_size=world)
    front.receiver = receiver = Receiver(endpoint, pipes, processes, folder)
    threading.Thread(target=front.serve_forever, args=[0.05], daemon=True).start()
    try:
        yield receiver
    finally:
        receiver.released.set()
        front.shutdown()
        front.server_close()
        for process in processes:
            process.kill()
            process.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    receiver: Receiver

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has gone; that is no fault of a test's."""


class _Front(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    @property
    def receiver(self) -> Receiver:
        assert isinstance(self.server, _Server)
        return self.server.receiver

    def do_GET(self) -> None:
        receiver = self.receiver
        if self.path == "/health":
            self.answer(200, {})
        elif self.is_let_in():
            known = self.path == "/server_info" and receiver.info is not None
            self.answer(200 if known else 404, receiver.info or {})

    def is_let_in(self) -> bool:
        key, said = self.receiver.key, self.headers.get("authorization", "")
        if key is not None and said != f"Bearer {key}":
            self.answer(401, {"error": "Unauthorized", "message": f"{said!r} is not known"})
            return False
        return True

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length) or b"{}")
        receiver = self.receiver
        if not self.is_let_in():
            return
        receiver.paths.append(self.path)
        receiver.bodies.append(body)
        how = receiver.strikes(self.path)
        if how == "refuses":
            self.answer(500, {"message": "out of order"})
        elif how == "redirects":
            self.send_response(307)
            self.send_header("location", receiver.elsewhere)
            self.send_header("content-length", "0")
            self.end_headers()
        elif how == "says no":
            self.answer(200, {"success": False, "message": "out of order"})
        elif how == "takes nothing":
            self.answer(400, {"success": False, "message": "no room for it"})
        elif how == "is silent":
            receiver.released.wait(SECONDS)
        elif how in ("dies", "dies midway"):
            if how == "dies midway":
                receiver.ask("break off", body)
            for process in receiver.processes:
                process.kill()
            assert isinstance(self.server, _Server)
            self.server.socket.close()
            self.connection.close()
        else:
            self.done(body)

    def done(self, body: dict[str, Any]) -> None:
        receiver = self.receiver
        if self.path in COMMANDS:
            said = receiver.ask(COMMANDS[self.path], body)
            if all(done for done, _ in said):
                self.answer(200, {"success": True, "message": "done"})
            else:
                self.answer(400, {"success": False, "message": str(said)})
            return
        if self.path == "/flush_cache":
            self.answer(200 if receiver.flushes else 404, {})
            return
        receiver.paused = self.path == "/pause_generation"
        self.answer(200, {})

    def answer(self, status: int, said: dict[str, Any]) -> None:
        text = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _rank(pipe: Connection, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    groups: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    while True:
        try:
            command, body = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, _act(command, body, rank, groups, kept)))
        except Exception as error:  # noqa: BLE001 - carried home
            pipe.send((False, f"{type(error).__name__}: {error}"))


def _act(command: str, body: Any, rank: int, groups: dict[str, Any], kept: dict[str, Any]) -> str:
    import torch
    import torch.distributed as dist

    if command == "join":
        name = body["group_name"]
        groups[name] = _joined(name, body, body["rank_offset"] + rank)
    elif command == "leave":
        dist.destroy_process_group(groups.pop(body["group_name"]))
    elif command == "tell":
        return json.dumps(sorted(groups))
    elif command == "keep":
        torch.save(kept, body)
        return "kept"
    else:
        arriving = list(zip(body["names"], body["dtypes"], body["shapes"], strict=True))
        for number, (name, dtype, shape) in enumerate(arriving):
            if command == "break off" and number == len(arriving) // 2:
                os._exit(1)
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            # Gloo does not know these numbers; bytes are bytes.
            of_bytes = tensor.view(torch.uint8) if "float8" in dtype else tensor
            dist.broadcast(of_bytes, src=0, group=groups[body["group_name"]])
            kept[name] = tensor
    return "done"


def _joined(name: str, body: dict[str, Any], rank: int) -> Any:
    """The group, joined as inference servers join it: a group of torch's that is not the first."""
    from torch.distributed import PrefixStore, distributed_c10d

    timeout = datetime.timedelta(seconds=SECONDS)
    where = f"tcp://{body['master_address']}:{body['master_port']}"
    world = body["world_size"]
    store, _, _ = next(distributed_c10d.rendezvous(where, rank, world, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = distributed_c10d._new_process_group_helper(
        world,
        rank,
        [],
        body["backend"],
        PrefixStore(name, store),
        group_name=distributed_c10d.GroupName(name),
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(world)}
    return group
