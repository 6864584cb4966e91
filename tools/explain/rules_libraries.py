"""Rules: libraries that do not fit one another: torch, its companions, and what the loader finds in their place."""

from __future__ import annotations

from phalanx.tools.explain.rule import Rule

RULES = (
    Rule(
        id="torch-torchvision-mismatch",
        when=(
            "torchvision::nms",
            "custom c++ ops",
            "'torchvision' has no attribute",
            "torchvision.extension",
        ),
        patterns=(
            r"operator torchvision::nms does not exist|Couldn'?t load custom C\+\+ ops|module 'torchvision' has no attribute 'extension'|torchvision\.extension[^\n]{0,40}partially initialized|No such operator torchvision::nms",
        ),
        cause=("torchvision is not the release that belongs to this torch",),
        fix=(
            "pip install --upgrade --force-reinstall torchvision --no-deps in the release for this torch: phalanx doctor prints the pair",
        ),
        weight=84,
        beats=("import-error",),
    ),
    Rule(
        id="torch-torchvision-cuda-mismatch",
        when=("compiled with different cuda",),
        patterns=(
            r"Detected that PyTorch and torchvision were compiled with different CUDA (?:major )?versions\.(?: PyTorch has CUDA Version=(?P<one>[\d.]+) and torchvision has CUDA Version=(?P<other>[\d.]+))?",
        ),
        cause=(
            "torch was built for CUDA {one} and torchvision for CUDA {other}",
            "torch and torchvision were built for different CUDA versions",
        ),
        fix=(
            "install both from one index: pip install --force-reinstall torch torchvision --index-url https://download.pytorch.org/whl/cu126",
        ),
        weight=86,
        beats=("import-error",),
    ),
    Rule(
        id="torchvision-cpu-build",
        when=("from the 'cuda' backend", "not compiled with gpu support"),
        patterns=(
            r"Could not run 'torchvision::\w{1,40}' with arguments from the 'CUDA' backend|torchvision[^\n]{0,60}Not compiled with GPU support",
        ),
        cause=("torchvision is a CPU build beside a torch with CUDA",),
        fix=(
            "pip install --force-reinstall --no-deps torchvision from the same index as torch (.../whl/cu126)",
        ),
        weight=86,
    ),
    Rule(
        id="ld-library-path-shadows-cuda",
        when=("nvjitlink", "cublaslt", "version libcu", "version libnv", "libcusparse"),
        patterns=(
            r"undefined symbol: (?:__?nvJitLink\w{0,60}|cublasLt\w{0,60}|cusparse\w{0,60}|cusolver\w{0,60})(?:, version (?P<library>lib[\w.]{3,40}))?|lib(?:nvJitLink|cublas|cublasLt|cusparse|cudart|cufft)\.so[.\d]{0,8}: (?:version|symbol)",
        ),
        cause=(
            "another CUDA's libraries ({library}) are loaded before those that torch brings",
            "another CUDA's libraries are loaded before those that torch brings",
        ),
        fix=("unset LD_LIBRARY_PATH (or take /usr/local/cuda*/lib64 out of it; module unload cuda)",),
        look=("nvidia-*-cu11 packages beside nvidia-*-cu12 ones: pip list | grep nvidia",),
        weight=86,
        beats=("import-error", "extension-abi-mismatch"),
    ),
    Rule(
        id="ld-library-path-shadows-cudnn",
        when=(
            "cudnn version incompatibility",
            "cudnn_status_sublibrary",
            "cudnn_status_version",
            "runtime version",
        ),
        patterns=(
            r"cuDNN version incompatibility: PyTorch was compiled (?:against|with) +\(?(?P<built>[\d, .]{3,20})\)? but (?:found|linked against) (?:runtime version )?\(?(?P<found>[\d, .]{3,20})",
            r"cuDNN version incompatibility|CUDNN_STATUS_(?:SUBLIBRARY|VERSION)_(?:VERSION_)?\w{0,40}",
        ),
        cause=(
            "another cuDNN ({found}) is loaded before the one that torch was built with ({built})",
            "another cuDNN is loaded before the one that torch brings",
        ),
        fix=(
            "unset LD_LIBRARY_PATH, or take the folder with libcudnn out of it; phalanx doctor names the file",
        ),
        weight=86,
        beats=("cudnn-oom-in-disguise",),
    ),
    Rule(
        id="cudnn-library-not-found",
        when=("libcudnn", "libnvrtc", "could not load library", "nvrtc"),
        patterns=(
            r"Could not load library (?P<library>lib(?:cudnn|nvrtc)[\w.-]{3,60})",
            r"Unable to load any of \{(?P<library>libcudnn[^}\n]{1,120})\}|Unable to load any of \{[^}\n]{0,40}(?P<library2>libnvrtc[^}\n]{1,120})\}",
            r"(?P<library>lib(?:cudnn|nvrtc)[\w.-]{0,60}): cannot open shared object file",
            r"failed to open (?P<library>libnvrtc-builtins[\w.]{2,30})|nvrtc: error: failed to open|libnvrtc[^\n]{0,40}(?:not found|cannot open)",
        ),
        unless=(r"dso_loader|stream_executor|tensorflow|dlerror",),
        cause=("the loader finds no {library}", "a cuDNN or nvrtc library is not on the loader's path"),
        fix=(
            "pip install --force-reinstall the nvidia-cudnn / nvidia-cuda-nvrtc package of torch's CUDA (pip list | grep nvidia), without an LD_LIBRARY_PATH of another",
            "or point the loader at it: export LD_LIBRARY_PATH=$(python -c 'import nvidia.cudnn as m; print(m.__path__[0])')/lib",
        ),
        weight=84,
        beats=("cuda-libs-not-installed", "import-error"),
    ),
    Rule(
        id="cuda-libs-not-installed",
        when=("cannot open shared object file",),
        patterns=(
            r"(?P<library>lib(?:cudart|cublas|cublasLt|cusparse|cusparseLt|cufft|curand|cusolver|cupti|nccl|nvToolsExt|nvJitLink|cufile|nvshmem_host|c10_cuda|torch_cuda)[\w.-]{0,30}): cannot open shared object file",
        ),
        unless=(r"dso_loader|stream_executor|tensorflow|dlerror", r"torch_extensions"),
        cause=("{library} is not installed, or not on the loader's path",),
        fix=(
            "pip install --force-reinstall torch (its nvidia-* packages are missing or were removed)",
            "an extension that asks for another CUDA version: rebuild it against this torch",
        ),
        look=("pip list | grep nvidia",),
        weight=80,
        beats=("import-error",),
    ),
    Rule(
        id="wsl-libcuda-not-on-path",
        when=("libcuda.so", "wsl"),
        patterns=(
            r"/usr/lib/wsl[^\n]{0,80}(?:not found|cannot|not in|no such)|libcuda\.so(?:\.1)?: cannot open shared object file[^\n]{0,200}wsl|WSL[^\n]{0,80}libcuda",
        ),
        cause=("WSL's folder with libcuda is not on the loader's path",),
        fix=("export LD_LIBRARY_PATH=/usr/lib/wsl/lib:$LD_LIBRARY_PATH",),
        weight=84,
    ),
    Rule(
        id="triton-libcuda-not-found",
        when=("-lcuda", "libcuda.so cannot"),
        patterns=(
            r"cannot find -lcuda(?!rt|dnn)\b|libcuda\.so cannot (?:be )?found",
            r"returned non-zero exit status[^\n]{0,400}-lcuda\b|-lcuda\b[^\n]{0,400}returned non-zero exit status",
        ),
        cause=("Triton cannot link libcuda: the linker finds no libcuda.so",),
        fix=(
            "sudo ldconfig, and a link where only libcuda.so.1 is there: ln -s libcuda.so.1 /usr/lib/x86_64-linux-gnu/libcuda.so",
            "or TRITON_LIBCUDA_PATH=/folder/with/libcuda (WSL: /usr/lib/wsl/lib; CUDA's stubs: /usr/local/cuda/lib64/stubs)",
        ),
        weight=80,
    ),
    Rule(
        id="extension-abi-mismatch",
        when=(
            "undefined symbol: _z",
            "undefined symbol: _znk",
            "undefined symbol",
            "procedure could not be found",
        ),
        patterns=(
            r"(?P<file>[\w.+-]{3,80}\.so)[\w.]{0,8}: undefined symbol: (?P<symbol>_Z\w{3,200})",
            r"undefined symbol: (?P<symbol>_ZN?K?\d{0,3}\w{0,200}(?:c10|at|torch|caffe2|THP)\w{0,200})",
            r"undefined symbol: (?P<symbol>_Z\w{3,200})",
        ),
        cause=(
            "{file} was built for another torch (or C++ ABI): {symbol} is missing",
            "a compiled extension was built for another torch (or C++ ABI): {symbol} is missing",
        ),
        fix=(
            "pip uninstall the extension, then pip install --no-build-isolation --no-cache-dir it, so that it is built against this torch; or its wheel for this torch",
        ),
        weight=78,
        beats=("import-error",),
    ),
    Rule(
        id="mkl-symbol-removed",
        when=("ijit_notifyevent", "intel mkl fatal error", "undefined symbol: mkl_"),
        patterns=(r"undefined symbol: (?:iJIT_NotifyEvent|mkl_\w{3,60})|Intel MKL FATAL ERROR",),
        cause=("conda's MKL is another than this torch was built with",),
        fix=("conda install 'mkl<2024.1' (torch 2.0 to 2.2), or the pip build of torch",),
        weight=84,
        beats=("import-error", "extension-abi-mismatch"),
    ),
    Rule(
        id="libstdcxx-too-old",
        when=("glibcxx", "cxxabi"),
        patterns=(r"version `?(?P<version>(?:GLIBCXX|CXXABI)_[\d.]+)'? not found",),
        cause=("an older libstdc++ is loaded first: it lacks {version}",),
        fix=(
            "conda install -c conda-forge libstdcxx-ng, and LD_LIBRARY_PATH=$CONDA_PREFIX/lib; or a newer gcc module",
        ),
        weight=84,
        beats=("import-error", "deepspeed-op-load-failed"),
    ),
    Rule(
        id="glibc-too-old",
        when=("glibc_",),
        patterns=(r"version `?(?P<version>GLIBC_[\d.]+)'? not found",),
        cause=("this system's glibc is too old: it lacks {version}",),
        fix=("a wheel for an older manylinux, or a container with a newer distribution",),
        weight=84,
        beats=("import-error",),
    ),
    Rule(
        id="numpy2-abi",
        when=("compiled using numpy", "_array_api", "numpy is not available"),
        patterns=(
            r"compiled using NumPy 1\.x cannot be run in|_ARRAY_API not found|RuntimeError: Numpy is not available|Numpy is not available",
        ),
        kind="warning",
        cause=("a package (torch among them) was built for NumPy 1, and NumPy 2 is installed",),
        fix=("pip install 'numpy<2', or a torch of 2.3 or newer",),
        weight=74,
        refine="numpy",
    ),
    Rule(
        id="duplicate-torch-install",
        when=(
            "imported torch twice",
            "already has a docstring",
            "only a single torch_library",
            "registered twice",
            "registered multiple times",
        ),
        patterns=(
            r"function '?_has_torch_function'? already has a docstring|Only a single TORCH_LIBRARY can be used to register|(?:two|several|duplicate) (?:copies|installations) of (?:py)?torch",
        ),
        cause=("two torches are loaded into one process",),
        fix=(
            "pip uninstall torch until none is left, also in ~/.local, then install one; python -m site shows the folders",
        ),
        weight=78,
    ),
)
