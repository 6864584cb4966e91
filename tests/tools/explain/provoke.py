"""Faults made for real: each function here fails as a training script would, in a process of its own.

    python -m tests.tools.explain.provoke FOLDER [NAME..]

imports torch once and forks one process (or one per rank) for each fault; what it prints goes to
``FOLDER/NAME/rank-R.log``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LIMIT_S = 40
AT_ONCE = 4


@dataclass(frozen=True)
class Fault:
    """A function that fails, and the diagnosis that is right; ``rank`` is the one that fails first."""

    run: Callable[[], Any]
    id: str
    ranks: int = 1
    rank: int | None = None
    among: int = 1  # the right one must be among the first so many


FAULTS: dict[str, Fault] = {}


def fault(id: str, *, ranks: int = 1, rank: int | None = None, among: int = 1) -> Callable[..., Any]:
    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        FAULTS[function.__name__] = Fault(function, id, ranks, rank, among)
        return function

    return register


def _group(timeout_s: float = 20.0) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    return dist


def _net() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


# --------------------------------------------------------------------------- training


@fault("label-out-of-range")
def label() -> None:
    import torch

    torch.nn.functional.cross_entropy(torch.randn(4, 3), torch.tensor([0, 1, 2, 7]))


@fault("label-out-of-range")
def label_negative() -> None:
    import torch

    torch.nn.functional.nll_loss(torch.randn(2, 3), torch.tensor([-1, 0]))


@fault("label-out-of-range")
def one_hot() -> None:
    import torch

    torch.nn.functional.one_hot(torch.tensor([5]), num_classes=3)


@fault("index-out-of-bounds")
def embedding() -> None:
    import torch

    torch.nn.Embedding(3, 2)(torch.tensor([3]))


@fault("index-out-of-bounds")
def index() -> None:
    import torch

    torch.zeros(3)[torch.tensor([10])]


@fault("index-out-of-bounds")
def gather() -> None:
    import torch

    torch.zeros(2, 3).gather(1, torch.tensor([[4], [0]]))


@fault("bce-input-out-of-range")
def bce() -> None:
    import torch

    torch.nn.functional.binary_cross_entropy(torch.tensor([1.5]), torch.tensor([1.0]))


@fault("batchnorm-batch-of-one")
def batch_norm() -> None:
    import torch

    torch.nn.BatchNorm1d(3)(torch.randn(1, 3))


@fault("inplace-operation")
def inplace() -> None:
    import torch

    x = torch.ones(2, 2, requires_grad=True)
    y = torch.sigmoid(x)
    y += 1
    y.sum().backward()


@fault("backward-twice")
def backward_twice() -> None:
    import torch

    loss = (torch.ones(2, requires_grad=True) ** 2).sum()
    loss.backward()
    loss.backward()


@fault("loss-without-grad")
def without_grad() -> None:
    import torch

    torch.ones(2).sum().backward()


@fault("checkpointing-without-input-grads")
def checkpointing() -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    net = _net()
    warnings.simplefilter("always")
    checkpoint(net, torch.randn(2, 4), use_reentrant=True).sum().backward()


@fault("shape-mismatch")
def shapes() -> None:
    import torch

    torch.nn.Linear(4, 3)(torch.randn(2, 5))


@fault("shape-mismatch")
def broadcast() -> None:
    import torch

    torch.ones(3) + torch.ones(4)


@fault("dtype-mismatch")
def dtypes() -> None:
    import torch

    torch.nn.Linear(4, 3)(torch.randn(2, 4, dtype=torch.float64))


@fault("device-mismatch")
def devices() -> None:
    import torch

    torch.nn.Linear(2, 2)(torch.ones(2, 2, device="meta"))


@fault("fp16-gradients-unscaled")
def unscaled() -> None:
    import torch

    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(torch.optim.SGD([weight], lr=0.1))


@fault("nan-loss")
def nan() -> None:
    import torch

    with torch.autograd.detect_anomaly():
        torch.sqrt(torch.zeros(1, requires_grad=True) * -1).mul(0).sum().backward()


# --------------------------------------------------------------------------- data


class _Rows:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return row() if callable(row) else row


def _load(rows: list[Any], **options: Any) -> None:
    from torch.utils.data import DataLoader

    for _ in DataLoader(_Rows(rows), **options):  # type: ignore[arg-type]
        pass


@fault("collate-size-mismatch")
def collate_sizes() -> None:
    import torch

    _load([torch.ones(3), torch.ones(4)], batch_size=2)


@fault("collate-size-mismatch")
def collate_sizes_in_a_worker() -> None:
    import torch

    _load([torch.ones(3), torch.ones(4)], batch_size=2, num_workers=1)


@fault("collate-size-mismatch")
def collate_lists() -> None:
    _load([[1, 2], [1]], batch_size=2)


@fault("collate-unsupported-type")
def collate_none() -> None:
    _load([None, None], batch_size=2)


@fault("file-not-found")
def missing_file_in_a_worker() -> None:
    _load([lambda: open("data/0001.jpg")], num_workers=1)  # noqa: SIM115


@fault("worker-segfault")
def segfault_in_a_worker() -> None:
    import ctypes

    _load([lambda: ctypes.string_at(0)], num_workers=1)


@fault("worker-segfault")
def abort_in_a_worker() -> None:
    _load([os.abort], num_workers=1)


@fault("host-oom-kill")
def killed_worker() -> None:
    _load([lambda: os.kill(os.getpid(), signal.SIGKILL)], num_workers=1)


@fault("shm-too-small")
def bus_error_in_a_worker() -> None:
    _load([_touch_beyond_the_end], num_workers=1)


def _touch_beyond_the_end() -> int:
    """What a full /dev/shm does: a page of a mapping that has no memory behind it."""
    import mmap

    with open("page", "w+b") as file:
        file.truncate(mmap.PAGESIZE)
        pages = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        return pages[0]


@fault("worker-killed")
def worker_that_exits() -> None:
    _load([lambda: os._exit(3)], num_workers=1)


@fault("dataloader-timeout")
def slow_worker() -> None:
    _load([lambda: time.sleep(30)], num_workers=1, timeout=1)


@fault("empty-dataset")
def empty() -> None:
    _load([], shuffle=True)


@fault("too-many-open-files")
def open_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = [open(os.devnull) for _ in range(100)]  # noqa: SIM115
    assert kept


@fault("disk-full")
def full_disk() -> None:
    with open("/dev/full", "wb") as file:
        file.write(b"x" * 10_000_000)


@fault("disk-full")
def full_disk_for_a_checkpoint() -> None:
    import torch

    torch.save(torch.ones(1_000_000), "/dev/full")


@fault("host-out-of-memory")
def host_memory() -> None:
    import torch

    torch.ones(1 << 45)


@fault("host-out-of-memory")
def host_memory_in_numpy() -> None:
    import numpy

    numpy.ones((1 << 46,))


@fault("host-oom-kill")
def killed_by_signal_9() -> None:
    subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], check=True)


@fault("segfault")
def segfault() -> None:
    import ctypes
    import faulthandler

    faulthandler.enable()
    ctypes.string_at(0)


# --------------------------------------------------------------------------- checkpoints


@fault("state-dict-module-prefix")
def module_prefix() -> None:
    _net().load_state_dict({f"module.{key}": value for key, value in _net().state_dict().items()})


@fault("state-dict-module-prefix")
def module_prefix_of_the_model() -> None:
    from torch import nn

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = _net()

    Wrapped().load_state_dict(_net().state_dict())


@fault("state-dict-module-prefix")
def compiled_prefix() -> None:
    _net().load_state_dict({f"_orig_mod.{key}": value for key, value in _net().state_dict().items()})


@fault("state-dict-keys")
def other_model() -> None:
    from torch import nn

    _net().load_state_dict(nn.Conv2d(1, 1, 1).state_dict())


@fault("state-dict-size-mismatch")
def other_size() -> None:
    from torch import nn

    nn.Linear(4, 10).load_state_dict(nn.Linear(4, 1000).state_dict())


@fault("optimizer-state-mismatch")
def other_optimizer() -> None:
    import torch

    nets = _net(), torch.nn.Linear(2, 2)
    first, second = (torch.optim.SGD(net.parameters(), lr=0.1) for net in nets)
    second.load_state_dict(first.state_dict())


@fault("torch-load-weights-only")
def weights_only() -> None:
    import torch

    torch.save({"rows": _Rows([])}, "model.pt")
    torch.load("model.pt")


def _damaged(cut: float | None, head: bytes = b"", **options: Any) -> None:
    import torch

    torch.save({"weight": torch.ones(1000)}, "model.pt", **options)
    data = Path("model.pt").read_bytes()
    Path("model.pt").write_bytes(head or data[: int(len(data) * (cut or 0))])
    torch.load("model.pt")


@fault("checkpoint-corrupted")
def half_a_checkpoint() -> None:
    _damaged(0.5)


@fault("checkpoint-corrupted")
def empty_checkpoint() -> None:
    _damaged(0.0)


@fault("checkpoint-corrupted")
def half_a_legacy_checkpoint() -> None:
    _damaged(0.9, _use_new_zipfile_serialization=False)


@fault("checkpoint-corrupted")
def pointer_instead_of_a_checkpoint() -> None:
    _damaged(None, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")


@fault("checkpoint-corrupted")
def page_instead_of_a_checkpoint() -> None:
    _damaged(None, b"<!DOCTYPE html><html><body>Sign in</body></html>\n")


@fault("checkpoint-corrupted")
def half_a_safetensors_file() -> None:
    import torch
    from safetensors.torch import load_file, save_file

    save_file({"weight": torch.ones(1000)}, "model.safetensors")
    data = Path("model.safetensors").read_bytes()
    Path("model.safetensors").write_bytes(data[:-100])
    load_file("model.safetensors")


@fault("checkpoint-map-location")
def checkpoint_of_a_gpu() -> None:
    import torch

    torch.serialization.location_tag = lambda storage: "cuda:0"  # type: ignore[assignment]
    torch.save(torch.ones(2), "model.pt")
    torch.load("model.pt")


# --------------------------------------------------------------------------- starting


@fault("process-group-not-initialized")
def no_group() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))


@fault("process-group-not-initialized")
def no_group_for_ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    DistributedDataParallel(_net())


@fault("process-group-initialized-twice")
def group_twice() -> None:
    _group()
    _group()


@fault("launcher-env-missing")
def no_launcher() -> None:
    import torch.distributed as dist

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    dist.init_process_group("gloo")


@fault("launcher-env-missing")
def no_local_rank() -> None:
    del os.environ["LOCAL_RANK"]
    int(os.environ["LOCAL_RANK"])


@fault("local-rank-argument")
def local_rank_argument() -> None:
    import argparse

    argparse.ArgumentParser(prog="train.py").parse_args(["--local-rank=0"])


@fault("local-rank-argument")
def local_rank_argument_required() -> None:
    import argparse

    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--local_rank", required=True)
    parser.parse_args([])


@fault("arguments-refused")
def refused_argument() -> None:
    import argparse

    argparse.ArgumentParser(prog="train.py").parse_args(["--epoch", "3"])


@fault("main-guard-missing")
def no_main_guard() -> None:
    Path("script.py").write_text(
        "import multiprocessing\np = multiprocessing.get_context('spawn').Process(target=print)\np.start()\np.join()\n"
    )
    subprocess.run([sys.executable, "script.py"], check=False)


@fault("unpicklable-worker-object")
def local_function() -> None:
    import multiprocessing

    def work() -> None: ...

    multiprocessing.get_context("spawn").Process(target=work).start()


@fault("cuda-in-forked-worker")
def cuda_after_fork() -> None:
    import torch

    torch.cuda._is_in_bad_fork = lambda: True
    torch.cuda.init()


@fault("container-without-gpus")
def no_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        raise RuntimeError("No CUDA GPUs are available")
    torch.ones(1).cuda()


@fault("nccl-without-gpu")
def nccl_without_gpu() -> None:
    import torch.distributed as dist

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    dist.init_process_group("nccl")


@fault("port-in-use")
def taken_port() -> None:
    import torch.distributed as dist

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        dist.TCPStore("localhost", taken.getsockname()[1], is_master=True)


def _closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@fault("rendezvous-timeout")
def nobody_listens() -> None:
    import torch.distributed as dist

    dist.TCPStore("127.0.0.1", _closed_port(), is_master=False, timeout=timedelta(seconds=1))


@fault("rendezvous-timeout")
def a_node_never_comes() -> None:
    import torch.distributed as dist

    dist.TCPStore("127.0.0.1", _closed_port(), 2, is_master=True, timeout=timedelta(seconds=1))


@fault("hostname-not-resolved")
def unknown_host() -> None:
    import torch.distributed as dist

    dist.TCPStore("node7.invalid", 29500, is_master=False, timeout=timedelta(seconds=1))


@fault("nccl-socket-ifname-wrong")
def no_interface() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth9"
    _group()


@fault("nccl-socket-ifname-wrong")
def no_interface_left_out() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "^docker0"
    _group()


# --------------------------------------------------------------------------- Python, builds, libraries


@fault("missing-module")
def missing_module() -> None:
    import apex_that_is_not_there  # type: ignore[import-not-found]  # noqa: F401


@fault("import-error")
def missing_name() -> None:
    from json import lodas  # type: ignore[attr-defined]  # noqa: F401


@fault("file-not-found")
def missing_file() -> None:
    Path("data/train.csv").read_text()


@fault("file-not-found")
def missing_script() -> None:
    subprocess.run([sys.executable, "tarin.py"], check=False)


@fault("permission-denied")
def forbidden_file() -> None:
    Path("secret").touch(0o600)
    if os.geteuid() == 0:
        os.chmod(".", 0o755)
        os.seteuid(65534)
    else:
        os.chmod("secret", 0)
    Path("secret").read_text()


@fault("file-exists")
def existing_folder() -> None:
    os.mkdir("out")
    os.mkdir("out")


@fault("syntax-error")
def syntax() -> None:
    Path("script.py").write_text("def main(:\n    pass\n")
    subprocess.run([sys.executable, "script.py"], check=False)


@fault("recursion-limit")
def recursion() -> None:
    recursion()


@fault("download-failed")
def download() -> None:
    from urllib.request import urlopen

    urlopen("http://data.invalid/model.bin", timeout=2)


@fault("cuda-home-missing")
def no_toolkit() -> None:
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = None
    cpp_extension.include_paths("cuda")


@fault("ninja-missing")
def no_ninja() -> None:
    from torch.utils.cpp_extension import verify_ninja_availability

    os.environ["PATH"] = ""
    verify_ninja_availability()


@fault("cuda-libs-not-installed")
def no_cublas() -> None:
    import ctypes

    ctypes.CDLL("libcublas.so.7")


@fault("cudnn-library-not-found")
def no_cudnn() -> None:
    import ctypes

    ctypes.CDLL("libcudnn.so.5")


if find_spec("deepspeed") is not None:

    @fault("deepspeed-batch-size")
    def batch_sizes() -> None:
        from deepspeed.runtime.config import DeepSpeedConfig

        DeepSpeedConfig(
            {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
        )


@fault("unknown")
def an_error_of_the_scripts_own() -> None:
    raise ValueError("the moon is in the wrong phase")


# --------------------------------------------------------------------------- several ranks


def _ddp(net: Any, **options: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(net, **options)


@fault("ddp-unused-parameters", ranks=2)
def unused_parameters() -> None:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.used(x)

    _group()
    net = _ddp(Net())
    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()


@fault("ddp-param-ready-twice", ranks=2)
def ready_twice() -> None:
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            x = checkpoint(self.layer, x, use_reentrant=True)
            return checkpoint(self.layer, x, use_reentrant=True)

    _group()
    net = _ddp(Net(), find_unused_parameters=True)
    net(torch.ones(1, 2, requires_grad=True)).sum().backward()


@fault("ddp-inplace-buffer", ranks=2)
def buffer_between_two_forwards() -> None:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Any) -> Any:
            return self.layer(x) * self.scale

    _group()
    net = _ddp(Net())
    first = net(torch.ones(2, 4)).sum()
    net.module.scale.add_(0)  # its version, as the broadcast of buffers raised it until torch 2.12
    (first + net(torch.ones(2, 4)).sum()).backward()


@fault("ddp-model-mismatch", ranks=2)
def other_layer_on_rank_1() -> None:
    from torch import nn

    dist = _group()
    _ddp(nn.Linear(4, 2 + dist.get_rank()))


@fault("ddp-model-mismatch", ranks=2)
def more_layers_on_rank_1() -> None:
    from torch import nn

    dist = _group()
    _ddp(nn.Sequential(*[nn.Linear(4, 4) for _ in range(1 + dist.get_rank())]))


@fault("label-out-of-range", ranks=2, rank=1)
def label_on_rank_1() -> None:
    import torch

    dist = _group()
    if dist.get_rank() == 1:
        label()
    dist.all_reduce(torch.ones(1))


@fault("unknown", ranks=2, rank=1)
def own_error_on_rank_1() -> None:
    import torch

    dist = _group()
    if dist.get_rank() == 1:
        raise ValueError("the moon is in the wrong phase")
    dist.all_reduce(torch.ones(1))


@fault("collective-mismatch", ranks=2)
def other_collective_in_debug_mode() -> None:
    import torch

    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    import torch.distributed

    torch.distributed.set_debug_level_from_env()
    dist = _group()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), 0)


@fault("collective-mismatch", ranks=2)
def other_sizes() -> None:
    import torch

    dist = _group(5)
    dist.broadcast(torch.ones(8 if dist.get_rank() == 0 else 4), 0)
    dist.barrier()


@fault("collective-mismatch", ranks=2)
def other_sizes_under_the_audit() -> None:
    import torch

    from phalanx.dist import audit_collectives, init_world

    world = init_world("gloo")
    audit_collectives(3)
    import torch.distributed as dist

    dist.all_reduce(torch.ones(4 - world.rank))


@fault("nccl-timeout-slow-rank0", ranks=2)
def slow_rank_0() -> None:
    dist = _group(1)
    if dist.get_rank() == 0:
        print("Running tokenizer on dataset: 3% 30/1000 [00:01<00:40]", flush=True)
        time.sleep(4)
    _rank_zero_first(dist)


def _rank_zero_first(dist: Any) -> None:
    dist.barrier()


@fault("nccl-timeout-during-save", ranks=2)
def save_on_rank_0_only() -> None:
    dist = _group(1)
    if dist.get_rank() == 0:
        time.sleep(4)
    else:
        save_checkpoint(dist)


def save_checkpoint(dist: Any) -> None:
    """Every rank must call it."""
    dist.barrier()


@fault("nccl-timeout-uneven-ranks", ranks=2)
def monitored_barrier() -> None:
    dist = _group(10)
    if dist.get_rank() == 0:
        dist.monitored_barrier(timeout=timedelta(seconds=1))
    else:
        time.sleep(3)


@fault("stale-rendezvous-file", ranks=2)
def stale_file() -> None:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    store = Path("..", "stale-store").resolve()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    if rank == 1:
        time.sleep(2)  # the other rank has read what an earlier run left
        print("init_method file://" + str(store))
        return
    first = dist.FileStore(str(store), 2)
    first.add("worker", 1)
    print(f"connecting through file://{store}", flush=True)
    dist.init_process_group("gloo", f"file://{store}", rank=0, world_size=2, timeout=timedelta(seconds=1))


@fault("fsdp-mixed-params")
def mixed_unit() -> None:
    import torch
    from torch import nn
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    FlatParamHandle._validate_tensors_to_flatten(  # the check that wrapping starts with; wrapping needs a GPU
        type("Handle", (), {"_use_orig_params": False})(),  # type: ignore[arg-type]
        [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))],
    )


# --------------------------------------------------------------------------- running them


def _child(fault: Fault, folder: Path, rank: int, port: int) -> None:
    """Becomes one rank of a fault; does not return."""
    signal.alarm(LIMIT_S)
    os.setsid()
    work = folder / f"work-{rank}"
    work.mkdir()
    os.chdir(work)
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(fault.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        CUDA_VISIBLE_DEVICES="",
    )
    code = 0
    try:
        fault.run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.killpg(0, signal.SIGKILL) if code < 0 else os._exit(code)


def _free_port() -> int:
    return _closed_port()


def main() -> None:
    """Make the faults, a few at a time."""
    folder = Path(sys.argv[1])
    names = sys.argv[2:] or list(FAULTS)
    import torch
    import torch.distributed
    import torch.nn.parallel
    import torch.utils.checkpoint
    import torch.utils.data  # noqa: F401

    running: dict[int, str] = {}

    def wait() -> None:
        pid, _ = os.wait()
        running.pop(pid, None)

    for name in names:
        fault, place = FAULTS[name], folder / name
        place.mkdir(parents=True)
        port = _free_port()
        for rank in range(fault.ranks):
            pid = os.fork()
            if pid == 0:
                _child(fault, place, rank, port)
            running[pid] = name
        while len(running) >= AT_ONCE:
            wait()
    while running:
        wait()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.argv.append(tempfile.mkdtemp())
    main()
