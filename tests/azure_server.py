"""The part of Azure Blob Storage's REST API that adlfs uses, on loopback."""

import re
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

from tests.object_server import Object, ObjectHandler, names_below

ACCOUNT = "anaccountoftests"
KEY = "aXRzLXNlY3JldA=="
PAGE = 3
"""Blobs of one page of a listing, so that there is more than one."""

DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


def connection_string(url: str) -> str:
    """What AZURE_STORAGE_CONNECTION_STRING is for the server at the URL."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"BlobEndpoint={url}/{ACCOUNT};"
    )


class AzureHandler(ObjectHandler):
    """One request of https://learn.microsoft.com/rest/api/storageservices/blob-service-rest-api."""

    def answer(self, path: str, query: dict[str, str], content: bytes) -> None:
        _, _, container, *rest = path.split("/", 3)
        name = unquote(rest[0]) if rest else ""
        match self.command, query.get("comp"):
            case "GET", "list":
                self._list(container, query)
            case "PUT", "block":
                self.server.uploads[query["blockid"]] = content
                self.send(201)
            case "PUT", "blocklist":
                blocks = re.findall(rb"<(?:Latest|Uncommitted)>(.*?)</", content)
                self._put(
                    container, name, b"".join(self.server.uploads[id.decode()] for id in blocks)
                )
            case "PUT", None if "x-ms-copy-source" in self.headers:
                self._copy(container, name)
            case "PUT", None:
                self._put(container, name, content)
            case "DELETE", None:
                self._delete(container, name)
            case (("GET" | "HEAD"), None) if name:
                self._blob(container, name)
            case (("GET" | "HEAD"), None):
                self.send(200, ETag='"0x1"', Last_Modified=DATE)
            case _:
                self.refuse(400, "UnsupportedQueryParameter")

    def refuse(self, status: int, code: str) -> None:
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
        self.send(status, body.encode(), x_ms_error_code=code, Content_Type="application/xml")

    def _blob(self, container: str, name: str) -> None:
        if self.command == "GET":
            self.note_read(self.headers.get("If-Match"))
        found = self.server.objects.get((container, name))
        if found is None:
            self.refuse(404, "BlobNotFound")
            return
        is_met = self.headers.get("If-Match") in (None, _tag(found))
        if not is_met and not self.server.manners.get("ignores conditions"):
            self.refuse(412, "ConditionNotMet")
            return
        if self.command == "GET":
            self.send_content(found, lambda: self._properties(found))
            return
        self._poll(found)
        headers: dict[str, Any] = {**self._properties(found), "Content_MD5": found.md5}
        if self.server.manners.get("no md5"):
            del headers["Content_MD5"]
        if found.encoding:
            headers["Content_Encoding"] = found.encoding
        self.send(200, **headers, Content_Length=len(found.content))

    def _properties(self, found: Object) -> dict[str, Any]:
        metadata = {f"x_ms_meta_{key}": value for key, value in found.metadata.items()}
        return {
            "ETag": _tag(found),
            "Last_Modified": DATE,
            "x_ms_blob_type": "BlockBlob",
            **metadata,
            **({"x_ms_copy_status": self.server.manners["copy"]} if self._is_copy(found) else {}),
        }

    def _put(self, container: str, name: str, content: bytes) -> None:
        found = self.server.objects.get((container, name))
        if self.headers.get("If-None-Match") == "*" and found:
            self.refuse(409, "BlobAlreadyExists")
            return
        prefix = "x-ms-meta-"
        metadata = {
            key.lower().removeprefix(prefix): value
            for key, value in self.headers.items()
            if key.lower().startswith(prefix)
        }
        written = self.server.write(container, name, content, metadata=metadata)
        if self.server.manners.pop("loses an answer", False):
            self.close_connection = True  # it was stored, and the client is not told
            return
        self.send(201, ETag=_tag(written), Last_Modified=DATE)

    def _copy(self, container: str, name: str) -> None:
        """A copy that begins: the content is there when it has been asked for several times."""
        source = unquote(urlsplit(self.headers["x-ms-copy-source"]).path).split("/", 3)[2:]
        if tuple(source) not in self.server.objects:
            self.refuse(404, "CannotVerifyCopySource")
            return
        written = self.server.write(container, name, b"", metadata={"copy": "/".join(source)})
        self.server.manners |= {"copy": "pending", "polls": 2}
        self.send(202, ETag=_tag(written), Last_Modified=DATE, x_ms_copy_status="pending")

    def _poll(self, found: Object) -> None:
        if not self._is_copy(found) or self.server.manners["copy"] != "pending":
            return
        self.server.manners["polls"] -= 1
        if self.server.manners["polls"]:
            return
        container, name = found.metadata["copy"].split("/", 1)
        source = self.server.objects.get((container, name))
        self.server.manners["copy"] = "success" if source else "failed"
        found.content = source.content if source else b""

    def _is_copy(self, found: Object) -> bool:
        return "copy" in found.metadata

    def _delete(self, container: str, name: str) -> None:
        if self.server.objects.pop((container, name), None) is None:
            self.refuse(404, "BlobNotFound")
            return
        self.send(202)

    def _list(self, container: str, query: dict[str, str]) -> None:
        names, folders = names_below(
            self.server, container, query.get("prefix", ""), query.get("delimiter", "")
        )
        start = int(query.get("marker") or 0)
        stop = start + min(int(query.get("maxresults", PAGE)), PAGE)
        blobs = [self._entry(container, name) for name in names[start:stop]]
        if not start:
            blobs += [f"<BlobPrefix><Name>{escape(f)}</Name></BlobPrefix>" for f in folders]
        marker = f"<NextMarker>{stop}</NextMarker>" if stop < len(names) else "<NextMarker />"
        body = (
            '<?xml version="1.0" encoding="utf-8"?>'
            f'<EnumerationResults ContainerName="{container}">'
            f"<Blobs>{''.join(blobs)}</Blobs>{marker}</EnumerationResults>"
        )
        self.send(200, body.encode(), Content_Type="application/xml")

    def _entry(self, container: str, name: str) -> str:
        found = self.server.objects[container, name]
        digest = "" if self.server.manners.get("no md5") else found.md5
        metadata = "".join(f"<{key}>{value}</{key}>" for key, value in found.metadata.items())
        return (
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{DATE}</Last-Modified>"
            f"<Etag>{_tag(found).strip(chr(34))}</Etag><Content-MD5>{digest}</Content-MD5>"
            f"<Content-Length>{len(found.content)}</Content-Length>"
            f"<Content-Encoding>{found.encoding}</Content-Encoding>"
            "<BlobType>BlockBlob</BlobType></Properties>"
            f"<Metadata>{metadata}</Metadata></Blob>"
        )


def _tag(found: Object) -> str:
    return f'"0x{found.number:X}"'
