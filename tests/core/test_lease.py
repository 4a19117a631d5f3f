"""One writer at a time, without locks and without common clocks."""

import threading
import time

import pytest

from penstock.core.errors import StageError
from penstock.core.remote import lease
from penstock.core.remote.lease import Lease
from penstock.core.remote.path import RemotePath


def never() -> bool:
    return False


@pytest.fixture
def in_bucket(bucket):
    return RemotePath.from_url(f"{bucket}/folder")


@pytest.fixture
def folder():
    """On another kind of store, which has exclusive creation too."""
    return RemotePath.from_url(f"memory://{time.monotonic_ns()}/folder")


@pytest.mark.slow
def test_of_several_that_want_it_one_at_a_time_has_it(in_bucket):
    inside, order, waits = [], [], []

    def want(name):
        held = Lease(in_bucket, name, term=2)
        assert held.acquire(never, waits.append)
        with held:
            inside.append(name)
            assert inside == [name]
            time.sleep(0.1)
            held.check()
            assert inside == [name]
            inside.remove(name)
            order.append(name)

    threads = [threading.Thread(target=want, args=(f"holder {n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(order) == [f"holder {n}" for n in range(3)]
    assert any("is being built on" in line for line in waits)


@pytest.mark.slow
def test_the_lease_of_one_who_died_is_taken_over_after_its_term_and_he_is_told(folder):
    dead, heir = Lease(folder, "dead", term=1), Lease(folder, "heir", term=1)
    assert dead.acquire(never, print)  # and is never renewed
    began = time.monotonic()
    assert heir.acquire(never, print)
    assert time.monotonic() - began >= 1
    heir.check()
    with pytest.raises(StageError, match="taken over by another machine"):
        dead.check()


@pytest.mark.slow
def test_a_renewed_lease_is_kept_beyond_its_term(folder, monkeypatch):
    # Looks that come faster than renewals see the same record several times.
    monkeypatch.setattr(lease, "POLL", 0.01)
    alive, other = Lease(folder, "alive", term=0.8), Lease(folder, "other", term=0.8)
    assert alive.acquire(never, print)
    until = time.monotonic() + 2
    with alive:
        assert not other.acquire(lambda: time.monotonic() > until, print)
        alive.check()
    assert other.acquire(never, print)


def test_what_the_same_mirror_left_behind_is_taken_over_at_once(in_bucket):
    assert Lease(in_bucket, "mine", term=60).acquire(never, print)
    again = Lease(in_bucket, "mine", term=60)
    assert again.acquire(never, print)
    again.clear()
    assert in_bucket.files() == {}
