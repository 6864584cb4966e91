"""Symptoms of torch builds, what stands beside them, and the libraries they load."""

from __future__ import annotations

from phalanx.tools.doctor.symptom_words import EXTENSION, NO_GPU
from phalanx.tools.doctor.symptoms import Symptom as S

BUILDS = (
    S("arch-not-in-build", 84, r"is not compatible with the current pytorch installation"),
    S("arch-not-in-build", 80, r"no kernel image"),
    S(
        "arch-not-in-build",
        78,
        r"(?:value )?.?sm_\d{2,3}a?.? is not defined for option|unsupported gpu architecture|is not a recognized processor for this target",
    ),
    S(
        "arch-not-in-build",
        74,
        r"cuda error: invalid device function|cudaerrorinvaliddevicefunction|cudaerrornokernelimagefordevice",
    ),
    S(
        "arch-not-in-build",
        66,
        r"(?:no|not|missing|lacks?|without) (?:support for |code for |kernels? for |include )?(?:the )?(?:sm_?(?:8|9|10|12)\d|blackwell|ampere|hopper|ada)\b",
    ),
    S("gpu-too-old-for-build", 96, r"no longer supports this gpu because it is too old"),
    S("gpu-too-old-for-build", 90, r"minimum cuda capability (?:supported|that we support)"),
    S(
        "gpu-too-old-for-build",
        66,
        r"(?:dropped|removed|no longer (?:contains?|includes?|supports?)).{0,40}(?:sm_?[3-7]\d|kepler|maxwell|pascal|volta|compute capability|this (?:card|gpu)|old)",
    ),
    S(
        "rocm-arch-not-in-build",
        97,
        r"hiperrornobinaryforgpu|unable to find code object for all current devices",
    ),
    S(
        "rocm-arch-not-in-build",
        95,
        r"hip error: invalid device function|hiperrorinvaliddevicefunction|hip error: no kernel image",
    ),
    S(
        "rocm-arch-not-in-build",
        92,
        r"tensilelibrary.{0,80}gfx|rocblas error: (?:cannot|could not)|no gpu.{0,40}gfx\d",
    ),
    S("rocm-arch-not-in-build", 84, r"hsa_override_gfx_version"),
    S(
        "rocm-arch-not-in-build",
        80,
        r"gfx\d{3,4}.{0,60}(?:not|un)[ -]?(?:supported|included|listed|in the|available)",
    ),
    S(
        "rocm-arch-not-in-build",
        72,
        r"invalid device function|no kernel image|segfault|segmentation fault",
        also=r"gfx\d{3,4}",
    ),
    S(
        "jetson-wrong-wheel",
        70,
        r"jetson|jetpack|\bl4t\b|tegra|orin nano|xavier",
        also=r"is_available|is false|not compiled|(?:cuda|gpu) (?:is )?(?:not |un)avail|no cuda|cannot use|no kernel image|cpu[- ](?:only|build|version)|\+cpu|pip wheel",
        unless=r"\.nv\d{2}",
    ),
    S("cpu-only-torch", 95, r"torch not compiled with cuda enabled"),
    S("cpu-only-torch", 84, r"torch\.version\.cuda.{0,12}none"),
    S(
        "cpu-only-torch",
        80,
        r"cpu[- ]?only (?:build|version|torch|pytorch|wheel|package)|installed the cpu|cpu (?:build|version|variant|wheel) of (?:py)?torch",
        unless=NO_GPU,
    ),
    S(
        "cpu-only-torch",
        72,
        r"(?:nightly|install(?:ed)?|conda|pip|build|update|upgrade).{0,90}(?:has no cuda|cuda is gone|without cuda|no longer (?:has|sees|finds) (?:cuda|the gpu)|lost cuda|gets? (?:a |the )?cpu)",
    ),
    S("cpu-only-torch", 66, r"cuda (?:is |was )?gone|\+cpu\b.{0,60}instead|replaced by (?:a |the )?\+?cpu"),
    S(
        "cuda-libs-not-installed",
        92,
        r"lib(?:cublas|cublaslt|cudart|cufft|cusparse|cusparselt|cusolver|curand|nvrtc|nvtoolsext|cupti|nvjitlink|cufile|nvshmem_host)\.so[.\d*\[\]-]{0,14}:? (?:cannot open shared|not found in the system path)",
    ),
    S("cuda-libs-not-installed", 90, r"lib(?:nccl|cudnn)\.so\.\d{1,2}: cannot open shared"),
    S(
        "cuda-libs-not-installed",
        66,
        r"nvidia-[a-z]{1,14}(?:-runtime)?-cu1[123].{0,60}(?:not installed|missing)|(?:--no-deps|without dependencies)",
        also=r"cannot open|not found|missing|importerror|oserror",
    ),
    S(
        "cudnn-library-not-found",
        88,
        r"could not load library libcudnn|unable to load any of \{libcudnn|could not locate cudnn|cudnn_\w{1,30}64_\d.{0,40}(?:not found|could not)",
    ),
    S("torch-import-broken", 70, r"(?:winerror 126|winerror 127|error loading .{0,120}\.dll)"),
)

COMPANIONS = (
    S(
        "torchvision-cpu-build",
        96,
        r"could not run .?torchvision::\w{1,30}.{0,40}(?:from the|with arguments).{0,40}cuda",
    ),
    S(
        "torchvision-cpu-build",
        72,
        r"(?:nms|roi_?align|deform_conv2d) .{0,40}(?:works|only|runs).{0,30}cpu|torchvision.{0,40}(?:is (?:a )?|only )cpu|not compiled with gpu support",
        also=r"torchvision|nms",
    ),
    S(
        "torch-torchvision-cuda-mismatch",
        98,
        r"(?:py)?torch and torch(?:vision|audio) were compiled with different cuda|compiled with different cuda (?:major )?versions",
    ),
    S(
        "torch-torchvision-cuda-mismatch",
        70,
        r"(?:torchvision|torchaudio).{0,60}(?:other|another|different|wrong) cuda|different cuda (?:builds?|versions?).{0,60}torchvision",
    ),
    S(
        "torch-torchvision-mismatch",
        90,
        r"operator torchvision::\w{1,30} does not exist|torchvision::nms.{0,20}(?:does not exist|missing|not found)|no such operator torchvision::",
    ),
    S("torch-torchvision-mismatch", 90, r"couldn.?t load custom c\+\+ ops"),
    S("torch-torchvision-mismatch", 90, r"module .torchvision. has no attribute .extension."),
    S(
        "torch-torchvision-mismatch",
        88,
        r"torchvision[^\n]{0,60}\.so[^\n]{0,40}undefined symbol|failed to load image python extension[^\n]{0,160}undefined symbol",
    ),
    S(
        "torch-torchvision-mismatch",
        72,
        r"nms operator (?:is )?(?:missing|not found)|failed to load image python extension",
    ),
    S(
        "torch-torchvision-mismatch",
        64,
        r"torchvision.{0,70}(?:does(?: not|n.t) (?:match|belong|fit)|mismatch|incompatible|requires torch)",
    ),
    S(
        "torch-torchaudio-mismatch",
        90,
        r"torchaudio[^\n]{0,80}undefined symbol|libtorchaudio[^\n]{0,60}(?:undefined|could not load)|torchaudio \S{1,20} requires torch",
    ),
    S("extension-abi-mismatch", 93, rf"(?:{EXTENSION})[^\n]{{0,160}}undefined symbol"),
    S(
        "extension-abi-mismatch",
        92,
        r"undefined symbol: _zn?k?\d?(?:2at|3c10|5torch)[^\n]{0,200}",
        unless=r"torch(?:vision|audio)[^\n]{0,80}undefined symbol|(?:lib(?:torch|c10|shm)\w{0,20}\.so|/torch/_c[\w.-]{0,60}\.so)[^\n]{0,40}undefined symbol|image python extension",
    ),
    S("extension-abi-mismatch", 90, r"xformers can.?t load c\+\+/cuda extensions|xformers was built for"),
    S("extension-abi-mismatch", 88, rf"(?:{EXTENSION})[^\n]{{0,80}}dll load failed"),
    S(
        "extension-abi-mismatch",
        76,
        rf"(?:{EXTENSION})[^\n]{{0,80}}(?:stops? (?:importing|working)|(?:no longer|cannot be|can.t be|not) import|fails? (?:to|at|on) import|import(?:ing)? fails|\babi\b)",
    ),
    S(
        "extension-abi-mismatch",
        66,
        r"(?:wrong|different|other|another|mismatch\w{0,5}|incompatible|old|new|pre-?)[^\n]{0,30}(?:c\+\+ ?(?:11)? ?abi|cxx11[ _]?abi)|\babi (?:mismatch|incompat|chang)",
    ),
    S(
        "duplicate-torch-install",
        84,
        r"(?:two|2|several|multiple|both|second|another|other) (?:torch|pytorch)(?:es|s)? (?:install|version|copies|copy|package|build|beside|next to|in the same|in one)|(?:two|several|multiple|both) torches\b",
    ),
    S(
        "duplicate-torch-install",
        94,
        r"ld_library_path[^\n]{0,120}libtorch|libtorch[^\n]{0,80}ld_library_path",
        also=r"undefined symbol|import|conflict",
        unless=r"site-packages/torch/lib",
    ),
    S(
        "duplicate-torch-install",
        80,
        r"\.local/[^\n]{0,120}torch[^\n]{0,120}undefined symbol|torch[^\n]{0,80} (?:in|under|from|to|and) [^\n]{0,40}(?:~|/root|/home/\S{1,30})/\.local\b(?!/lib)|~/\.local has|newer (?:torch|one) (?:next to|beside|in)|torch[^\n]{0,60}user site",
    ),
    S(
        "duplicate-torch-install",
        74,
        r"(?:pip and conda|conda and pip|both pip|pip[^\n]{0,30} over (?:a )?conda|pip install --user)",
        also=r"undefined symbol|import(?:ing)? torch (?:fails|breaks|dies)|breaks import|importerror|conflict|next to a|import breaks",
    ),
    S("numpy2-abi", 95, r"compiled using numpy 1\.x cannot be run in"),
    S("numpy2-abi", 92, r"_array_api (?:is |was )?not found"),
    S("numpy2-abi", 90, r"failed to initiali[sz]e numpy"),
    S("numpy2-abi", 84, r"numpy is not available"),
    S("numpy2-abi", 66, r"numpy\.core\.multiarray failed to import"),
    S("numpy2-abi", 66, r"numpy (?:2\b|>= ?2|2\.\d).{0,60}(?:break|incompat|fail|not)"),
)

LIBRARIES = (
    S("mkl-symbol-removed", 98, r"ijit_(?:notifyevent|isprofilingactive)"),
    S(
        "mkl-symbol-removed",
        88,
        r"undefined symbol: mkl_\w{1,40}|libmkl\w{0,40}\.so[.\d]{0,4}[^\n]{0,40}undefined symbol",
    ),
    S("mkl-symbol-removed", 64, r"\bmkl\b.{0,40}(?:2024\.1|2024\.2|2025)|downgrad\w{1,4} mkl"),
    S("libstdcxx-too-old", 96, r"glibcxx_3\.4\.\d{1,3}.{0,3} not found|cxxabi_1\.3\.\d{1,3}.{0,3} not found"),
    S("libstdcxx-too-old", 74, r"glibcxx_3\.4|cxxabi_1\.3"),
    S(
        "libstdcxx-too-old",
        66,
        r"libstdc(?:\+\+|xx)[^\n]{0,100}(?:\bold|missing|\bsystem|instead|symlink|not found|conflict|is taken|is loaded|too new)|(?:old|system|missing|wrong)\w{0,3} libstdc",
    ),
    S("glibc-too-old", 94, r"version .?glibc_2\.\d{1,2}.{0,3} not found"),
    S("ld-library-path-shadows-cudnn", 98, r"ld_library_path contains incompatible version of cudnn"),
    S(
        "ld-library-path-shadows-cudnn",
        94,
        r"cudnn version incompatibility|compiled +against +\(\d[^\n]{0,30}\)[^\n]{0,20}(?:runtime|found|linked|loaded)|pytorch was compiled +against +\(?\d[^\n]{0,60}but (?:found )?(?:linked|runtime|found)",
    ),
    S(
        "ld-library-path-shadows-cudnn",
        88,
        r"cudnn_status_(?:sublibrary_)?version_mismatch|libcudnn[^\n]{0,60}undefined symbol|undefined symbol: cudnn\w{1,50}|symbol[^\n]{0,60}not defined in file libcudnn",
    ),
    S(
        "ld-library-path-shadows-cudnn",
        80,
        r"(?:older|another|other|system|different|wrong|old) (?:version of )?cudnn|cudnn[^\n]{0,80}ld_library_path|ld_library_path[^\n]{0,80}cudnn",
    ),
    S(
        "ld-library-path-shadows-cuda",
        95,
        r"nvjitlink\w{0,40}[^\n]{0,60}(?:undefined|not defined|version libnvjitlink)|undefined symbol: __nvjitlink",
    ),
    S(
        "ld-library-path-shadows-cuda",
        91,
        r"undefined symbol: (?:cublas|cusparse|cusolver|cufft|curand|cudart|cupti|nvrtc|cuda[a-z])\w{1,60}|symbol (?:cublas|cusparse|cusolver|cufft)\w{1,60}[^\n]{0,20}(?:version|not defined)|undefined symbol: [^\n]{1,80}, version lib(?:cublas|cusparse|cusolver|cudart|cufft)",
    ),
    S(
        "ld-library-path-shadows-cuda",
        80,
        r"ldd [^\n]{0,80}(?:system|toolkit|/usr/local/cuda)|ld_library_path[^\n]{0,80}(?:cuda|toolkit)[^\n]{0,60}(?:instead|before|first|wins|shadow|older)",
    ),
    S("ld-library-path-shadows-cuda", 60, r"unset(?:ting)? ld_library_path"),
    S("nccl-library-mismatch", 96, r"undefined symbol: p?nccl\w{1,60}|libnccl[^\n]{0,60}undefined symbol"),
    S(
        "nccl-library-mismatch",
        86,
        r"nvidia-\*?-?(?:nccl-)?cu11\b[^\n]{0,120}cu1[23]\b|mixes? [^\n]{0,60}cu11",
    ),
    S(
        "nccl-library-mismatch",
        82,
        r"(?:another|wrong|different|older|system|mismatch\w{0,5}|two) versions? of (?:lib)?nccl|(?:another|wrong|different|older|mismatched|two) (?:lib)?nccl (?:versions?|librar\w{1,3}|packages?)|system nccl|nccl version mismatch|mismatched nccl|nccl[^\n]{0,60}ld_(?:library_path|preload)|ld_(?:library_path|preload)[^\n]{0,80}nccl",
    ),
    S("nccl-not-in-build", 97, r"doesn.?t have nccl built in|does not have nccl built"),
    S(
        "nccl-not-in-build",
        90,
        r"nccl (?:is |was )?(?:not (?:available|built|compiled|supported|included)|unavailable)|(?:not|without|no) (?:compiled |built )?(?:with )?nccl (?:support|backend|available)|unknown c10d backend type nccl|invalid backend: .?nccl",
    ),
    S(
        "nccl-not-in-build",
        84,
        r"\b(?:ddp|distributed|multi-gpu|nccl|torchrun|init_process_group|fsdp|deepspeed)\b[^\n]{0,80}\b(?:on|under|in) (?:windows|a mac|mac ?os)|windows[^\n]{0,60}\b(?:ddp|nccl|init_process_group)\b",
        unless=r"wsl|libuv|dataloader worker",
    ),
    S("nccl-not-in-build", 74, r"backend=.?.?gloo", also=r"\bwindows\b", unless="libuv"),
    S("libuv-missing-windows", 98, r"use_libuv was requested but|built without libuv"),
    S("libuv-missing-windows", 80, r"libuv", also=r"windows|use_libuv|tcpstore|torchrun|init_method"),
    S(
        "nvcc-torch-cuda-mismatch",
        97,
        r"detected cuda version \([\d.]{1,8}\) mismatches|cuda version \([\d.]{1,8}\)[^\n]{0,30}mismatches the version",
    ),
    S(
        "nvcc-torch-cuda-mismatch",
        94,
        r"installed cuda version [\d.]{1,8} does not match the version torch was compiled with",
    ),
    S(
        "nvcc-torch-cuda-mismatch",
        92,
        r"cuda extensions are being compiled with a version of cuda that does not match",
    ),
    S(
        "nvcc-torch-cuda-mismatch",
        74,
        r"(?:nvcc|toolkit|system cuda)[^\n]{0,80}(?:mismatch|differ|does not match|doesn.t match|is found instead|not the same|other than|another than)",
    ),
    S(
        "nvcc-torch-cuda-mismatch",
        66,
        r"(?:build|compil)\w{0,5} [^\n]{0,40}extension[^\n]{0,60}(?:refused|mismatch|different cuda)",
    ),
    S("nvcc-too-old-for-gpu", 84, r"nvcc fatal[^\n]{0,20}unsupported gpu architecture"),
    S(
        "cuda-home-missing",
        92,
        r"cuda_home environment variable is not set|cuda_home is not set|no such file or directory: [^\n]{0,40}nvcc",
    ),
    S("ninja-missing", 92, r"ninja is required to load c\+\+ extensions"),
    S(
        "gcc-too-new-for-nvcc",
        92,
        r"unsupported gnu version|gcc versions later than \d{1,2} are not supported",
    ),
    S(
        "compiler-missing",
        88,
        r"failed to find c compiler|no c\+\+ compiler|cannot find -lcuda|gcc: command not found|python\.h: no such file",
    ),
)
