"""Fixtures for tests that start `phalanx run`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launching import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """`phalanx run` in a temporary folder; whatever a test leaves running is ended."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.clean_up()
