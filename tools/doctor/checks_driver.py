"""The NVIDIA driver: old enough, whole, loaded, and matched by its libraries."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.tools.doctor.facts import Facts
from phalanx.tools.doctor.findings import Finding
from phalanx.tools.doctor.fixes import newest_for, torch_line
from phalanx.tools.doctor.judging import fail, fine, proven, suspected, symptom_weight, warn
from phalanx.tools.doctor.reading import (
    capability,
    cuda_works,
    driver_cuda,
    gpu_label,
    has_nvidia_gpu,
    in_container,
    is_consumer,
    is_rocm,
    is_vendor_build,
    nvidia_gpus,
    says,
    short_cuda,
    system,
    torch_cuda,
    torch_version,
)
from phalanx.tools.facts.tables import capability_facts, default_cuda, driver_for_cuda, driver_runs_cuda
from phalanx.tools.facts.versions import version_of

_NVSWITCH_NAMES = re.compile(
    r"A100-SXM|A800-SXM|H100 80GB HBM3|H100 SXM|\bH200\b(?! NVL)|\bH800\b|\bH20\b|\bB[23]00\b|V100-SXM3"
)


def _driver_system(facts: Facts) -> str:
    """WSL runs the Windows driver, whose numbers are its own."""
    return "windows" if facts.platform and facts.platform.wsl else system(facts)


def _driver_words(facts: Facts) -> str:
    driver = facts.driver
    if driver is None:
        return ""
    name = f"driver {driver.version}" if driver.version else "the driver"
    newest = driver_cuda(facts)
    return f"{name}, which supports CUDA up to {newest}" if newest else name


def check_driver_too_old(facts: Facts) -> Finding | None:
    """A driver runs every CUDA of its own major number (from 11 on) and all older ones."""
    cuda = torch_cuda(facts) or _assumed_cuda(facts)
    driver = facts.driver
    runs = None
    if cuda and driver is not None:
        runs = driver_runs_cuda(driver.version, driver.cuda, cuda, _driver_system(facts))
    need = driver_for_cuda(cuda, _driver_system(facts)) if cuda else None
    if runs is False and cuda and need and cuda_works(facts) is not True:
        evidence = (
            f"{'torch' if torch_cuda(facts) else 'the image, or the default build of torch,'} is built for CUDA {short_cuda(cuda)}, which needs driver {need.version} or newer",
            f"found {_driver_words(facts)}",
        )
        return proven(
            facts,
            "driver-too-old",
            f"the NVIDIA driver is too old for torch's CUDA {short_cuda(cuda)}",
            evidence,
            _driver_fix(facts, need.version),
            90,
        )
    lagging = _driver_older_than_gpu(facts)
    if lagging is not None:
        return lagging
    if runs and cuda_works(facts) is not False and symptom_weight(facts, "driver-too-old") < 84:
        return fine("driver-too-old", f"the driver runs CUDA {short_cuda(cuda)}", _driver_words(facts))
    wanted = need.version if need else None
    return suspected(
        facts, "driver-too-old", "the NVIDIA driver is older than this CUDA needs", _driver_fix(facts, wanted),
        refuted=runs is True and cuda_works(facts) is not False and symptom_weight(facts, "driver-too-old") < 84,
    )  # fmt: skip


def _assumed_cuda(facts: Facts) -> str | None:
    """The CUDA of an image, or of the registry's build of this torch, where the report names none."""
    if torch_cuda(facts) is not None or cuda_works(facts) is True or is_rocm(facts):
        return None
    if facts.container and facts.container.cuda and not is_consumer(facts):
        return facts.container.cuda
    known = (
        cuda_works(facts) is False and system(facts) == "linux" and not is_vendor_build(torch_version(facts))
    )
    return default_cuda(torch_version(facts) or "") if known else None


def _driver_older_than_gpu(facts: Facts) -> Finding | None:
    """A GPU newer than its driver is not driven at all."""
    newest = driver_cuda(facts)
    if newest is None or cuda_works(facts) is not False:
        return None
    for gpu in nvidia_gpus(facts):
        row = capability_facts(capability(gpu) or "")
        if (
            row
            and version_of(newest)[:2] < version_of(row["min_cuda"])[:2]
            and version_of(row["min_cuda"]) >= (11,)
        ):
            evidence = (
                f"{gpu_label(gpu)} needs a driver with CUDA {row['min_cuda']}",
                f"found {_driver_words(facts)}",
            )
            return proven(
                facts,
                "driver-too-old",
                "the NVIDIA driver is older than the GPU",
                evidence,
                _driver_fix(facts, None),
                72,
            )
    return None


def _driver_fix(facts: Facts, needed: str | None) -> tuple[str, ...]:
    where = "on the host: " if in_container(facts) else ""
    branch = str(version_of(needed)[0]) if needed else ""
    if system(facts) == "windows" or (facts.platform and facts.platform.wsl):
        first = f"install the Windows driver {needed or ''} or newer from https://www.nvidia.com/drivers, then restart".replace(
            "  ", " "
        )
    else:
        package = f"nvidia-driver-{branch}" if branch else "the newest nvidia-driver package"
        first = f"{where}sudo apt install {package} (or the distribution's newest), then sudo reboot"
    driver = facts.driver
    if driver is None or not (driver.version or driver.cuda):
        return (first,)
    release, tag = newest_for(facts)
    runs = driver_runs_cuda(driver.version, driver.cuda, f"{tag[2:-1]}.{tag[-1]}", _driver_system(facts))
    return (first, f"or a torch this driver runs: {torch_line(facts, release, tag)}") if runs else (first,)


def check_forward_compat(facts: Facts) -> Finding | None:
    """The compat libcuda is for data-centre GPUs; on a GeForce it answers error 804."""
    driver = facts.driver
    image = facts.container.cuda if facts.container else None
    newest = driver_cuda(facts)
    evidence: list[str] = []
    if driver and driver.compat_libcuda:
        evidence.append(f"loaded: {driver.compat_libcuda}")
    if driver and driver.cuda_init_error == 804:
        evidence.append("cuInit answers error 804")
    if image and newest and version_of(image)[:2] > version_of(newest)[:2]:
        evidence.append(f"the image brings CUDA {image}, the host has {_driver_words(facts)}")
    title = "a forward-compatibility libcuda is loaded on a GPU that may not use it"
    fix = (
        f"update the host's driver to one with CUDA {image or 'of the image'}",
        "or take an image whose CUDA is not newer than the driver's",
        "or keep the compat folder away: export LD_LIBRARY_PATH=$(echo $LD_LIBRARY_PATH | tr ':' '\\n' | grep -v compat | paste -sd:)",
    )
    if evidence and is_consumer(facts) and cuda_works(facts) is not True:
        return proven(facts, "forward-compat-on-geforce", title, evidence, fix, 89)
    return suspected(facts, "forward-compat-on-geforce", title, fix, refuted=cuda_works(facts) is True)


def check_library_mismatch(facts: Facts) -> Finding | None:
    """The kernel module and libcuda speak one version only, until the module is reloaded."""
    driver = facts.driver
    title = "the NVIDIA kernel module and the driver's libraries are of different versions"
    fix: tuple[str, ...] = (
        "sudo reboot (or stop what uses the GPUs, then: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; sudo modprobe nvidia)",
    )
    if in_container(facts):
        fix = (
            "remove driver packages from the image: apt-get purge -y 'libnvidia-compute-*' 'nvidia-utils-*' 'libcuda1*'",
            *fix,
        )
    wsl = bool(facts.platform and facts.platform.wsl)
    comparable = driver and driver.version and driver.user_version and not wsl and not driver.compat_libcuda
    differ = driver and version_of(driver.version) != version_of(driver.user_version)
    if driver and comparable and differ and cuda_works(facts) is not True:
        evidence = (f"kernel module {driver.version}", f"libraries {driver.user_version}")
        return proven(facts, "driver-library-mismatch", title, evidence, fix, 94)
    if driver and driver.cuda_init_error == 803:
        return proven(facts, "driver-library-mismatch", title, ("cuInit answers error 803",), fix, 95)
    return suspected(facts, "driver-library-mismatch", title, fix, refuted=cuda_works(facts) is True)


def check_kernel_module(facts: Facts) -> Iterator[Finding]:
    """No kernel module, no GPU: not built for this kernel, refused by Secure Boot, or nouveau in its place."""
    driver, platform = facts.driver, facts.platform
    title = "the NVIDIA kernel module is not loaded"
    fix = [
        "sudo modprobe nvidia && nvidia-smi",
        f"sudo apt install --reinstall linux-headers-$(uname -r) nvidia-dkms-{_branch(facts)} && sudo reboot",
    ]
    evidence = []
    if platform and platform.secure_boot:
        evidence.append("Secure Boot is on: it refuses modules that are not signed")
        fix.insert(
            0,
            "sign the module: sudo update-secureboot-policy --enroll-key && sudo reboot, or turn Secure Boot off in the firmware",
        )
    if driver and driver.nouveau_loaded:
        evidence.append("nouveau is loaded, which keeps the GPU from NVIDIA's driver")
        fix.insert(
            0,
            "echo 'blacklist nouveau' | sudo tee /etc/modprobe.d/blacklist-nouveau.conf && sudo update-initramfs -u && sudo reboot",
        )
    if driver and driver.module_on_disk is False:
        evidence.append(f"no module is built for kernel {(platform and platform.kernel) or 'that runs'}")
    if (
        driver
        and driver.module_loaded is False
        and (driver.hardware or nvidia_gpus(facts))
        and not in_container(facts)
    ):
        devices = [f"on the PCI bus: {name}" for name in (driver.hardware or ())[:2]]
        yield proven(
            facts,
            "kernel-module-not-loaded",
            title,
            (*devices, "no nvidia module in /proc/modules", *evidence),
            fix,
            92,
        )
        return
    if (
        platform
        and platform.secure_boot
        and not facts.live
        and cuda_works(facts) is None
        and has_nvidia_gpu(facts)
    ):
        yield warn("kernel-module-not-loaded", title, evidence, fix, 52)
    weak = (
        says(facts, r"found no nvidia driver")
        and has_nvidia_gpu(facts) is not True
        and not says(facts, r"nvidia-smi|driver (?:is )?installed|rtx|gtx|tesla|geforce")
    )
    found = suspected(
        facts,
        "kernel-module-not-loaded",
        title,
        fix,
        refuted=cuda_works(facts) is True or weak or is_rocm(facts),
        evidence=evidence,
    )
    if found:
        yield found


def _branch(facts: Facts) -> str:
    version = facts.driver.version if facts.driver else None
    return str(version_of(version)[0]) if version_of(version) else "<branch>"


def check_open_module(facts: Facts) -> Finding | None:
    """GPUs from Blackwell on are driven by the open kernel modules alone."""
    return suspected(
        facts, "gpu-driver-open-module-needed", "this GPU needs the open NVIDIA kernel modules",
        ("sudo apt install nvidia-open (or nvidia-driver-<branch>-open), then sudo reboot",), refuted=cuda_works(facts) is True,
    )  # fmt: skip


def check_fabric_manager(facts: Facts) -> Finding | None:
    """Behind NVSwitches no GPU starts CUDA before a fabric manager of the driver's version has set them up."""
    driver = facts.driver
    fix = (
        f"sudo systemctl enable --now nvidia-fabricmanager (install nvidia-fabricmanager-{_branch(facts)} if it is missing)",
        "sudo journalctl -u nvidia-fabricmanager -n 50 says why it does not start; its version must be the driver's",
        "in a hosted job: take another node and report this one",
    )
    evidence = _fabric_evidence(facts)
    title = (
        "the NVSwitch fabric is not ready: fabric manager not running or of another version than the driver"
    )
    if evidence:
        if cuda_works(facts) is True:
            return warn("fabricmanager-not-running", title, evidence, fix, 55)
        return proven(facts, "fabricmanager-not-running", title, evidence, fix, 91)
    found = suspected(facts, "fabricmanager-not-running", title, fix, refuted=cuda_works(facts) is True)
    if found or cuda_works(facts) is True:
        return found
    names = [gpu_label(gpu) for gpu in nvidia_gpus(facts) if _NVSWITCH_NAMES.search(gpu.name or "")]
    dead = cuda_works(facts) is False or says(
        facts,
        r"cuda (?:never|does not|doesn.t|won.t|cannot|fails to) (?:initiali|start)|fail\w{0,3} to initiali[sz]e cuda",
    )
    if names and dead and torch_cuda(facts) != "" and not (driver and driver.error):
        return fail(
            "fabricmanager-not-running",
            title,
            (f"{names[0]} sits behind NVSwitches", "the driver lists it, CUDA does not start"),
            fix,
            64,
        )
    return None


def _fabric_evidence(facts: Facts) -> list[str]:
    driver = facts.driver
    evidence = []
    for gpu in facts.gpus or ():
        state = (gpu.fabric_state or "").lower()
        if (
            re.search(r"in progress|not started|fail|incomplete|error", state)
            and "not supported" not in state
        ):
            evidence.append(f"{gpu_label(gpu)}: fabric state {gpu.fabric_state}")
    if driver is None:
        return evidence
    if driver.nvswitch and driver.fabric_manager and driver.fabric_manager != "active":
        evidence.append(f"NVSwitches on the bus, fabric manager: {driver.fabric_manager}")
    other = driver.fabric_manager_version
    if driver.nvswitch and other and driver.version and version_of(other) != version_of(driver.version):
        evidence.append(f"fabric manager {other}, driver {driver.version}")
    if driver.cuda_init_error == 802:
        evidence.append("cuInit answers error 802 (system not yet initialised)")
    return evidence[:4]


def check_wsl(facts: Facts) -> Finding | None:
    """Under WSL libcuda comes from Windows, in /usr/lib/wsl/lib; no Linux driver belongs there."""
    platform = facts.platform
    wsl = bool(platform and platform.wsl)
    fix = (
        "export LD_LIBRARY_PATH=/usr/lib/wsl/lib:$LD_LIBRARY_PATH (and: sudo ldconfig /usr/lib/wsl/lib)",
        "remove Linux driver packages inside WSL (sudo apt purge 'nvidia-*' 'libnvidia-*'), update Windows' driver, wsl --shutdown",
    )
    title = "WSL's libcuda is not on the loader's path"
    if (
        wsl
        and facts.driver
        and facts.driver.error
        and facts.live
        and torch_cuda(facts)
        and cuda_works(facts) is False
    ):
        return proven(
            facts, "wsl-libcuda-not-on-path", title, ("WSL, torch with CUDA, CUDA not available",), fix, 80
        )
    return suspected(
        facts,
        "wsl-libcuda-not-on-path",
        title,
        fix,
        refuted=cuda_works(facts) is True or torch_cuda(facts) == "",
    )


def check_unknown_error(facts: Facts) -> Finding | None:
    """Error 999 says nothing itself; after a suspend it is the memory module that must be reloaded."""
    fix = ("sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm (after a suspend), else sudo reboot",)
    title = "CUDA answers 'unknown error' at its start"
    if facts.driver and facts.driver.cuda_init_error == 999:
        return proven(facts, "cuda-unknown-error", title, ("cuInit answers error 999",), fix, 66)
    return suspected(facts, "cuda-unknown-error", title, fix, refuted=cuda_works(facts) is True)
