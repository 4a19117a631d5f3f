"""The part of Google Cloud Storage's JSON API that gcsfs uses, on loopback."""

import gzip
import json
from typing import Any
from urllib.parse import unquote

from tests.object_server import Object, ObjectHandler, names_below

PAGE = 3
"""Objects of one page of a listing, so that there is more than one."""


class GoogleHandler(ObjectHandler):
    """One request of https://cloud.google.com/storage/docs/json_api/v1."""

    def answer(self, path: str, query: dict[str, str], content: bytes) -> None:
        parts = [unquote(part) for part in path.strip("/").split("/")]
        is_upload, is_download = parts[0] == "upload", parts[0] == "download"
        bucket, *rest = parts[parts.index("b") + 1 :]
        if is_upload:
            self._upload(bucket, query, content)
        elif not rest:
            self._send_json({"kind": "storage#bucket", "name": bucket})
        elif rest == ["o"]:
            self._list(bucket, query)
        elif "rewriteTo" in rest:
            self._rewrite(bucket, rest)
        else:
            self._object(bucket, rest[1], query, is_download or query.get("alt") == "media")

    def refuse(self, status: int, code: str) -> None:
        self._send_json({"error": {"code": status, "message": code}}, status)

    def _object(self, bucket: str, name: str, query: dict[str, str], is_content: bool) -> None:
        if is_content:
            self.note_read(query.get("ifGenerationMatch"))
        found = self.server.objects.get((bucket, name))
        wanted = query.get("generation")
        if found is None or wanted not in (None, str(found.number)):
            self.refuse(404, "Not Found")
            return
        is_met = query.get("ifGenerationMatch") in (None, str(found.number))
        if not is_met and not self.server.manners.get("ignores conditions"):
            self.refuse(412, "At least one of the pre-conditions you specified did not hold.")
            return
        if self.command == "DELETE":
            del self.server.objects[bucket, name]
            self.send(204)
        elif not is_content:
            self._send_json(self._resource(bucket, name, found))
        elif found.encoding and found.encoding not in self.headers.get("Accept-Encoding", ""):
            # Decompressive transcoding: the range is ignored.
            self.send(200, gzip.decompress(found.content), X_Goog_Generation=found.number)
        else:
            self.send_content(found, lambda: {"X_Goog_Generation": str(found.number)})

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        names, folders = names_below(
            self.server, bucket, query.get("prefix", ""), query.get("delimiter", "")
        )
        start = int(query.get("pageToken", 0))
        stop = start + min(int(query.get("maxResults", PAGE)), PAGE)
        answer: dict[str, Any] = {"kind": "storage#objects", "prefixes": [] if start else folders}
        answer["items"] = [
            self._resource(bucket, name, self.server.objects[bucket, name])
            for name in names[start:stop]
        ]
        if stop < len(names):
            answer["nextPageToken"] = str(stop)
        self._send_json(answer)

    def _upload(self, bucket: str, query: dict[str, str], content: bytes) -> None:
        if session := query.get("upload_id"):
            self._resume(session, content)
            return
        more: dict[str, Any] = {}
        if query["uploadType"] == "multipart":
            boundary = b"--" + self.headers["Content-Type"].split('"')[1].encode()
            _, described, rest = content.split(boundary, 2)
            more = json.loads(described.split(b"\n\n", 1)[1])
            content = rest.split(b"\n\n", 1)[1].rpartition(b"\n" + boundary)[0]
        else:
            more = json.loads(content)
        name = query.get("name") or more["name"]
        found = self.server.objects.get((bucket, name))
        number = found.number if found else 0
        if int(query.get("ifGenerationMatch", number)) != number:
            self.refuse(412, "conditionNotMet")
            return
        if query["uploadType"] == "resumable":
            session = f"session-{len(self.server.uploads)}"
            self.server.uploads[session] = (bucket, name, b"")
            location = f"{self.server.url}/upload/storage/v1/b/{bucket}/o?upload_id={session}"
            self.send(200, Location=location)
            return
        self._stored(bucket, name, content)

    def _stored(self, bucket: str, name: str, content: bytes) -> None:
        written = self.server.write(bucket, name, content)
        if self.server.manners.pop("loses an answer", False):
            self.close_connection = True  # it was stored, and the client is not told
            return
        self._send_json(self._resource(bucket, name, written))

    def _resume(self, session: str, content: bytes) -> None:
        bucket, name, before = self.server.uploads[session]
        self.server.uploads[session] = bucket, name, before + content
        if len(before + content) < int(self.headers["Content-Range"].rpartition("/")[2]):
            self.send(308, Range=f"bytes=0-{len(before + content) - 1}")
            return
        self._stored(bucket, name, before + content)

    def _rewrite(self, bucket: str, rest: list[str]) -> None:
        found = self.server.objects.get((bucket, rest[1]))
        if found is None:
            self.refuse(404, "Not Found")
            return
        written = self.server.write(rest[4], rest[6], found.content)
        self._send_json({"done": True, "resource": self._resource(rest[4], rest[6], written)})

    def _resource(self, bucket: str, name: str, found: Object) -> dict[str, Any]:
        resource = {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "size": str(len(found.content)),
            "generation": str(found.number),
            "metageneration": "1",
            "etag": f"C{found.number:x}EAE=",
            "storageClass": "STANDARD",
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
        }
        # Objects that were composed of parts have none.
        digest = {} if self.server.manners.get("no md5") else {"md5Hash": found.md5}
        return resource | digest | ({"contentEncoding": found.encoding} if found.encoding else {})

    def _send_json(self, value: Any, status: int = 200) -> None:
        self.send(status, json.dumps(value).encode(), Content_Type="application/json")
