"""A hub on loopback: just enough of the HTTP API for huggingface_hub's own client to push to it.

It keeps repositories as lists of commits, each a whole tree {path: bytes}; files that end in
.safetensors travel by LFS as they do on the real hub, all others inside the commit.
"""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Tree = dict[str, bytes]


@dataclass
class Hub:
    """The state of the stand-in, read by tests; `requests` are (method, path) in order."""

    token: str
    branches: dict[str, list[Tree]] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    pulls: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """What the repository's .gitignore names."""
    answer: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Path suffix -> (status, text) to answer instead."""

    @property
    def commits(self) -> int:
        """How many commits were made on all branches, the first empty ones not counted."""
        return sum(len(trees) - 1 for trees in self.branches.values())

    def tree(self, branch: str = "main") -> Tree:
        """The newest files of a branch."""
        return self.branches[branch][-1]

    def resolve(self, revision: str) -> Tree | None:
        """The tree of a branch or of a commit's name."""
        if revision in self.branches:
            return self.tree(revision)
        for branch, trees in self.branches.items():
            for number, tree in enumerate(trees):
                if commit_name(branch, number) == revision:
                    return tree
        return None


def commit_name(branch: str, number: int) -> str:
    """40 hex digits."""
    return hashlib.sha1(f"{branch}:{number}".encode()).hexdigest()


class _Server(ThreadingHTTPServer):
    hub: Hub


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def _respond(self, value: Any, status: int = 200, error: str | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        self.wfile.write(body)

    def _handle(self) -> None:
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append((self.command, path))
        for suffix, (status, text) in hub.answer.items():
            if path.endswith(suffix):
                return self._respond({"error": text}, status)
        if path.startswith("/lfs/"):
            hub.objects[path.removeprefix("/lfs/")] = body
            return self._respond({})
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._respond({"error": "Invalid credentials"}, 401)
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith("/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        verb, _, rest = path.removeprefix("/api/models/someone/model").lstrip("/").partition("/")
        return getattr(self, "_" + verb)(rest, body)

    do_GET = do_POST = do_PUT = _handle  # noqa: N815 - names the base class looks for

    def _create(self, wanted: dict[str, Any]) -> None:
        hub = self.server.hub
        if hub.created:
            return self._respond({"error": "exists", "url": self._url()}, 409)
        hub.created.append(wanted)
        hub.branches["main"] = [{}]
        return self._respond({"url": self._url()})

    def _url(self) -> str:
        return f"http://{self.headers['Host']}/someone/model"

    def _branch(self, name: str, body: bytes) -> None:
        del body
        if name in self.server.hub.branches:
            return self._respond({"error": "exists"}, 409)
        self.server.hub.branches[name] = [dict(self.server.hub.tree())]
        return self._respond({})

    def _revision(self, revision: str, body: bytes) -> None:
        del body
        trees = self.server.hub.branches[revision]
        self._respond({"id": "someone/model", "sha": commit_name(revision, len(trees) - 1)})

    def _tree(self, revision: str, body: bytes) -> None:
        del body
        tree = self.server.hub.resolve(revision)
        if tree is None:
            return self._respond({"error": "no such revision"}, 404, error="RevisionNotFound")
        return self._respond([_entry(path, content) for path, content in sorted(tree.items())])

    def _preupload(self, revision: str, body: bytes) -> None:
        del revision
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": file["path"] in self.server.hub.ignored,
            }
            for file in json.loads(body)["files"]
        ]
        self._respond({"files": files})

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for item in wanted["objects"]:
            known = item["oid"] in self.server.hub.objects
            href = f"http://{self.headers['Host']}/lfs/{item['oid']}"
            actions = {} if known else {"actions": {"upload": {"href": href, "header": {}}}}
            objects.append({"oid": item["oid"], "size": item["size"], **actions})
        self._respond({"transfer": "basic", "objects": objects})

    def _commit(self, revision: str, body: bytes) -> None:
        hub = self.server.hub
        lines = [json.loads(line) for line in body.splitlines()]
        tree = dict(hub.branches[revision][-1])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del tree[value["path"]]
            elif line["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            else:
                tree[value["path"]] = hub.objects[value["oid"]]
        pull = None
        if "create_pr=1" in self.path:
            hub.pulls.append(lines[0]["value"]["summary"])
            pull = f"{self._url()}/discussions/{len(hub.pulls)}"
            revision = f"refs/pr/{len(hub.pulls)}"
            hub.branches[revision] = [dict(hub.tree())]
        hub.branches[revision].append(tree)
        oid = commit_name(revision, len(hub.branches[revision]) - 1)
        url = f"{self._url()}/commit/{oid}"
        self._respond({"commitUrl": url, "commitOid": oid, "pullRequestUrl": pull})

    def _discussions(self, rest: str, body: bytes) -> None:
        del rest, body
        found = [
            {
                "title": title,
                "num": number,
                "createdAt": "2026-01-01T00:00:00.000Z",
                "status": "open",
                "repo": {"name": "someone/model", "type": "model"},
                "isPullRequest": True,
            }
            for number, title in enumerate(self.server.hub.pulls, start=1)
        ]
        self._respond({"discussions": found, "count": len(found), "start": 0})


def _entry(path: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if path.endswith(".safetensors"):
        oid = hashlib.sha256(content).hexdigest()
        entry |= {"oid": "0" * 40, "lfs": {"oid": oid, "size": len(content), "pointerSize": 134}}
    return entry


class running:  # noqa: N801 - used as a function
    """Serve `hub` while the block runs; yields its address."""

    def __init__(self, hub: Hub) -> None:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = hub
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
