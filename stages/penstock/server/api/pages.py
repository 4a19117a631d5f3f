"""What lists are asked for by: how many, from where on, and whose."""

from typing import Annotated, Literal

from fastapi import Query

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**31 - 1)]
Scope = Annotated[Literal["owned", "accessible"], Query(alias="access_scope")]
"""Either is what the key owns: what others made public is read by its path, and is not listed."""
