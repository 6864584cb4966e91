"""What memory each rank has held."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.recipes.peak_memory import MEMORY_FILE, peak_memory, write_memory
from tests.ranks import RankRunner

MIB = 1 << 20


def _peaks(rank: int, world_size: int) -> list[dict[str, Any]]:
    from phalanx.dist import init_world

    init_world()
    held = np.ones(300 * MIB * rank, np.uint8)
    del held
    return peak_memory()


def test_every_rank_knows_all_peaks(run_ranks: RankRunner, tmp_path: Path) -> None:
    first, second = run_ranks(_peaks, world_size=2)
    assert first == second
    assert [peak["rank"] for peak in first] == [0, 1]
    assert {peak["host"] for peak in first} == {socket.gethostname()}
    assert (
        first[1]["peak_rss_bytes"] - first[0]["peak_rss_bytes"] > 200 * MIB
    )  # let go since, and still counted
    write_memory(tmp_path, first)
    assert json.loads((tmp_path / MEMORY_FILE).read_text()) == {"ranks": first}
