"""Fixtures for more than one test file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hub_server import HubServer


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A local Hub, and at the end the check that clients asked nothing that it does not know."""
    with HubServer() as server:
        yield server
    assert server.complaints == []
