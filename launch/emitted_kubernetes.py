"""`phalanx run --emit kubernetes`: an Indexed Job whose pods are the nodes, and the headless Service they meet by."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from typing import Any

from phalanx.launch import values as checked
from phalanx.launch.emit import Emission, option_words
from phalanx.launch.options import Given
from phalanx.tools.usage import CannotFinish, UsageMistake, nearest

#: Keys of ``--kubernetes``, with an example each.
KEYS = {
    "image": "registry.example.org/team/train:1",
    "name": "train",
    "namespace": "team",
    "claim": "checkpoints:/data",
    "shm": "16Gi",
    "cpu": "8",
    "memory": "64Gi",
    "retries": "3",
}
_NOT_PASSED = frozenset({"emit", "kubernetes", "nnodes", "gpus", "dry_run", "module", "no_python"})
#: Kubernetes says where the nodes are, and which of them a pod is.
_REFUSED = (
    "hosts", "hostfile", "local_nodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "master_addr", "standalone",
    "local_addr",
)  # fmt: skip
_PORT = 29500
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_QUANTITY = re.compile(r"(?:0|[1-9]\d*)(?:\.\d+)?(?:m|[kMGTPE]|[KMGTPE]i)?")
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")


def manifest(job: Emission) -> str:
    """The YAML, as kubectl takes it.

    Raises:
        UsageMistake: A word of ``--kubernetes`` is none, or an option says where nodes are.
        CannotFinish: PyYAML is not installed.
    """
    for key in _REFUSED:
        if key in job.given:
            raise UsageMistake(
                f"{job.given[key]} with --emit kubernetes: a pod's index says which node it is, and they meet at pod 0.",
                fix=f"leave {job.given[key].source} out; --nnodes says how many",
            )
    try:
        import yaml
    except ImportError:
        raise CannotFinish(
            "PyYAML, which writes the manifest, is not installed.", fix="pip install 'phalanx[recipes]'"
        ) from None
    documents = list(_documents(job))
    text: str = yaml.safe_dump_all(documents, sort_keys=False, width=110, allow_unicode=True)
    return text


def _documents(job: Emission) -> Iterator[dict[str, Any]]:
    words = _words(job.given.get("kubernetes"))
    name = words.get("name") or _name_of(job.target.display)
    low, high = checked.nnodes(job.given)
    if low != high:
        raise UsageMistake(
            f"{job.given['nnodes']} with --emit kubernetes: an Indexed Job has as many pods as it has indices.",
            fix=f"--nnodes {high}",
        )
    about: dict[str, Any] = {"name": name}
    if "namespace" in words:
        about["namespace"] = words["namespace"]
    port = checked.whole_number(job.given, "master_port", low=1, high=65535) or _PORT
    yield {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": about,
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": name},
            # A pod has its name as soon as it has an address, not when a probe says that it is ready.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "rendezvous", "port": port}],
        },
    }
    yield {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": dict(about),
        "spec": {
            "completionMode": "Indexed",
            "completions": high,
            "parallelism": high,
            # When one node fails, all of them end, and each counts.
            "backoffLimit": int(words.get("retries", "3")) * high,
            "podFailurePolicy": {"rules": _rules()},
            "template": {"spec": _pod(job, words, name, high, port)},
        },
    }


def _rules() -> list[dict[str, Any]]:
    """What a pod's end means for the job."""
    return [
        # phalanx run: 2 the command line is wrong, which a new pod would not mend.
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
        # 75: saved after a signal; 143: ended by one.
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75, 143]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _pod(job: Emission, words: dict[str, str], name: str, nodes: int, port: int) -> dict[str, Any]:
    limits: dict[str, str] = {key: words[key] for key in ("cpu", "memory") if key in words}
    gpus = _gpus(job)
    if gpus:
        limits["nvidia.com/gpu"] = str(gpus)
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {
            "name": "shm",
            "emptyDir": {"medium": "Memory"} | ({"sizeLimit": words["shm"]} if "shm" in words else {}),
        }
    ]
    if "claim" in words:
        claim, _, path = words["claim"].partition(":")
        mounts.append({"name": "claim", "mountPath": path})
        volumes.append({"name": "claim", "persistentVolumeClaim": {"claimName": claim}})
    container: dict[str, Any] = {
        "name": "node",
        "image": words["image"],
        "command": _command(job, name, nodes, port),
        "env": [{"name": "PHALANX_RUN_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}],
        "volumeMounts": mounts,
    }
    if limits:
        container["resources"] = {"limits": limits}
    grace_s = checked.seconds(job.given, "grace_s", zero=True)
    return {
        "subdomain": name,  # with the index's host name: NAME-0.NAME
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 20 + round(10 if grace_s is None else grace_s),
        "containers": [container],
        "volumes": volumes,
    }


def _command(job: Emission, name: str, nodes: int, port: int) -> list[str]:
    words = ["phalanx", "run", "--nnodes", str(nodes)]
    if nodes > 1:
        words += ["--master-addr", f"{name}-0.{name}", "--master-port", str(port)]
    passed = {key: given for key, given in job.given.items() if key not in _NOT_PASSED | {"master_port"}}
    words += [word for key, given in passed.items() for word in option_words(key, given)]
    if "gpus" in job.given and not _gpus(job):
        words += ["--gpus", "none"]
    words += ["-m"] * ("module" in job.given) + ["--no-python"] * ("no_python" in job.given)
    # Kubernetes puts variables for $(NAME), and takes $$( for $(.
    return [word.replace("$(", "$$(") for word in [*words, job.typed, *job.args]]


def _gpus(job: Emission) -> int:
    """GPUs of each pod."""
    if "gpus" in job.given:
        text = job.given["gpus"].text.strip().lower()
        if text in ("none", "cpu"):
            return 0
        if text.startswith("auto:") and text[5:].isdecimal() and int(text[5:]) > 0:
            return int(text[5:])
        raise UsageMistake(
            f"{job.given['gpus']} with --emit kubernetes: which GPUs there are is known once a pod has them.",
            fix="--gpus auto:4 for 4 GPUs in each pod, or --gpus none",
        )
    return 0


def _words(given: Given | None) -> dict[str, str]:
    """``--kubernetes``, checked."""
    found: dict[str, str] = {}
    source = "--kubernetes" if given is None else given.source
    try:
        words = [] if given is None else shlex.split(given.text)
    except ValueError as error:
        raise UsageMistake(f"{given}: {error}.", fix="--kubernetes 'image=IMAGE name=NAME'") from None
    for word in words:
        key, equals, value = word.partition("=")
        if key not in KEYS or not equals or not value:
            near = (nearest(key, tuple(KEYS), count=1) or ("image",))[0]
            raise UsageMistake(
                f"{source}: {word!r} is no key=value of {', '.join(KEYS)}.", fix=f"{near}={KEYS[near]}"
            )
        if key in found:
            raise UsageMistake(f"{source}: {key}= comes twice.", fix=f"{key}={value}")
        _check(source, key, value)
        found[key] = value
    if "image" not in found:
        raise UsageMistake(
            "--emit kubernetes: the pods need an image that has torch, phalanx and the script.",
            fix=f"--kubernetes 'image={KEYS['image']}'",
        )
    return found


def _check(source: str, key: str, value: str) -> None:
    fits, needed = True, ""
    if key in ("name", "namespace"):
        # The Job's pods are called NAME-INDEX, which has to be a label as well.
        fits = _LABEL.fullmatch(value) is not None and len(value) <= (57 if key == "name" else 63)
        needed = "lower-case letters, digits and dashes (RFC 1123)"
    elif key in ("shm", "cpu", "memory"):
        fits, needed = _QUANTITY.fullmatch(value) is not None, "a quantity of Kubernetes"
    elif key == "retries":
        fits, needed = value.isascii() and value.isdecimal() and len(value) < 5, "a whole number"
    elif key == "claim":
        claim, _, path = value.partition(":")
        fits = _LABEL.fullmatch(claim) is not None and path.startswith("/")
        needed = "the name of a PersistentVolumeClaim and a path"
    if not fits:
        raise UsageMistake(f"{source}: {key}={value}: {needed} is needed.", fix=f"{key}={KEYS[key]}")


def _name_of(display: str) -> str:
    """A target's name as a label: ``train_it`` is ``train-it``."""
    stem = os.path.basename(display).removesuffix(".py").lower()
    name = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:57].strip("-")
    return name or "phalanx"
