"""Variables that ranks are started with."""

import pytest

from penstock.core import env


@pytest.mark.parametrize(
    ("gpus", "written", "expected"),
    [
        (1, {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (0, {}, {}),
        (1, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        (1, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {}),
    ],
)
def test_the_allocator_is_configured_on_gpus_unless_the_user_has(
    monkeypatch, gpus, written, expected
):
    for name in env.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in written.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(env, "num_gpus", lambda: gpus)
    assert env.cuda_allocator() == expected


@pytest.mark.parametrize(
    ("gpus", "written", "expected"),
    [(0, {}, env.KEEPS_MEMORY), (1, {}, {}), (0, {"MALLOC_ARENA_MAX": "2"}, {})],
)
def test_ranks_on_a_cpu_keep_freed_memory_unless_the_user_has_configured_malloc(
    monkeypatch, gpus, written, expected
):
    for name in ("MALLOC_ARENA_MAX", *env.KEEPS_MEMORY):
        monkeypatch.delenv(name, raising=False)
    for name, value in written.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(env, "num_gpus", lambda: gpus)
    assert env.host_allocator() == expected
