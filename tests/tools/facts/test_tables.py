"""Questions to the fact tables."""

from __future__ import annotations

import doctest

import pytest

from phalanx.tools.facts import tables, versions
from phalanx.tools.facts.tables import (
    architectures_of_build,
    best_variant,
    capability_of_gpu,
    code_for,
    companion_of,
    cuda_of_driver,
    driver_for_cuda,
    driver_runs_cuda,
    gcc_bounds,
    gpu_by_name,
    is_geforce,
    table,
    torch_of_companion,
    variables,
    xid,
)


@pytest.mark.parametrize("module", [tables, versions])
def test_examples(module: object) -> None:
    failed, tried = doctest.testmod(module)  # type: ignore[arg-type]
    assert tried
    assert not failed


@pytest.mark.parametrize(
    ("cuda", "system", "driver"),
    [
        ("13.2", "linux", "580.65.06"), ("12.9", "linux", "525.60.13"), ("12.0", "windows", "527.41"), ("11.8", "linux", "450.80.02"),
        ("11.0", "linux", "450.36.06"), ("10.1.243", "linux", "418.39"), ("9.0", "linux", "384.81"), ("13.0", "windows", "580"),
    ],
)  # fmt: skip
def test_lowest_driver(cuda: str, system: str, driver: str) -> None:
    need = driver_for_cuda(cuda, system)
    assert need is not None
    assert need.version == driver


@pytest.mark.parametrize(
    ("driver", "reported", "cuda", "runs"),
    [
        ("535.54.03", None, "12.4", True), ("470.82.01", None, "12.1", False), ("470.82.01", None, "11.8", True), ("440.33.01", None, "10.2", True),
        ("418.67", "10.1", "10.2", False), (None, "11.0", "12.1", False), (None, "12.2", "12.8", True), (None, None, "12.1", None), ("525", None, "12.1", True),
    ],
)  # fmt: skip
def test_a_driver_and_a_build(driver: str | None, reported: str | None, cuda: str, runs: bool | None) -> None:
    assert driver_runs_cuda(driver, reported, cuda) is runs


@pytest.mark.parametrize(
    ("listed", "capability", "code"),
    [
        (["sm_120"], "12.1", "sm_120"), (["sm_100"], "10.3", "sm_100"), (["sm_90a"], "9.0", "sm_90a"), (["sm_100a"], "10.3", None), (["sm_100f"], "10.3", "sm_100f"),
        (["sm_80", "sm_86"], "8.9", "sm_86"), (["sm_80"], "8.7", None), (["sm_87"], "8.7", "sm_87"), (["sm_90"], "10.0", None), (["compute_90"], "12.0", "compute_90"),
        (["sm_50"], "5.3", None), (["nonsense", ""], "8.0", None), (["sm_75", "compute_75"], "7.5", "sm_75"),
    ],
)  # fmt: skip
def test_code_for_a_gpu(listed: list[str], capability: str, code: str | None) -> None:
    assert code_for(listed, capability) == code


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA GeForce RTX 5090 D", "12.0"), ("NVIDIA GeForce RTX 3080 Laptop GPU", "8.6"), ("Quadro RTX 6000", "7.5"), ("NVIDIA RTX 6000 Ada Generation", "8.9"),
        ("GeForce GTX 1660 SUPER", "7.5"), ("GeForce 940MX", "5.0"), ("GeForce GTX TITAN X", "5.2"), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "9.0"), ("Orin (nvgpu)", "8.7"),
        ("NVIDIA RTX A4500", "8.6"), ("Tesla K40m", "3.5"), ("NVIDIA GB200", "10.0"), ("AMD Instinct MI300X", None), ("a word", None),
    ],
)  # fmt: skip
def test_capability_by_name(name: str, capability: str | None) -> None:
    assert capability_of_gpu(name) == capability


def test_every_product_of_the_table_is_found_by_its_name() -> None:
    for row in table("gpus")["gpus"]:
        assert capability_of_gpu(row["name"]) == row["compute_capability"], row["name"]
        assert gpu_by_name(row["name"].removeprefix("NVIDIA ")) is not None, row["name"]
        assert is_geforce(row["name"]) == (row["class"] == "geforce" or "TITAN" in row["name"]), row["name"]


def test_companions() -> None:
    pair = companion_of("torchvision", "2.14.1")
    assert pair is not None
    assert pair.stable_from == "2.14.0"
    assert companion_of("torchvision", "1.3.1") == tables.Companion(("0.4.2",))
    assert companion_of("torchvision", "9.9.9") is None
    assert torch_of_companion("torchvision", "0.16.2+cu121") == "2.1.2"


def test_builds_variables_codes_and_compilers() -> None:
    build = architectures_of_build("2.7.1+cu128", "12.8")
    assert build is not None
    assert "sm_120" in build.architectures
    assert architectures_of_build("2.8.0a0+34c6371d24.nv25.08", "13.0") is None
    assert best_variant("2.6.0", "470.82.01", None) == "cu118"
    assert best_variant("2.6.0", "390.48", None) is None
    assert cuda_of_driver("575.51.03") == "12.9"
    assert variables()["NCCL_MAX_NRINGS"]["replaced_by"] == "NCCL_MAX_NCHANNELS"
    assert "MV2_COMM_WORLD_LOCAL_RANK" in variables()
    fallen = xid(79)
    assert fallen is not None
    assert fallen["severity"] == "fatal"
    assert xid(-1) is None
    assert gcc_bounds("12.4.131") == (6, 13)
