"""`nvidia-smi -q`: what a value means depends on the section it stands in."""

from __future__ import annotations

import pytest

from phalanx.tools.doctor.checks import diagnose
from phalanx.tools.doctor.facts import Facts, GpuFacts
from phalanx.tools.doctor.report_text import facts_from_text
from tests.tools.doctor import cases, report_forms

MIB = 1 << 20


def _query(**changes: str) -> str:
    """The query's output for one GPU; ``changes`` replace values by section and name."""
    values = {
        "width": "16x",
        "generation": "4",
        "idle": "Active",
        "thermal": "Not Active",
        "brake": "Not Active",
        "sram": "0",
        "dram": "0",
        "dram_ever": "0",
        "remapped": "0",
        "pending": "No",
        "failed": "No",
        "blacklist": "N/A",
        "mig": "Disabled",
        "mode": "Default",
        "state": "Completed",
        "status": "Success",
        "use": "0 %",
    } | changes
    return f"""==============NVSMI LOG==============

Timestamp                                 : Mon Mar  3 10:11:12 2025
Driver Version                            : 550.90.07
CUDA Version                              : 12.4

Attached GPUs                             : 1
GPU 00000000:3B:00.0
    Product Name                          : NVIDIA A100-SXM4-80GB
    Persistence Mode                      : Enabled
    MIG Mode
        Current                           : {values["mig"]}
        Pending                           : Disabled
    GPU UUID                              : GPU-01234567-89ab-cdef-0123-456789abcdef
    PCI
        Bus                               : 0x3B
        Bus Id                            : 00000000:3B:00.0
        GPU Link Info
            PCIe Generation
                Max                       : 4
                Current                   : {values["generation"]}
                Device Current            : 4
            Link Width
                Max                       : 16x
                Current                   : {values["width"]}
    Clocks Event Reasons
        Idle                              : {values["idle"]}
        SW Power Cap                      : Not Active
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : {values["thermal"]}
            HW Power Brake Slowdown       : {values["brake"]}
        SW Thermal Slowdown               : Not Active
    FB Memory Usage
        Total                             : 81920 MiB
        Used                              : 7 MiB
    BAR1 Memory Usage
        Total                             : 131072 MiB
        Used                              : 1 MiB
    Compute Mode                          : {values["mode"]}
    Utilization
        Gpu                               : {values["use"]}
        Memory                            : 0 %
    ECC Mode
        Current                           : Enabled
        Pending                           : Enabled
    ECC Errors
        Volatile
            SRAM Correctable              : 3
            SRAM Uncorrectable            : {values["sram"]}
            DRAM Correctable              : 5
            DRAM Uncorrectable            : {values["dram"]}
        Aggregate
            SRAM Uncorrectable            : 0
            DRAM Uncorrectable            : {values["dram_ever"]}
    Retired Pages
        Single Bit ECC                    : N/A
        Pending Page Blacklist            : {values["blacklist"]}
    Remapped Rows
        Correctable Error                 : 2
        Uncorrectable Error               : {values["remapped"]}
        Pending                           : {values["pending"]}
        Remapping Failure Occurred        : {values["failed"]}
    Temperature
        GPU Current Temp                  : 34 C
        GPU Shutdown Temp                 : 92 C
    Fabric
        State                             : {values["state"]}
        Status                            : {values["status"]}
    Processes
        GPU instance ID                   : N/A
        Process ID                        : 4711
            Type                          : C
"""


def _gpu(text: str) -> GpuFacts:
    gpus = facts_from_text(text).facts.gpus
    assert gpus is not None
    (gpu,) = gpus
    return gpu


def _named(facts: Facts) -> tuple[str, str]:
    cause = diagnose(facts).root_cause
    return (cause.id, cause.status) if cause else ("none", "ok")


def test_every_section_is_read() -> None:
    read = facts_from_text(_query()).facts
    assert read.driver is not None
    assert (read.driver.version, read.driver.cuda) == ("550.90.07", "12.4")
    assert _gpu(_query()) == GpuFacts(
        index=0,
        name="NVIDIA A100-SXM4-80GB",
        uuid="GPU-01234567-89ab-cdef-0123-456789abcdef",
        pci_bus_id="00000000:3B:00.0",
        memory_total_bytes=81920 * MIB,
        memory_used_bytes=7 * MIB,
        bar1_total_bytes=131072 * MIB,
        pcie_gen=4,
        pcie_gen_max=4,
        pcie_width=16,
        pcie_width_max=16,
        ecc_enabled=True,
        ecc_uncorrectable=0,
        ecc_uncorrectable_total=0,
        remapped_rows_uncorrectable=0,
        remap_pending=False,
        remap_failed=False,
        throttle_reasons=(),
        compute_mode="default",
        mig_enabled=False,
        persistence=True,
        utilization_percent=0,
        temperature_c=34,
        process_count=1,
        fabric_state="Completed Success",
    )


def test_a_healthy_query_fails_nothing() -> None:
    assert _named(facts_from_text(_query()).facts) == ("none", "ok")
    assert _named(facts_from_text(_query(dram_ever="4", remapped="1")).facts) == ("none", "ok")


@pytest.mark.parametrize(
    ("changes", "cause", "status"),
    [
        ({"width": "8x"}, "pcie-link-degraded", "warn"),
        ({"generation": "1", "use": "97 %"}, "pcie-link-degraded", "warn"),
        ({"thermal": "Active"}, "gpu-throttled", "warn"),
        ({"brake": "Active"}, "gpu-throttled", "warn"),
        ({"sram": "1"}, "gpu-ecc-error", "fail"),
        ({"dram": "2"}, "gpu-ecc-error", "fail"),
        ({"failed": "Yes"}, "gpu-ecc-error", "fail"),
        ({"pending": "Yes"}, "gpu-ecc-error", "warn"),
        ({"blacklist": "Yes"}, "gpu-ecc-error", "warn"),
        ({"mode": "Exclusive_Process"}, "exclusive-compute-mode", "fail"),
        ({"mode": "Prohibited"}, "exclusive-compute-mode", "fail"),
        ({"state": "In Progress", "status": "N/A"}, "fabricmanager-not-running", "fail"),
    ],
)
def test_what_a_section_says_is_found(changes: dict[str, str], cause: str, status: str) -> None:
    assert _named(facts_from_text(_query(**changes)).facts) == (cause, status)


@pytest.mark.parametrize(
    "dress",
    [
        report_forms.quoted,
        report_forms.windows,
        report_forms.coloured,
        report_forms.indented,
        report_forms.fenced,
    ],
)
def test_in_other_clothes(dress: cases.Disguise) -> None:
    assert _gpu(dress(_query(width="8x"))) == _gpu(_query(width="8x"))


def test_two_gpus_keep_apart() -> None:
    second = _query(dram="7").split("Attached GPUs")[1].split("\n", 1)[1].replace("3B:00.0", "5E:00.0")
    gpus = facts_from_text(_query() + second).facts.gpus
    assert gpus is not None
    assert [(gpu.pci_bus_id, gpu.ecc_uncorrectable) for gpu in gpus] == [
        ("00000000:3B:00.0", 0),
        ("00000000:5E:00.0", 7),
    ]


def test_what_follows_the_query_is_read_as_before() -> None:
    text = _query() + "\nRuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    assert _named(facts_from_text(text).facts) == ("gpu-ecc-error", "fail")
    trace = _query() + "    RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    assert _named(facts_from_text(trace).facts) == ("gpu-ecc-error", "fail")


def test_slices_of_a_gpu_are_counted() -> None:
    text = _query(mig="Enabled").replace(
        "    GPU UUID",
        "    MIG Device\n        Index                             : 0\n"
        "    MIG Device\n        Index                             : 1\n    GPU UUID",
        1,
    )
    assert _gpu(text).mig_uuids == ("MIG device 0", "MIG device 1")
    assert _named(facts_from_text(text + "\nDDP over both fails.").facts) == ("mig-single-device", "fail")
