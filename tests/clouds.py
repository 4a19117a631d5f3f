"""A bucket of Google Cloud Storage and a container of Azure, each on a server on loopback."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace

import pytest

from penstock.core.remote import azure_store
from tests.azure_server import AzureHandler, connection_string
from tests.google_server import GoogleHandler
from tests.object_server import Object, ObjectServer, serving

BUCKET = "a-bucket"


@dataclass
class Cloud:
    """A bucket: its URL, and the server that has its objects."""

    url: str
    server: ObjectServer

    def write(self, name: str, content: bytes, **more) -> Object:
        """Write an object, as anyone may who has the right to."""
        return self.server.write(BUCKET, name, content, **more)

    def delete(self, name: str) -> None:
        """Delete an object."""
        del self.server.objects[BUCKET, name]


@pytest.fixture(params=["gs", "az"])
def cloud(request, monkeypatch, tmp_path):
    """An empty bucket of Google's, then one of Azure's; the environment has what it takes."""
    monkeypatch.setenv("HOME", str(tmp_path))  # for the credentials of a person are there
    use = _use_google if request.param == "gs" else _use_azure
    with serving(GoogleHandler if request.param == "gs" else AzureHandler) as server:
        system = use(monkeypatch, server.url)
        system.clear_instance_cache()
        yield Cloud(f"{request.param}://{BUCKET}", server)
        system.clear_instance_cache()


async def _no_pause(*_):
    await asyncio.sleep(0)


def _use_google(monkeypatch, url):
    gcsfs = pytest.importorskip("gcsfs")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=_no_pause))
    with suppress(ImportError):  # older releases have none
        extended = import_module("gcsfs.extended_gcsfs")

        async def kind(*_):  # is asked by gRPC
            return extended.BucketType.NON_HIERARCHICAL

        monkeypatch.setattr(extended.ExtendedGcsFileSystem, "_get_bucket_type", kind)
    return gcsfs.GCSFileSystem


def _use_azure(monkeypatch, url):
    adlfs = pytest.importorskip("adlfs")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(url))
    monkeypatch.setattr(azure_store, "FIRST_PAUSE", 0)
    monkeypatch.setattr(azure_store, "POLL_SECONDS", 0.01)
    module = "azure.storage.blob.aio._download_async.asyncio"
    monkeypatch.setattr(module, SimpleNamespace(**{**vars(asyncio), "sleep": _no_pause}))
    return adlfs.AzureBlobFileSystem
