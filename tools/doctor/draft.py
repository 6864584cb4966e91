"""Facts while they are being read: the first reading of a value stays, stronger sources are read first."""

from __future__ import annotations

from typing import Any

from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.facts_json import from_json


class Draft:
    """Facts under construction, addressed by path: ``draft.put("torch.version", "2.6.0")``."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._weak: dict[str, Any] = {}
        self.gpus: list[dict[str, Any]] = []
        self.packages: list[dict[str, Any]] = []
        self.disks: list[dict[str, Any]] = []
        self.interfaces: list[dict[str, Any]] = []
        self.links: list[dict[str, Any]] = []
        self.kernel_log: list[str] = []
        self.env: dict[str, str] = {}
        self.messages: list[str] = []
        self.no_gpus = False

    def put(self, path: str, value: Any) -> None:
        """Keep a value unless there is one from an earlier line; None says nothing."""
        if value is not None:
            self._values.setdefault(path, value)

    def hint(self, path: str, value: Any) -> None:
        """Keep a value that holds only where no labelled line gives one."""
        if value is not None:
            self._weak.setdefault(path, value)

    def get(self, path: str) -> Any:
        """The value read so far."""
        return self._values.get(path, self._weak.get(path))

    def package(self, name: str, version: str, **more: str | None) -> None:
        """An installed distribution; saying the same again adds nothing."""
        entry = {"name": name.lower().replace("_", "-"), "version": version}
        entry |= {key: value for key, value in more.items() if value}
        if entry not in self.packages:
            self.packages.append(entry)

    def gpu(self, index: int | None, **values: Any) -> None:
        """What is known of one GPU; an index met before is completed."""
        known = next((gpu for gpu in self.gpus if index is not None and gpu.get("index") == index), None)
        if known is None:
            known = {"index": len(self.gpus) if index is None else index}
            self.gpus.append(known)
        for name, value in values.items():
            if value is not None:
                known.setdefault(name, value)

    def facts(self) -> Facts:
        """What was read, as facts."""
        nested: dict[str, Any] = {}
        for path, value in (self._weak | self._values).items():
            group, name = path.split(".")
            nested.setdefault(group, {})[name] = value
        nested |= {name: value for name, value in self._lists().items() if value}
        if self.links:
            nested.setdefault("topology", {})["links"] = self.links
        if self.interfaces:
            nested.setdefault("network", {})["interfaces"] = self.interfaces
        if self.no_gpus and not self.gpus:
            nested["gpus"] = []
        return from_json(nested)

    def _lists(self) -> dict[str, Any]:
        return {
            "gpus": self.gpus,
            "packages": self.packages,
            "disks": self.disks,
            "kernel_log": self.kernel_log,
            "env": self.env,
            "messages": self.messages,
        }
