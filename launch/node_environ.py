"""Which variables of the launching machine a node gets, and which of its own count there."""

from __future__ import annotations

from collections.abc import Mapping

#: Variables that say something of one host or one login, and mean nothing or harm on another.
_HOST_BOUND = frozenset(
    {
        "HOSTNAME", "HOST", "HOME", "USER", "LOGNAME", "USERNAME", "SHELL", "MAIL", "PWD", "OLDPWD", "SHLVL", "_",
        "DISPLAY", "XAUTHORITY", "WAYLAND_DISPLAY", "DBUS_SESSION_BUS_ADDRESS", "TMPDIR", "TMUX", "TMUX_PANE", "STY",
        "INVOCATION_ID", "JOURNAL_STREAM", "NVIDIA_VISIBLE_DEVICES",
    }
)  # fmt: skip
_HOST_BOUND_STARTS = ("SSH_", "SLURM", "SRUN_", "PMI_", "PMIX_", "XDG_", "KUBERNETES_", "VSCODE_")
#: Options of the driver's own.
_DRIVERS_OWN = tuple(
    f"PHALANX_RUN_{name}" for name in ("HOSTS", "HOSTFILE", "SSH_PORT", "SSH", "LOCAL_NODES", "DRY_RUN")
)


def is_host_bound(name: str, value: str) -> bool:
    """Whether a variable stays on its host, and that of the other host counts there."""
    if name == "CUDA_VISIBLE_DEVICES":  # numbers mean something everywhere, identities on one host
        return not value.replace(",", "").isdecimal()
    return name in _HOST_BOUND or name in _DRIVERS_OWN or name.startswith(_HOST_BOUND_STARTS)


def sent_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that the driver sends to every node: its user's, without those bound to its host."""
    return {name: value for name, value in environ.items() if not is_host_bound(name, value)}


def job_environ(sent: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """The environment of the agent: what the driver sent, with this host's own where a variable is bound to it."""
    own = {name: value for name, value in here.items() if is_host_bound(name, value)}
    return {**own, **sent}
