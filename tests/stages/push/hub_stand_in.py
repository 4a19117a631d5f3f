"""A hub on loopback: just enough of the HTTP API for huggingface_hub's own client to push to it and
for `datasets` to read from it.

It keeps one repository as lists of commits, each a whole tree {path: bytes}; weights and parquet
files travel by LFS as they do on the real hub, all others inside the commit.
"""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

Tree = dict[str, bytes]

LFS = (".safetensors", ".parquet")


@dataclass
class Hub:
    """The state of the stand-in, read by tests; `requests` are (method, path) in order."""

    token: str
    kind: Literal["model", "dataset"] = "model"
    public: bool = False
    """Whether it may be read without a token."""
    branches: dict[str, list[Tree]] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    pulls: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    """The Authorization header of every request."""
    ignored: list[str] = field(default_factory=list)
    """What the repository's .gitignore names."""
    answer: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Path suffix -> (status, text) to answer instead."""

    @property
    def repo(self) -> str:
        """The name of the one repository."""
        return "someone/model" if self.kind == "model" else "someone/data"

    @property
    def commits(self) -> int:
        """How many commits were made on all branches, the first empty ones not counted."""
        return sum(len(trees) - 1 for trees in self.branches.values())

    def tree(self, branch: str = "main") -> Tree:
        """The newest files of a branch."""
        return self.branches[branch][-1]

    def head(self, revision: str) -> str | None:
        """The name of the commit a branch or a commit's name stands for."""
        if revision in self.branches:
            return commit_name(revision, len(self.branches[revision]) - 1)
        return revision if self.resolve(revision) is not None else None

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
        hub.authorizations.append(self.headers.get("Authorization"))
        for suffix, (status, text) in hub.answer.items():
            if path.endswith(suffix):
                return self._respond({"error": text}, status)
        if path.startswith("/lfs/"):
            hub.objects[path.removeprefix("/lfs/")] = body
            return self._respond({})
        reads = self.command in ("GET", "HEAD") or "/paths-info/" in path
        if self.headers.get("Authorization") != f"Bearer {hub.token}" and not (
            hub.public and reads
        ):
            return self._respond({"error": "Invalid credentials"}, 401)
        if path == "/api/validate-yaml":
            return self._respond({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith("/info/lfs/objects/batch"):
            return self._batch(json.loads(body))
        _, found, rest = path.partition(f"{hub.repo}/resolve/")
        if found:
            return self._file(rest)
        _, found, rest = path.partition(f"/api/{hub.kind}s/{hub.repo}")
        if not found or not hub.branches:
            return self._respond({"error": "no such repository"}, 404, error="RepoNotFound")
        verb, _, rest = rest.lstrip("/").partition("/")
        return getattr(self, "_" + (verb.replace("-", "_") or "revision"))(rest or "main", body)

    do_GET = do_HEAD = do_POST = do_PUT = _handle  # noqa: N815 - names the base class looks for

    def _create(self, wanted: dict[str, Any]) -> None:
        hub = self.server.hub
        if hub.created:
            return self._respond({"error": "exists", "url": self._url()}, 409)
        hub.created.append(wanted)
        hub.branches["main"] = [{}]
        return self._respond({"url": self._url()})

    def _url(self) -> str:
        prefix = "" if self.server.hub.kind == "model" else "datasets/"
        return f"http://{self.headers['Host']}/{prefix}{self.server.hub.repo}"

    def _branch(self, name: str, body: bytes) -> None:
        del body
        if name in self.server.hub.branches:
            return self._respond({"error": "exists"}, 409)
        self.server.hub.branches[name] = [dict(self.server.hub.tree())]
        return self._respond({})

    def _revision(self, revision: str, body: bytes) -> None:
        del body
        hub = self.server.hub
        commit = hub.head(revision)
        if commit is None:
            return self._respond({"error": "no such revision"}, 404, error="RevisionNotFound")
        names = sorted(hub.resolve(commit) or {})
        return self._respond(
            {
                "id": hub.repo,
                "sha": commit,
                "private": not hub.public,
                "siblings": [{"rfilename": name} for name in names],
            }
        )

    def _tree(self, rest: str, body: bytes) -> None:
        """What lies in a revision or in one of its folders, and below it if that is asked for."""
        del body
        hub = self.server.hub
        revision, _, folder = (rest, "", "") if rest in hub.branches else rest.partition("/")
        tree = hub.resolve(revision)
        if tree is None:
            return self._respond({"error": "no such revision"}, 404, error="RevisionNotFound")
        entries = {path: _entry(path, tree[path]) for path in tree}
        for path in tree:
            for parent in map(str, PurePosixPath(path).parents):
                entries[parent] = {"type": "directory", "path": parent, "oid": "0" * 40}
        deep = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
        place = PurePosixPath(folder)
        found = [
            entry
            for path, entry in sorted(entries.items())
            if (
                place in PurePosixPath(path).parents
                if deep
                else PurePosixPath(path).parent == place
            )
            and path != "."
        ]
        return self._respond(found)

    def _paths_info(self, revision: str, body: bytes) -> None:
        """The files among the paths that are asked for, and the folders as they are implied."""
        tree = self.server.hub.resolve(revision) or {}
        asked = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
        found = [_entry(path, tree[path]) for path in asked if path in tree]
        folders = {str(each) for path in tree for each in PurePosixPath(path).parents}
        found += [
            {"type": "directory", "path": path, "oid": "0" * 40}
            for path in asked
            if path in folders
        ]
        self._respond(found)

    def _file(self, rest: str) -> None:
        """The content of `<revision>/<path>`, with the headers that the client looks for."""
        hub = self.server.hub
        revision, _, path = rest.partition("/")
        tree = hub.resolve(revision)
        if tree is None or path not in tree:
            return self._respond({"error": "not found"}, 404, error="EntryNotFound")
        content = tree[path]
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", hub.head(revision) or "")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
        return None

    def _preupload(self, revision: str, body: bytes) -> None:
        del revision
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS) else "regular",
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
        parent = lines[0]["value"].get("parentCommit")
        if parent and parent != hub.head(revision):
            return self._respond({"error": "somebody else has committed"}, 412)
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
        return self._respond({"commitUrl": url, "commitOid": oid, "pullRequestUrl": pull})

    def _discussions(self, rest: str, body: bytes) -> None:
        del rest, body
        found = [
            {
                "title": title,
                "num": number,
                "createdAt": "2026-01-01T00:00:00.000Z",
                "status": "open",
                "repo": {"name": self.server.hub.repo, "type": self.server.hub.kind},
                "isPullRequest": True,
            }
            for number, title in enumerate(self.server.hub.pulls, start=1)
        ]
        self._respond({"discussions": found, "count": len(found), "start": 0})


def _entry(path: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if path.endswith(LFS):
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
