"""The screens of the page on GPUs are those of the tests."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize("name", ["eight", "lost", "capability", "topology", "hosts"])
def test_the_page_shows_what_the_command_shows(name: str) -> None:
    page = (ROOT / "docs/gpus.md").read_text()
    assert (ROOT / f"tests/tools/gpus/golden/{name}.txt").read_text().rstrip() in page
