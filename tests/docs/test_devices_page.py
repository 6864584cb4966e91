"""The code in docs/devices.md runs, and what it quotes is what is said."""

from __future__ import annotations

import re

import pytest

from phalanx.dist import cuda_start, device_selection
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "devices.md").read_text()


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 7
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/devices.md", "exec"), names)
    assert callable(names["choose"])


def test_the_message_is_as_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_selection, "cuda_device_count_if_started", lambda: 4)
    assert cuda_start.cuda_device_count_if_started() in (None, -1)
    with pytest.raises(RuntimeError) as error:
        device_selection.select_devices("3")
    assert (
        str(error.value).split()
        == " ".join(re.findall(r"```\n(select_devices.*?)```", PAGE, re.DOTALL)).split()
    )


def test_lines_keep_to_the_width() -> None:
    assert [line for line in PAGE.splitlines() if len(line) > 140] == []
