"""Faults made for real, each found by a live `phalanx doctor`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.doctor.live import WHY_NO_MOUNTS, Doctor, bad, finding, first, quick_torch

needs_mounts = pytest.mark.skipif(WHY_NO_MOUNTS is not None, reason=f"mount namespaces: {WHY_NO_MOUNTS}")


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


@pytest.fixture
def torch(tmp_path: Path) -> dict[str, str]:
    return quick_torch(tmp_path)


# the environment of packages


def test_a_torchvision_of_another_torch(doctor: Doctor, tmp_path: Path) -> None:
    """torch's own error: a torchvision whose compiled part does not load defines no nms, and says so here."""
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    real = Path(spec.origin).parent
    other = tmp_path / "other" / "torchvision"
    shutil.copytree(
        real, other, ignore=shutil.ignore_patterns("_C*", "image*.so", "datasets", "models", "*.dylib")
    )
    (other / "_C.so").write_bytes(b"\x7fELF of another torch")
    info = tmp_path / "other" / "torchvision-0.19.0+cu130.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.19.0+cu130\n")
    (other / "version.py").write_text("__version__ = '0.19.0+cu130'\ncuda = '13.0'\n")
    report = doctor.report(environ={"PYTHONPATH": str(tmp_path / "other")})
    found = finding(report, "torch-torchvision-mismatch")
    assert found["status"] == "fail"
    assert "0.19.0" in " ".join([found["title"], *found["evidence"]])
    assert "torchvision" in found["fix"][0]
    assert "nms" in report["facts"]["torchvision"]["error"]


def test_numpy_2_with_an_old_torch(doctor: Doctor, tmp_path: Path) -> None:
    code = "zeros.numpy = lambda self: (_ for _ in ()).throw(RuntimeError('Numpy is not available'))"
    environ = quick_torch(tmp_path, version="2.1.2+cu121", cuda="12.1", code=code)
    found = finding(doctor.report(environ=environ), "numpy2-abi")
    assert "numpy" in found["fix"][0]


@pytest.fixture
def python_with_user_site(tmp_path: Path) -> str:
    """An interpreter that looks into the user's own folder, as one outside of a virtual environment does."""
    home = tmp_path / "venv"
    (home / "bin").mkdir(parents=True)
    base = Path(sys.executable).resolve()
    (home / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = true\n")
    (home / "bin" / "python").symlink_to(base)
    packages = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return str(home / "bin" / "python")


def test_a_second_torch_in_the_user_s_site(
    doctor: Doctor, tmp_path: Path, python_with_user_site: str
) -> None:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = tmp_path / "home" / ".local" / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (site / "torch-2.5.0.dist-info").mkdir()
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text(
        "__version__ = '2.5.0'\nclass version: cuda = None; hip = None\n"
    )
    environ = {"HOME": str(tmp_path / "home")}
    report = doctor.report(python=python_with_user_site, environ=environ)
    found = finding(report, "duplicate-torch-install")
    assert any(str(site) in line or "2.5.0" in line for line in found["evidence"])


def test_a_torch_that_hangs_at_import(doctor: Doctor, tmp_path: Path) -> None:
    environ = quick_torch(tmp_path, code="import signal\nwhile True: signal.pause()")
    report = doctor.report("--timeout-s", "2", environ=environ)
    assert finding(report, first(report))["status"] == "fail"
    assert first(report) == "torch-import-hangs"


def test_a_torch_that_crashes_at_import(doctor: Doctor, tmp_path: Path) -> None:
    environ = quick_torch(tmp_path, code="import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    report = doctor.report(environ=environ)
    assert first(report) == "torch-import-crashes"
    found = finding(report, "torch-import-crashes")
    assert "SIGSEGV" in " ".join([found["title"], *found["evidence"]])


def test_a_file_of_one_s_own_named_torch(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("print('my experiment')\nfrom torch import nn\n")
    report = doctor.report()
    assert first(report) == "torch-name-taken"
    assert str(tmp_path / "torch.py") in finding(report, "torch-name-taken")["fix"][0]


def test_no_torch_names_the_install_line(doctor: Doctor, tmp_path: Path) -> None:
    broken = tmp_path / "none" / "sitecustomize.py"
    broken.parent.mkdir()
    broken.write_text(
        "import sys\nclass No:\n    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch': raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
        "sys.meta_path.insert(0, No())\n"
    )
    report = doctor.report(environ={"PYTHONPATH": str(broken.parent)})
    assert report["facts"]["torch"]["installed"] is False
    assert first(report) == "torch-not-installed"
    assert "install" in finding(report, "torch-not-installed")["fix"][0]


_LOADS_CUDNN = "import ctypes; ctypes.CDLL('libcudnn.so.9')"  # as a torch does whose files have no RPATH


def test_a_broken_cudnn_first_on_the_library_path(doctor: Doctor, tmp_path: Path) -> None:
    """The loader's real complaint."""
    library = tmp_path / "cudnn" / "libcudnn.so.9"
    library.parent.mkdir()
    library.write_bytes(b"not a library")
    environ = quick_torch(tmp_path, cuda="13.0", code=_LOADS_CUDNN)
    report = doctor.report(environ={**environ, "LD_LIBRARY_PATH": str(library.parent)})
    assert first(report) == "ld-library-path-shadows-cudnn"
    assert any(str(library.parent) in line for line in finding(report, first(report))["evidence"])


def test_another_cudnn_first_on_the_library_path(doctor: Doctor, tmp_path: Path) -> None:
    """One that loads, and is too old: what is mapped says so."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build a libcudnn with")
    library = tmp_path / "cudnn" / "libcudnn.so.9"
    library.parent.mkdir()
    (tmp_path / "cudnn.c").write_text("unsigned long cudnnGetVersion(void) { return 90001; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "cudnn.c")], check=True)
    code = _LOADS_CUDNN + "\nclass _C:\n class _cudnn: getCompileVersion = staticmethod(lambda: (9, 10, 2))"
    environ = quick_torch(tmp_path, cuda="13.0", code=code)
    report = doctor.report(environ={**environ, "LD_LIBRARY_PATH": str(library.parent)})
    assert first(report) == "ld-library-path-shadows-cudnn"
    evidence = " ".join(finding(report, first(report))["evidence"])
    assert "9.10.2" in evidence
    assert "9.0.1" in evidence


def test_a_cudnn_on_the_library_path_that_nobody_takes(doctor: Doctor, tmp_path: Path) -> None:
    """PyPI's torch finds its own by RPATH, which goes before the variable: there is nothing wrong."""
    (tmp_path / "libcudnn.so.9").write_bytes(b"not a library")
    report = doctor.report(environ={"LD_LIBRARY_PATH": str(tmp_path)})
    assert "/libcudnn.so.9" in " ".join(entry["path"] for entry in report["facts"]["libraries"])
    assert "ld-library-path-shadows-cudnn" not in bad(report)


def test_no_compiler(doctor: Doctor, torch: dict[str, str], tmp_path: Path) -> None:
    report = doctor.report(environ={**torch, "PATH": str(tmp_path)})
    assert finding(report, "compiler-missing")["status"] == "warn"


# limits and disks


@needs_mounts
def test_small_shared_memory(doctor: Doctor, torch: dict[str, str]) -> None:
    before = ["mount -t tmpfs -o size=64M tmpfs /dev/shm"]
    found = finding(doctor.report("--loader-workers", "4", before=before, environ=torch), "shm-too-small")
    assert "64" in " ".join([found["title"], *found["evidence"]])


@needs_mounts
def test_few_open_files(doctor: Doctor, torch: dict[str, str]) -> None:
    report = doctor.report(before=["ulimit -n 256"], environ=torch)
    assert "256" in " ".join(finding(report, "too-many-open-files")["evidence"])


@needs_mounts
def test_little_locked_memory(doctor: Doctor, torch: dict[str, str]) -> None:
    """It matters where there is InfiniBand, which this machine gets for a moment."""
    port = "/sys/class/infiniband/mlx5_0/ports/1"
    before = [
        "mount -t tmpfs tmpfs /sys/class/infiniband 2>/dev/null || mount -t tmpfs tmpfs /sys/class",
        f"mkdir -p {port}",
        f"echo '4: ACTIVE' > {port}/state; echo InfiniBand > {port}/link_layer",
        "ulimit -l 64",
    ]
    found = finding(doctor.report(before=before, environ=torch), "memlock-limit-too-low")
    assert "unlimited" in " ".join(found["fix"])


@needs_mounts
def test_a_full_disk(doctor: Doctor, torch: dict[str, str], tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    before = [
        f"mount -t tmpfs -o size=32M tmpfs {full}",
        f"head -c 64M /dev/zero > {full}/x 2>/dev/null || true",
    ]
    found = finding(doctor.report("--output-dir", str(full), before=before, environ=torch), "disk-full")
    assert str(full) in found["title"]


@needs_mounts
def test_no_inodes(doctor: Doctor, torch: dict[str, str], tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    before = [
        f"mount -t tmpfs -o nr_inodes=20 tmpfs {full}",
        f"for i in $(seq 30); do touch {full}/$i 2>/dev/null || true; done",
    ]
    report = doctor.report("--output-dir", str(full), before=before, environ=torch)
    assert "inodes" in finding(report, "disk-full")["title"]


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A control group of 1 GiB, where this user may make one."""
    parent = Path("/sys/fs/cgroup/memory")
    version_1 = parent.is_dir()
    group = (parent if version_1 else Path("/sys/fs/cgroup")) / f"phalanx-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(1 << 30))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), 9)
    group.rmdir()


@needs_mounts
def test_a_memory_limit(doctor: Doctor, torch: dict[str, str], small_cgroup: Path) -> None:
    before = [f"echo $$ > {small_cgroup}/cgroup.procs"]
    report = doctor.report("--nproc-per-node", "8", "--loader-workers", "8", before=before, environ=torch)
    assert report["facts"]["limits"]["cgroup_memory_bytes"] == 1 << 30
    assert "cgroup" in " ".join(finding(report, "host-memory-low")["evidence"])


# the network


@needs_mounts
def test_the_host_s_name_is_loopback(doctor: Doctor, torch: dict[str, str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    before = [f"mount --bind {hosts} /etc/hosts"]
    report = doctor.report("--nnodes", "2", before=before, environ=torch)
    assert any("127.0.1.1" in line for line in finding(report, "hostname-resolves-to-loopback")["evidence"])
    alone = doctor.report("--nnodes", "1", before=before, environ=torch)
    assert "hostname-resolves-to-loopback" not in [
        entry["id"] for entry in alone["findings"] if entry["status"] == "fail"
    ]


@pytest.mark.parametrize(
    ("variable", "value", "wrong"),
    [
        ("GLOO_SOCKET_IFNAME", "nothing0", True),
        ("GLOO_SOCKET_IFNAME", "^docker0", True),
        ("GLOO_SOCKET_IFNAME", "=lo", True),
        ("GLOO_SOCKET_IFNAME", "lo", False),
        ("NCCL_SOCKET_IFNAME", "nothing0", True),
        ("NCCL_SOCKET_IFNAME", "=l", True),
        ("NCCL_SOCKET_IFNAME", "l", False),
        ("NCCL_SOCKET_IFNAME", "^docker0", False),
    ],
)
def test_interfaces_that_are_not_there(
    doctor: Doctor, torch: dict[str, str], variable: str, value: str, wrong: bool
) -> None:
    """NCCL takes lists of prefixes, ``=`` and ``^``; gloo takes names and nothing else."""
    report = doctor.report(environ={**torch, variable: value})
    assert (f"{variable[:4].lower()}-socket-ifname-wrong" in bad(report)) is wrong


def test_a_port_that_is_taken(doctor: Doctor, torch: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        report = doctor.report(environ={**torch, "MASTER_PORT": str(port)})
    found = finding(report, "port-in-use")
    assert found["status"] == "fail"
    assert str(port) in found["title"]
    assert f"pid {os.getpid()}" in found["evidence"][0]


# a machine that has no fault


def test_this_machine_has_no_failure(tmp_path: Path) -> None:
    """Whatever the machine that runs the tests is like, a plain CPU job on one node works here, and it says so."""
    report = Doctor(tmp_path).report(self_test=True, environ={"GLOO_SOCKET_IFNAME": "lo"})
    assert [entry for entry in report["findings"] if entry["status"] == "fail"] == []
    by_id = {entry["id"]: entry["status"] for entry in report["findings"]}
    assert by_id["self-test"] == "ok"


def test_one_run_leaves_nothing_behind(doctor: Doctor, torch: dict[str, str], tmp_path: Path) -> None:
    doctor.report(environ={**torch, "TMPDIR": str(tmp_path)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quick"]
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], check=False, capture_output=True).stdout == b""
