"""Fixtures for the cluster's tests."""

from __future__ import annotations

import random
import socket

import pytest


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port that the kernel gives to nobody by itself, so that nobody takes it meanwhile."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for candidate in random.Random().sample(range(10_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", candidate))
            except OSError:
                continue
            return candidate
    raise RuntimeError("no free port among 100")
