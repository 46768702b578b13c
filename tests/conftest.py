"""Fixtures for more than one test file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hub_server import HubServer
from ppo_lora import PPOConfig


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """A local Hub, and at the end the check that clients asked nothing that it does not know."""
    with HubServer() as server:
        yield server
    assert server.complaints == []


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., PPOConfig]:
    """Makes a PPOConfig of options."""

    def make(**options: Any) -> PPOConfig:
        return PPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)

    return make
