"""Probes over machines made of files, and over this one."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.tools.doctor.probes import (
    compilers,
    disks,
    driver,
    environment,
    kernel_log,
    limits,
    network,
    packages,
    system,
)
from phalanx.tools.doctor.probes.scene import Scene

GIB = 1 << 30


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(root=tmp_path, environ={})


def write(scene: Scene, path: str, text: str = "") -> Path:
    target = scene.path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return target


# cgroups


def test_a_container_of_version_2(scene: Scene) -> None:
    write(scene, "/proc/self/cgroup", "0::/\n")
    write(scene, "/proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
    write(scene, "/sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    write(scene, "/sys/fs/cgroup/memory.current", f"{GIB}\n")
    write(scene, "/sys/fs/cgroup/cpu.max", "150000 100000\n")
    write(scene, "/sys/fs/cgroup/pids.max", "512\n")
    found = limits.probe(scene)["limits"]
    assert found["cgroup_memory_bytes"] == 8 * GIB
    assert found["cgroup_memory_used_bytes"] == GIB
    assert found["cgroup_cpus"] == 1.5
    assert found["cgroup_pids"] == 512


def test_the_tightest_of_the_parents_counts(scene: Scene) -> None:
    write(scene, "/proc/self/cgroup", "0::/slurm/job_7/step_0\n")
    write(scene, "/proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
    write(scene, "/sys/fs/cgroup/slurm/job_7/step_0/memory.max", "max\n")
    write(scene, "/sys/fs/cgroup/slurm/job_7/memory.max", f"{4 * GIB}\n")
    write(scene, "/sys/fs/cgroup/slurm/job_7/memory.current", f"{2 * GIB}\n")
    write(scene, "/sys/fs/cgroup/slurm/memory.max", f"{64 * GIB}\n")
    found = limits.probe(scene)["limits"]
    assert (found["cgroup_memory_bytes"], found["cgroup_memory_used_bytes"]) == (4 * GIB, 2 * GIB)


def test_version_1_and_its_way_to_say_no_limit(scene: Scene) -> None:
    write(scene, "/proc/self/cgroup", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n")
    write(
        scene,
        "/proc/mounts",
        "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\n",
    )
    write(scene, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(scene, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    assert "cgroup_memory_bytes" not in limits.probe(scene)["limits"]
    # In a container the group's path is the host's, and only its own folder is mounted.
    write(scene, "/sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(scene, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n")
    write(scene, "/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    found = limits.probe(scene)["limits"]
    assert (found["cgroup_memory_bytes"], found["cgroup_cpus"]) == (2 * GIB, 0.5)


def test_memory(scene: Scene) -> None:
    write(scene, "/proc/meminfo", "MemTotal:       1024 kB\nMemFree: 9 kB\nMemAvailable:    512 kB\n")
    assert limits.probe(scene)["memory"] == {"total_bytes": 1 << 20, "available_bytes": 512 << 10}


def test_the_limits_of_this_process() -> None:
    found = limits.probe(Scene())["limits"]
    assert found["nofile"] > 0
    assert found["affinity_cpus"] >= 1
    assert found["shm_total_bytes"] > 0


# the driver's files


def gpu(scene: Scene, address: str, above: str = "pci0000:00/0000:00:01.0", kind: str = "0x030200") -> str:
    """A device in the tree that /sys/bus/pci/devices points into."""
    for place in (above, f"{above}/{address}"):
        folder = scene.path(f"/sys/devices/{place}")
        folder.mkdir(parents=True, exist_ok=True)
        link = scene.path(f"/sys/bus/pci/devices/{folder.name}")
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(folder)
    for name, text in {"vendor": "0x10de", "class": kind, "device": "0x2330"}.items():
        write(scene, f"/sys/devices/{above}/{address}/{name}", text + "\n")
    return f"/sys/devices/{above}"


def test_hardware_without_a_module(scene: Scene) -> None:
    gpu(scene, "0000:01:00.0")
    write(scene, "/proc/modules", "nouveau 2723840 1 - Live 0x0\n")
    write(scene, "/proc/sys/kernel/osrelease", "6.1.0-9-amd64\n")
    write(scene, "/lib/modules/6.1.0-9-amd64/modules.dep", "updates/dkms/nvidia-drm.ko:\n")
    found = driver.probe(scene)["driver"]
    assert found["hardware"] == ["0000:01:00.0 NVIDIA [10de:2330]"]
    assert (found["module_loaded"], found["nouveau_loaded"], found["module_on_disk"]) == (False, True, False)
    write(
        scene, "/lib/modules/6.1.0-9-amd64/modules.dep", "updates/dkms/nvidia.ko.zst: kernel/drivers/x.ko\n"
    )
    assert driver.probe(scene)["driver"]["module_on_disk"] is True


@pytest.mark.parametrize(
    ("text", "version", "is_open"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: gcc 12",
            "535.104.05",
            False,
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)",
            "570.86.15",
            True,
        ),
        ("NVRM version: NVIDIA UNIX aarch64 Kernel Module  418.67  Sat", "418.67", False),
    ],
)
def test_the_module_s_version(scene: Scene, text: str, version: str, is_open: bool) -> None:
    write(scene, "/proc/driver/nvidia/version", text)
    found = driver.probe(scene)["driver"]
    assert (found["version"], found["open_module"], found["module_loaded"]) == (version, is_open, True)


def test_switches_ask_for_a_fabric_manager(scene: Scene) -> None:
    gpu(scene, "0000:01:00.0")
    assert driver.probe(scene)["driver"]["nvswitch"] is False
    gpu(scene, "0000:05:00.0", kind="0x068000")
    found = driver.probe(scene)["driver"]
    assert (found["nvswitch"], found["fabric_manager"]) == (True, "absent")
    write(scene, "/proc/77/comm", "nv-fabricmanage\n")
    assert driver.probe(scene)["driver"]["fabric_manager"] == "active"


def config(*capabilities: tuple[int, int], size: int = 4096) -> bytes:
    """A configuration space with extended capabilities: (id, control)."""
    data = bytearray(size)
    for number, (identity, control) in enumerate(capabilities):
        place = 0x100 + 0x20 * number
        following = place + 0x20 if number + 1 < len(capabilities) else 0
        struct.pack_into("<IHH", data, place, identity | 1 << 16 | following << 20, 0, control)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (config((0x0D, 0x1D)), True),
        (config((0x01, 0), (0x0D, 0x04)), True),
        (config((0x01, 0), (0x0D, 0x11)), False),  # source validation and upstream forwarding alone
        (config((0x01, 0)), False),
        (config(size=64), None),  # all that users other than root may read
        (b"", None),
    ],
)
def test_acs(data: bytes, expected: bool | None) -> None:
    assert driver.acs_redirects(data) is expected


def test_acs_of_a_list_that_runs_in_a_circle() -> None:
    data = bytearray(config((0x01, 0)))
    struct.pack_into("<I", data, 0x100, 0x01 | 0x100 << 20)
    assert driver.acs_redirects(bytes(data)) is False


def test_acs_on_the_bridge_above_a_gpu(scene: Scene) -> None:
    above = gpu(scene, "0000:01:00.0")
    scene.path(f"{above}/config").write_bytes(config((0x0D, 0x1D)))
    scene.path(f"{above}/0000:01:00.0/config").write_bytes(config())
    assert driver.probe(scene)["topology"]["acs_enabled"] is True
    scene.path(f"{above}/config").write_bytes(config((0x0D, 0)))
    assert driver.probe(scene)["topology"]["acs_enabled"] is False


@pytest.mark.parametrize(
    ("kind", "expected"), [("DMA-FQ", "translating"), ("identity", "passthrough"), ("DMA", "translating")]
)
def test_iommu(scene: Scene, kind: str, expected: str) -> None:
    gpu(scene, "0000:01:00.0")
    assert "iommu" not in driver.probe(scene)["topology"]
    scene.path("/sys/class/iommu").mkdir(parents=True)
    assert driver.probe(scene)["topology"]["iommu"] == "off"
    write(scene, "/sys/class/iommu/dmar0")
    write(scene, "/sys/kernel/iommu_groups/3/type", kind)
    write(scene, "/sys/kernel/iommu_groups/3/devices/0000:01:00.0")
    assert driver.probe(scene)["topology"]["iommu"] == expected


# names, interfaces, ports


def test_infiniband_and_interfaces(scene: Scene) -> None:
    folder = "/sys/class/infiniband/mlx5_0/ports/1"
    for name, text in {
        "state": "1: DOWN",
        "phys_state": "3: Disabled",
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand",
    }.items():
        write(scene, f"{folder}/{name}", text + "\n")
    for name, state, flags in (
        ("eth0", "up", "0x1003"),
        ("eth1", "down", "0x1003"),
        ("lo", "unknown", "0x9"),
    ):
        write(scene, f"/sys/class/net/{name}/operstate", state + "\n")
        write(scene, f"/sys/class/net/{name}/flags", flags + "\n")
        write(scene, f"/sys/class/net/{name}/mtu", "9000\n")
    found = network.probe(scene)["network"]
    assert found["infiniband"] == [
        {
            "device": "mlx5_0",
            "port": 1,
            "state": "DOWN",
            "physical_state": "Disabled",
            "rate": "400 Gb/sec (4X NDR)",
            "link_layer": "InfiniBand",
        }
    ]
    assert [(entry["name"], entry["up"], entry["mtu"]) for entry in found["interfaces"]] == [
        ("eth0", True, 9000),
        ("eth1", False, 9000),
        ("lo", True, 9000),
    ]


def test_a_port_that_is_taken_is_named_with_its_owner() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = network.probe(Scene(port=port))["network"]
        assert (found["port"], found["port_free"]) == (port, False)
        assert "pid" in found["port_owner"]
    assert network.probe(Scene(port=port))["network"]["port_free"] is True


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 29500),
        ({"MASTER_PORT": "1234"}, 1234),
        ({"MASTER_PORT": " "}, 29500),
        ({"MASTER_PORT": "x"}, None),
    ],
)
def test_which_port(environ: dict[str, str], expected: int | None) -> None:
    assert network.rendezvous_port(Scene(environ=environ)) == expected


def test_names() -> None:
    assert network.resolve("127.0.0.1") == (["127.0.0.1"], None)
    addresses, error = network.resolve("no-such-host.invalid")
    assert addresses == []
    assert error
    assert network.resolve("a" * 300)[1]  # no exception of the encoding


# disks


def test_places_and_space(tmp_path: Path) -> None:
    scene = Scene(environ={"TMPDIR": str(tmp_path), "HOME": "/root"}, output_dir=tmp_path / "not" / "yet")
    assert list(disks.places(scene)) == ["working folder", "output folder", "temporary files", "home"]
    (found,) = disks.probe(scene, "output folder", tmp_path / "not" / "yet")["disks"]
    assert found["writable"] is True
    assert found["free_bytes"] > 0
    assert found["filesystem"]


def test_the_mount_that_a_path_lies_in(scene: Scene) -> None:
    write(
        scene,
        "/proc/self/mounts",
        "/dev/sda / ext4 rw 0 0\nsrv:/h /home nfs4 rw 0 0\ntmpfs /home/with\\040space tmpfs rw 0 0\n",
    )
    assert disks._filesystem(scene, Path("/home/anna/x")) == "nfs4"
    assert disks._filesystem(scene, Path("/homes")) == "ext4"
    assert disks._filesystem(scene, Path("/home/with space/x")) == "tmpfs"


# packages


def test_distributions_of_a_folder(tmp_path: Path) -> None:
    for name in (
        "torch-2.6.0+cu126.dist-info",
        "nvidia_nccl_cu12-2.21.5.dist-info",
        "old-1.0-py3.10.egg-info",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "torch-2.6.0+cu126.dist-info" / "INSTALLER").write_text("conda\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "mine.egg-info").mkdir()
    (tmp_path / "mine.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0.3\n")
    found = {entry["name"]: (entry["version"], entry["source"]) for entry in packages.installed_in(tmp_path)}
    assert found == {
        "torch": ("2.6.0+cu126", "conda"),
        "nvidia-nccl-cu12": ("2.21.5", "pip"),
        "old": ("1.0", "pip"),
        "mine": ("0.3", "pip"),
    }


def test_this_environment_s_packages_are_those_that_importlib_finds() -> None:
    from importlib.metadata import distributions, version

    def normal(name: str) -> str:
        return name.lower().replace("_", "-").replace(".", "-")

    ours = {(normal(entry["name"]), entry["version"]) for entry in packages.probe(Scene())["packages"]}
    theirs = {
        (normal(item.metadata["Name"]), item.version) for item in distributions() if item.metadata["Name"]
    }
    assert {name for name, _ in theirs} - {name for name, _ in ours} <= {"phalanx"}  # installed in place
    assert ("torch", version("torch").partition("+")[0]) in {
        (name, release.partition("+")[0]) for name, release in ours
    }


# compilers


def program(folder: Path, name: str, output: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    path.chmod(0o755)


def test_compilers_on_path(tmp_path: Path) -> None:
    program(tmp_path, "g++", "11.4.0")
    program(
        tmp_path,
        "nvcc",
        "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.1, V12.1.105",
    )
    program(tmp_path, "ninja", "1.11.1")
    found = compilers.probe(Scene(environ={"PATH": f"{tmp_path}:/bin"}))["compilers"]
    assert (found["gcc"], found["nvcc"], found["ninja"]) == ("11.4.0", "12.1.105", "1.11.1")
    assert found["nvcc_path"] == str(tmp_path / "nvcc")


def test_no_compiler(tmp_path: Path) -> None:
    found = compilers.probe(Scene(environ={"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}))["compilers"]
    assert (found["gcc"], found["nvcc"], found["clang"], found["ninja"]) == ("", "", "", "")
    assert found["cuda_home"] == str(tmp_path)


def test_a_compiler_that_does_not_answer_is_not_absent(tmp_path: Path) -> None:
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "g++").chmod(0o755)
    assert compilers.probe(Scene(environ={"PATH": str(tmp_path)}))["compilers"]["gcc"] is None


# system, environment, kernel log


@pytest.mark.parametrize(
    ("path", "text", "environ", "kind"),
    [
        ("/.dockerenv", "", {}, "docker"),
        ("/run/.containerenv", "", {}, "podman"),
        ("/etc/hosts", "", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ("/etc/hosts", "", {"APPTAINER_CONTAINER": "/x.sif"}, "apptainer"),
        ("/proc/self/cgroup", "12:memory:/kubepods/burstable/pod1\n", {}, "kubernetes"),
        ("/etc/hosts", "", {}, ""),
    ],
)
def test_containers(scene: Scene, path: str, text: str, environ: dict[str, str], kind: str) -> None:
    write(scene, path, text)
    found = system.probe(Scene(root=scene.root, environ=environ))
    assert found["container"]["kind"] == kind


def test_platforms(scene: Scene) -> None:
    write(scene, "/proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n")
    write(scene, "/etc/os-release", 'NAME=x\nPRETTY_NAME="Ubuntu 22.04.3 LTS"\n')
    write(scene, "/proc/device-tree/model", "NVIDIA Jetson AGX Orin\0")
    variable = write(scene, "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c")
    variable.write_bytes(b"\6\0\0\0\1")
    found = system.probe(scene)["platform"]
    assert found["os"].startswith("Ubuntu 22.04.3 LTS (")
    assert (found["wsl"], found["jetson"], found["secure_boot"]) == (True, True, True)
    variable.write_bytes(b"\6\0\0\0\0")
    assert system.probe(scene)["platform"]["secure_boot"] is False


def test_variables() -> None:
    environ = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCLL_DEBUG": "INFO",
        "CUAD_VISIBLE_DEVICES": "0",
        "WANDB_API_KEY": "secret",
        "HF_TOKEN": "secret",
        "NCCL_PASSWORD": "secret",
        "EDITOR": "vi",
        "https_proxy": "http://user:secret@proxy:3128",
    }
    assert environment.relevant(environ) == {
        "CUAD_VISIBLE_DEVICES": "0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCLL_DEBUG": "INFO",
        "https_proxy": "http://...@proxy:3128",
    }


def test_the_kernel_s_log(scene: Scene) -> None:
    write(
        scene,
        "/dev/kmsg",
        "4,1,1500000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n SUBSYSTEM=pci\n"
        "6,2,2500000,-;usb 1-1: new device\n",
    )
    assert kernel_log.probe(scene) == {
        "kernel_log": ["[    1.500000] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."]
    }


def test_a_log_that_may_not_be_read(scene: Scene) -> None:
    assert kernel_log.probe(scene) is None


def test_the_real_log() -> None:
    found: dict[str, Any] | None = kernel_log.probe(Scene())
    assert found is None or all(isinstance(line, str) for line in found["kernel_log"])


def test_probes_import_no_torch() -> None:
    import subprocess

    code = "import sys, phalanx.tools.doctor.gather; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
