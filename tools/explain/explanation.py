"""What `phalanx explain` has to say, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["explained", "unknown", "no-failure"]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One cause, with what it rests on.

    ``id`` is a name of the shared vocabulary, such as ``cuda-oom``; ``where`` the line of user code, as
    ``train.py:12 in main: loss.backward()``; ``look`` what else is worth a look.
    """

    id: str
    rank: int | None
    cause: str
    fix: tuple[str, ...]
    evidence: tuple[str, ...]
    where: str | None = None
    look: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As in ``--json`` and ``failure.json``."""
        return {
            "id": self.id,
            "rank": self.rank,
            "cause": self.cause,
            "fix": list(self.fix),
            "evidence": list(self.evidence),
            "where": self.where,
            "look": list(self.look),
        }


@dataclass(frozen=True, kw_only=True)
class FirstFailure:
    """The first exception of a run, also where nobody knows its cause."""

    rank: int | None
    exception: str
    message: str
    where: str | None
    place: str

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "exception": self.exception,
            "message": self.message,
            "where": self.where,
            "place": self.place,
        }


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The outcome, and the diagnoses with the best first."""

    outcome: Outcome
    diagnoses: tuple[Diagnosis, ...] = ()
    first_failure: FirstFailure | None = None
    line_count: int = 0

    def to_json(self) -> dict[str, Any]:
        """The contract of ``phalanx explain --json``."""
        return {
            "schema": 1,
            "outcome": self.outcome,
            "diagnoses": [diagnosis.to_json() for diagnosis in self.diagnoses],
            "first_failure": None if self.first_failure is None else self.first_failure.to_json(),
        }
