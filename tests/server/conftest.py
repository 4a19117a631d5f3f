"""What tests of the workers share."""

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder of a tiny model, which nobody writes into."""
    from tests.server.workers.orders import write_model

    return write_model(tmp_path_factory.mktemp("base"))
