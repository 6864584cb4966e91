"""Which samples each step took: the proof that every one came once, however often the run was cut short."""

from __future__ import annotations

import json
import os
from pathlib import Path

from phalanx.dist.steps import StepLoader


class Ledger:
    """One line per step and rank: which positions of the epoch were taken. The proof that each came once.

    Lines are out of the process before the step's checkpoint, so that whatever a checkpoint holds is
    in the ledger; steps after it are run again and noted again, and the last note of a step counts.
    """

    def __init__(self, folder: str | None, rank: int) -> None:
        self._file: int | None = None
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = os.open(
                Path(folder) / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
            )
            self._write("\n")  # ends a line that a kill cut short
        self._taken: list[int] = []

    def note(self, loader: StepLoader) -> None:
        """Note the micro batch that ``loader`` delivered last."""
        if self._file is None:
            return
        self._taken += [int(position) for position in loader.positions] if loader.local_count else []
        if loader.is_last_micro:
            progress = loader.progress
            self._write(
                json.dumps({"epoch": progress.epoch, "step": progress.step, "positions": self._taken}) + "\n"
            )
            self._taken = []

    def _write(self, text: str) -> None:
        assert self._file is not None
        os.write(self._file, text.encode())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
