"""`phalanx run --emit kubernetes`: the manifest against Kubernetes' schemas, and its command on two nodes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from phalanx.launch.entry import command as run_command
from tests import lab as labs
from tests.launch.launching import wait_until

IMAGE = "image=registry.example.org/train:1"
VERSIONS = ("1.31", "1.33", "1.36", kubernetes_validate.latest_version())


def _emit(folder: Path, *words: object, code: int = 0) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_RUN_")}
    command = [sys.executable, "-m", "phalanx", "run", "--emit", "kubernetes", *map(str, words)]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def _documents(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all(text)
    return service, job


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "words",
    [
        ["--nnodes", 4, "--gpus", "auto:8", "--kubernetes", f"{IMAGE} claim=ckpt:/data shm=16Gi cpu=8 memory=64Gi"],
        ["--nnodes", 2, "--gpus", "none", "--nproc-per-node", 2, "--kubernetes", f"{IMAGE} name=a namespace=team"],
        ["--kubernetes", IMAGE],
    ],
)  # fmt: skip
def test_kubernetes_takes_it(tmp_path: Path, words: list[object], version: str) -> None:
    (tmp_path / "train.py").touch()
    for document in _documents(_emit(tmp_path, *words, "train.py")):
        kubernetes_validate.validate(document, version, strict=True)


def test_what_the_schemas_would_refuse(tmp_path: Path) -> None:
    """That the check can fail at all."""
    (tmp_path / "train.py").touch()
    _, job = _documents(_emit(tmp_path, "--kubernetes", IMAGE, "train.py"))
    job["spec"]["completions"] = "two"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


def test_nodes_gpus_memory_and_the_command(tmp_path: Path) -> None:
    (tmp_path / "Train_It.py").touch()
    words = f"{IMAGE} claim=ckpt:/data shm=16Gi memory=64Gi retries=2"
    run = ["--nnodes", 3, "--gpus", "auto:4", "--max-restarts", 1, "--kubernetes", words, "--grace-s", 40]
    service, job = _documents(_emit(tmp_path, *run, "Train_It.py", "--lr", "$(a) b"))
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["metadata"] == job["metadata"] == {"name": "train-it"}
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "train-it"}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["backoffLimit"] == 6
    assert pod["subdomain"] == "train-it"
    assert pod["terminationGracePeriodSeconds"] == 60
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "4"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/data"}
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert container["command"] == [
        *(
            "phalanx",
            "run",
            "--nnodes",
            "3",
            "--master-addr",
            "train-it-0.train-it",
            "--master-port",
            "29500",
        ),
        *("--max-restarts", "1", "--grace-s", "40", "Train_It.py", "--lr", "$$(a) b"),
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "the pods need an image"),
        (["--kubernetes", "image"], "'image' is no key=value of image, name"),
        (["--kubernetes", f"{IMAGE} nmae=x"], "Fix: name=train"),
        (["--kubernetes", f"{IMAGE} name=Train"], "name=Train: lower-case letters"),
        (["--kubernetes", f"{IMAGE} name={'a' * 58}"], "lower-case letters, digits and dashes"),
        (["--kubernetes", f"{IMAGE} shm=16GB"], "shm=16GB: a quantity of Kubernetes is needed"),
        (["--kubernetes", f"{IMAGE} claim=data"], "a PersistentVolumeClaim and a path"),
        (["--kubernetes", f"{IMAGE} {IMAGE}"], "image= comes twice"),
        (["--kubernetes", "image='x"], "No closing quotation"),
        (["--kubernetes", IMAGE, "--nnodes", "1:2"], "as many pods as it has indices"),
        (["--kubernetes", IMAGE, "--gpus", "0,1"], "which GPUs there are is known once a pod has them"),
        (["--kubernetes", IMAGE, "--node-rank", "0"], "leave --node-rank out"),
        (["--kubernetes", IMAGE, "--sbatch", "-t 1"], "nothing reads it without --emit slurm"),
    ],
)
def test_bad_input_is_one_message(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    told: str,
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert run_command(["run", "--emit", "kubernetes", *words, "train.py"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.count("Fix: ") == 1


@pytest.mark.skipif(labs.missing() is not None, reason=f"no lab: {labs.missing()}")
def test_its_command_meets_although_the_name_of_pod_0_comes_late(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print('node', os.environ['GROUP_RANK'], 'rank', dist.get_rank(), 'sum', int(total), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    words = ["--nnodes", 2, "--nproc-per-node", 2, "--kubernetes", IMAGE]
    _, job = _documents(_emit(tmp_path, *words, "train.py"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = [sys.executable, "-m", *container["command"]]
    (variable,) = container["env"]
    with labs.lab(("train-0", "train-1")) as lab, contextlib.ExitStack() as stack:
        pods = []
        for index, node in enumerate(lab.nodes.values()):  # as the kubelet would start them
            environ = {
                "JOB_COMPLETION_INDEX": str(index),
                variable["name"]: str(index),
                "OMP_NUM_THREADS": "1",
            }
            environ |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PHALANX_RUN_LOG_DIR": f"logs-{index}"}
            out = stack.enter_context((tmp_path / f"out-{index}").open("wb"))
            pods.append(
                subprocess.Popen(
                    node.words(*command, cwd=tmp_path), env=lab.environ | environ, stdout=out, stderr=out
                )
            )

        def said(index: int) -> str:
            return (tmp_path / f"out-{index}").read_text()

        # Neither knows the name at first, pod 0 included.
        unknown = "the name train-0.train is not known here yet"
        wait_until(lambda: unknown in said(0) and unknown in said(1), "both to look for pod 0", 90)
        for node in lab.nodes.values():
            with node.hosts.open("a") as hosts:
                hosts.write(f"{lab['train-0'].address} train-0.train\n")
        assert [pod.wait(120) for pod in pods] == [0, 0], said(0) + said(1)
    for rank in range(4):
        assert f"node {rank // 2} rank {rank} sum 4" in said(rank // 2)
