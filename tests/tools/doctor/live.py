"""`phalanx doctor` on this machine after something was broken for real, for tests."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
_CAN_MOUNT = subprocess.run(
    ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
)
WHY_NO_MOUNTS = _CAN_MOUNT.stderr.decode().strip() if _CAN_MOUNT.returncode else None


class Doctor:
    """Runs `phalanx doctor --json` in a folder, in an environment without any job's variables."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = ("PATH", "HOME", "LANG", "PYTHONDONTWRITEBYTECODE")
        self.environ = {name: os.environ[name] for name in kept if name in os.environ}

    def run(
        self,
        *words: str,
        environ: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        python: str = sys.executable,
        timeout_s: float = TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run it; ``before`` are shell lines that break things, in a mount namespace of their own."""
        command = [python, "-m", "phalanx", "doctor", *words]
        if before:
            script = "\n".join([*before, "exec " + shlex.join(command)])
            command = ["unshare", "--mount", "sh", "-ec", script]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ | dict(environ or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def report(self, *words: str, self_test: bool = False, **options: Any) -> dict[str, Any]:
        """The JSON of a run, which must come whatever is broken."""
        done = self.run(*words, "--json", *([] if self_test else ["--no-self-test"]), **options)
        assert done.returncode in (0, 1), done.stderr
        assert "Traceback" not in done.stderr
        report = json.loads(done.stdout)
        assert isinstance(report, dict)
        assert done.returncode == (1 if report["verdict"] == "fail" else 0)
        return report


def finding(report: Mapping[str, Any], identity: str) -> dict[str, Any]:
    """The finding of that id that fails or warns; the others are named when there is none."""
    bad = {entry["id"]: entry for entry in report["findings"] if entry["status"] in ("fail", "warn")}
    assert identity in bad, f"{identity} is not among {sorted(bad)}"
    entry = bad[identity]
    assert entry["evidence"], entry
    assert entry["fix"], entry
    assert isinstance(entry, dict)
    return entry


def bad(report: Mapping[str, Any]) -> set[str]:
    """The ids that fail or warn."""
    return {str(entry["id"]) for entry in report["findings"] if entry["status"] in ("fail", "warn")}


def first(report: Mapping[str, Any]) -> str:
    """The id that leads."""
    return str(report["findings"][0]["id"])


def quick_torch(
    folder: Path, version: str | None = None, cuda: str | None = None, code: str = ""
) -> dict[str, str]:
    """A package torch that imports at once, for what is not torch's fault; variables that put it first.

    It is of the installed version, unless told, so that there are not two.
    """
    version = version or importlib.metadata.version("torch")
    package = folder / "quick" / "torch"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(
        f"""
__version__ = {version!r}
class version: cuda = {cuda!r}; hip = None; git_version = "0"
class cuda:
    is_available = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 0)
    get_arch_list = staticmethod(lambda: {["sm_80", "sm_90"] if cuda else []!r})
class zeros:
    def __init__(self, *_): pass
    def numpy(self): return 0
{code}
"""
    )
    return {"PYTHONPATH": str(folder / "quick")}
