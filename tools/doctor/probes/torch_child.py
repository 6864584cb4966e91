"""What imports torch: the text of this file runs as ``python -c`` in a process of its own, without phalanx.

It writes one JSON object a line as it goes, so that a crash keeps what came before. Standard output is the
answer; what imports print goes to stderr.
"""

from __future__ import annotations

import ctypes
import glob
import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import time
import types
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

ANSWER = 1

# Extensions that are built against one torch, by package: a library that was built for another has
# symbols that nobody defines.
EXTENSIONS = (
    "flash_attn_2_cuda",
    "flash_attn_3._C",
    "amp_C",
    "apex_C",
    "xformers",
    "torch_scatter",
    "torch_sparse",
    "torch_cluster",
    "pyg_lib",
    "mmcv._ext",
    "detectron2._C",
    "vllm._C",
    "causal_conv1d_cuda",
    "selective_scan_cuda",
    "transformer_engine_torch",
)
LIBRARIES = [
    "cudnn",
    "cublas",
    "cudart",
    "nccl",
    "cuda",
    "nvrtc",
    "cusparse",
    "cufft",
    "curand",
    "cusolver",
    "nvJitLink",
    "nvshmem",
    "nvidia-ml",
    "stdc++",
    "mkl",
    "iomp5",
    "gomp",
    "omp",
    "c10",
    "torch",
    "mpi",
    "rccl",
    "MIOpen",
    "amdhip64",
]


def tell(**facts: Any) -> None:
    os.write(ANSWER, json.dumps(facts).encode() + b"\n")


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, None when it raises."""
    try:
        return function(*args)
    except Exception:
        return None


def import_torch() -> Any:
    start = time.perf_counter()
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name == "torch":
            tell(torch={"installed": False, "error": words(error)})
        else:
            tell(torch={"installed": True, "error": words(error)})
        return None
    except BaseException as error:
        tell(torch={"installed": True, "error": words(error), "file": place_of("torch")})
        return None
    if not hasattr(torch, "__version__") or getattr(torch, "__file__", None) is None:
        # A folder named torch without __init__.py: Python takes it for a package of its own.
        where = list(getattr(torch, "__path__", []))
        tell(
            torch={
                "installed": False,
                "error": f"the name torch is taken by {where or torch!r}, which is not PyTorch",
            }
        )
        return None
    tell(torch={"installed": True, "import_s": time.perf_counter() - start, **built(torch)})
    return torch


def place_of(name: str) -> str | None:
    spec = attempt(importlib.util.find_spec, name)
    return getattr(spec, "origin", None)


def built(torch: Any) -> dict[str, Any]:
    """What torch was built with and for."""
    version = getattr(torch, "version", None)
    flags = attempt(lambda: torch._C._cuda_getArchFlags())
    nccl = attempt(lambda: torch.cuda.nccl.version())
    found = {
        "version": str(torch.__version__),
        "cuda": getattr(version, "cuda", None) or "",
        "hip": getattr(version, "hip", None) or "",
        "git": getattr(version, "git_version", None),
        "file": torch.__file__,
        "arch_list": flags.split() if flags else attempt(lambda: torch.cuda.get_arch_list()),
        "cxx11_abi": attempt(lambda: bool(torch._C._GLIBCXX_USE_CXX11_ABI)),
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else None,
        "nccl_built": attempt(lambda: bool(torch.distributed.is_nccl_available())),
        "cudnn": dotted(attempt(lambda: torch._C._cudnn.getCompileVersion())),
    }
    return {name: value for name, value in found.items() if value is not None}


def dotted(cudnn: Any) -> str | None:
    """cuDNN's versions as they come: (9, 10, 2), 91002 or 8902."""
    if isinstance(cudnn, (tuple, list)):
        return ".".join(map(str, cudnn))
    return str(cudnn) if cudnn else None


def ask_numpy(torch: Any) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            torch.zeros(1).numpy()
            works, error = True, None
        except Exception as exception:
            works, error = False, words(exception)
    messages = [str(item.message) for item in said] + ([error] if error else [])
    has_numpy = importlib.util.find_spec("numpy") is not None
    tell(torch={"numpy_works": works} if has_numpy else {}, messages=messages)


def ask_mapped() -> None:
    """The libraries that this process has really mapped, and the versions they give."""
    paths: dict[str, str] = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(None, 5)[-1].strip() if line.count("/") else ""
            name = os.path.basename(path)
            if ".so" in name and name.startswith(tuple("lib" + word for word in LIBRARIES)):
                paths.setdefault(path, name)
    nccl = next((path for path, name in paths.items() if name.startswith("libnccl.so")), None)
    cudnn = next((path for path, name in paths.items() if name.startswith("libcudnn.so")), None)
    loaded = {
        "nccl_loaded": attempt(nccl_version, nccl) if nccl else None,
        "cudnn_loaded": attempt(cudnn_version, cudnn) if cudnn else None,
    }
    tell(
        libraries=[{"name": name, "path": path} for path, name in sorted(paths.items())],
        torch={name: value for name, value in loaded.items() if value},
    )


def nccl_version(path: str) -> str:
    number = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    value = number.value
    if value < 10000:  # before 2.9
        return f"{value // 1000}.{value % 1000 // 100}.{value % 100}"
    return f"{value // 10000}.{value % 10000 // 100}.{value % 100}"


def cudnn_version(path: str) -> str:
    library = ctypes.CDLL(path)
    library.cudnnGetVersion.restype = ctypes.c_size_t
    value = library.cudnnGetVersion()
    unit = 10000 if value >= 90000 else 1000
    return f"{value // unit}.{value % unit // 100}.{value % 100}"


def ask_cuda(torch: Any) -> None:
    """Whether CUDA starts, and why not: the slow part, and the one that may hang."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = attempt(lambda: bool(torch.cuda.is_available()))
        count = attempt(lambda: int(torch.cuda.device_count()))
    messages = [str(item.message) for item in said]
    found = {"cuda_available": available, "device_count": count}
    if available is False and (torch.version.cuda or torch.version.hip) and has_device():
        try:
            torch.cuda.init()
        except Exception as error:
            found["error"] = words(error)
    tell(torch={name: value for name, value in found.items() if value is not None}, messages=messages)


def has_device() -> bool:
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))


def companion(name: str) -> dict[str, Any] | None:
    """Import torchvision or torchaudio as far as its compiled part: the rest takes a second and fails alike."""
    spec = attempt(importlib.util.find_spec, name)
    if spec is None:
        return None
    found = {"installed": True, "file": spec.origin}
    try:
        import_compiled_part(name, spec)
    except BaseException as error:
        found["error"] = words(error)
    version_file = os.path.join(os.path.dirname(spec.origin or ""), "version.py")
    module = sys.modules.get(name + ".version") or load_file(name + ".version", version_file)
    version = getattr(module, "__version__", None) or version_in(version_file)
    cuda = getattr(module, "cuda", None)
    if version:
        found["version"] = version
        found["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}" if isinstance(cuda, int) else cuda
        if cuda is None:  # told by the compiled part, when it loads
            found["cuda"] = cuda_of_version(version) if "error" in found or "+" in version else ""
    return {key: value for key, value in found.items() if value is not None}


def version_in(path: str) -> str | None:
    """The version that a file assigns, when it cannot be run."""
    try:
        with open(path) as file:
            match = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", file.read(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def cuda_of_version(version: str) -> str | None:
    """ "13.0" for 0.28.0+cu130, "" for 0.28.0+cpu, None where the version does not tell."""
    build = version.partition("+")[2]
    match = re.fullmatch(r"cu(\d+)(\d)", build)
    return f"{match[1]}.{match[2]}" if match else "" if build == "cpu" else None


def import_compiled_part(name: str, spec: Any) -> None:
    folder = os.path.dirname(spec.origin or "")
    parts = [part for part in ("extension", "_extension", "_meta_registrations") if is_part(folder, part)]
    if not parts or not spec.submodule_search_locations:
        importlib.import_module(name)
        return
    # A package whose __init__ did not run, so that only the parts named here are imported.
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    package.__file__ = spec.origin
    sys.modules[name] = package
    version = load_file(name + ".version", os.path.join(folder, "version.py"))
    package.__dict__["__version__"] = getattr(version, "__version__", None)
    for part in parts:
        importlib.import_module(f"{name}.{part}")


def is_part(folder: str, part: str) -> bool:
    return os.path.exists(os.path.join(folder, part + ".py")) or os.path.isdir(os.path.join(folder, part))


def load_file(name: str, path: str) -> types.ModuleType | None:
    """A file that is a module, run without its package."""
    if not os.path.exists(path):
        return None
    module = types.ModuleType(name)
    try:
        with open(path) as file:
            exec(compile(file.read(), path, "exec"), module.__dict__)
    except Exception:
        return None
    return module


def ask_extensions() -> None:
    """Load what was compiled against some torch: symbols that are missing show here."""
    messages = []
    for name in EXTENSIONS:
        package, _, part = name.partition(".")
        spec = attempt(importlib.util.find_spec, package)
        if spec is None or not spec.origin:
            continue
        files = [spec.origin]
        if spec.submodule_search_locations:
            folder = next(iter(spec.submodule_search_locations))
            files = glob.glob(os.path.join(glob.escape(folder), f"{part or '*'}*.so"))
        for path in (path for path in files if path.endswith(".so")):
            try:
                ctypes.CDLL(path, mode=os.RTLD_NOW)
            except OSError as error:
                messages.append(f"ImportError: {error}")
    if messages:
        tell(messages=messages)


def apart(function: Callable[[], None]) -> int:
    """Run a function in a fork of this process, which has torch already; name the signal it died of."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    return pid


def in_fork(name: str) -> None:
    found = companion(name)
    if found is not None:
        tell(**{name: found})


def main() -> None:
    global ANSWER
    ANSWER = os.dup(1)
    os.dup2(2, 1)
    torch = import_torch()
    if torch is None:
        return
    forks = {apart(partial(in_fork, name)): name for name in ("torchvision", "torchaudio")}
    forks[apart(ask_extensions)] = "extensions"
    ask_mapped()
    ask_numpy(torch)
    ask_cuda(torch)
    for pid, name in forks.items():
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status) and name != "extensions":
            tell(
                **{name: {"installed": True, "error": f"its import ended with signal {os.WTERMSIG(status)}"}}
            )


if __name__ == "__main__":
    main()
