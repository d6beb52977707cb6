from __future__ import annotations

import pytest

from plait.lab.memory import can_limit
from plait.lab.network import missing


@pytest.fixture
def namespaces() -> None:
    """For tests that need hosts with networks of their own."""
    lacking = missing()
    if lacking is not None:
        pytest.skip(f"{lacking} is missing: no network namespaces here")


@pytest.fixture
def memory_groups() -> None:
    """For tests that need a cgroup."""
    if not can_limit():
        pytest.skip("cgroups may not be written here")
