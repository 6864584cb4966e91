"""A rank's device where CUDA shows it in odd ways; CUDA is played by replaced functions."""

from __future__ import annotations

import os
import types
from typing import Any

import pytest
import torch

from phalanx.dist import device_selection, rank_device
from phalanx.dist.device_selection import verify_selection
from phalanx.dist.gpus import Gpu
from phalanx.dist.rank_device import choose_device, gpu_identity, physical_gpu
from phalanx.dist.rendezvous import refuse_differences
from phalanx.dist.visibility import VisibleDevices

A, B = "GPU-aaaaaaaa-1111-2222-3333-444444444444", "GPU-bbbbbbbb-1111-2222-3333-444444444444"
MIG_1, MIG_2 = "MIG-11111111-2222-3333-4444-555555555555", "MIG-99999999-2222-3333-4444-555555555555"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CUDA that shows GPUs with these UUIDs and buses."""

    def show(*devices: tuple[str, int]) -> None:
        def properties(index: int | None) -> Any:
            uuid, bus = devices[index or 0]
            known = {"pci_domain_id": 0, "pci_bus_id": bus, "pci_device_id": 0}
            return types.SimpleNamespace(**known, **({"uuid": uuid.removeprefix("GPU-")} if uuid else {}))

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(device_selection, "cuda_device_count_if_started", lambda: None)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return show


INVENTORY = [Gpu(0, B, "00000000:07:00.0", "slow"), Gpu(1, A, "00000000:0A:00.0", "fast")]


def test_the_physical_number_is_found_by_what_the_gpu_is(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.dist.devices.nvml_inventory", lambda: INVENTORY)
    cuda((A, 0x0A), (B, 0x07))  # CUDA counts from the fastest
    assert physical_gpu(0) == f"physical 1 (00000000:0A:00.0, {A})"
    assert physical_gpu(1) == f"physical 0 (00000000:07:00.0, {B})"
    cuda(("", 0x07))  # a torch that knows no UUIDs: by bus
    assert physical_gpu(0) == f"physical 0 (00000000:07:00.0, {B})"
    monkeypatch.setattr("phalanx.dist.devices.nvml_inventory", lambda: None)
    cuda((A, 0x0A))
    assert physical_gpu(0) == f"physical unknown ({A})"


def test_each_rank_takes_its_own_mig_instance(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.dist.visibility.nvml_inventory", lambda: None)
    identities = []
    for rank in range(2):
        cuda((A, 1))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{MIG_1},{MIG_2}")
        with pytest.warns(
            UserWarning, match=f"local rank {rank} takes MIG-.* as cuda:0.*not generally supported"
        ):
            assert choose_device(rank, 2, None, None) == torch.device("cuda", 0)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == (MIG_1, MIG_2)[rank]
        identities.append(gpu_identity(0))
    assert identities == [MIG_1, MIG_2]
    # Two instances of one GPU are no shared GPU, though CUDA may report the GPU's UUID for both.
    refuse_differences([{"backend": "nccl", "gpu": identity} for identity in identities], 2)


def test_too_few_instances(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.dist.visibility.nvml_inventory", lambda: None)
    cuda((A, 1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{MIG_1},{MIG_2}")
    with pytest.raises(ValueError, match="2 MIG instances for 3 ranks"):
        choose_device(2, 3, None, None)


def test_what_cuda_shows_is_compared_with_what_was_chosen(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_selection, "_selected", VisibleDevices((1,), uuids=(A,)))
    cuda((A, 1))
    assert choose_device(0, 1, None, None) == torch.device("cuda", 0)
    cuda((B, 1))
    with pytest.raises(RuntimeError, match=f"select_devices chose {A}, but CUDA shows {B}"):
        choose_device(0, 1, None, None)
    verify_selection([""])  # a torch that does not say
    with pytest.raises(RuntimeError, match="it was changed, or CUDA had read it before"):
        verify_selection([A, B])


def test_nothing_chosen_is_nothing_to_compare(cuda: Any) -> None:
    assert device_selection._selected is None
    verify_selection([B])
    assert rank_device.gpu_uuid(0) == "" or torch.cuda.is_available()
