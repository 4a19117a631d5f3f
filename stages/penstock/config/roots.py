"""Where results are kept: a folder here, or a URL of an object store."""

from typing import Annotated

from pydantic import AfterValidator

from penstock.core.urls import PACKAGE_OF, WEB, is_url, spoken


def _writable(value: str) -> str:
    if not is_url(value):
        return value
    scheme, _, below = value.partition("://")
    if scheme.lower() not in PACKAGE_OF or scheme.lower() in WEB:
        raise ValueError(
            f"results cannot be written to {scheme}://; write a folder, or the URL of an object "
            "store (s3://bucket/folder)"
        )
    if not below.strip("/"):
        raise ValueError(f"{value} names no bucket; write {scheme}://bucket/folder")
    if spoken(value) != value:
        raise ValueError(
            f"{spoken(value)} is written with a user, a password or a query; leave them out, and "
            "set the credentials in the environment"
        )
    return value.rstrip("/")


Root = Annotated[str, AfterValidator(_writable)]
"""A folder that results go to. Behind a URL they are kept; work is done in a mirror of it here."""
