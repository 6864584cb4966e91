"""The symptoms of each cause, see `phalanx.tools.doctor.symptoms`."""

from __future__ import annotations

from phalanx.tools.doctor.symptoms import Symptom as S

_HANG = r"hang|hung|deadlock|dead-lock|stuck|freez|stall|never (?:returns|finishes)|blocks? forever"
_CONTAINER = r"docker|container|podman|kubernetes|\bpod\b|singularity|apptainer|enroot"
_NO_HELP = r"p2p[^\n]{0,60}(?:(?:did|does|do) ?n[o\u2019']?t (?:help|change|fix|solve|make)|no (?:effect|difference|change)|same)"
_NO_GPU = r"(?:has|have|with|is|there is) no (?:nvidia )?gpu|without (?:a |an )(?:nvidia )?gpu|(?:don.t|doesn.t|not) have (?:a |an )?(?:nvidia )?gpu|on purpose|cpu-only (?:machine|laptop|server)"
_EXTENSION = (
    r"flash[_-]?attn|flash[_ -]attention|\bapex\b|amp_c|xformers|mmcv|detectron2|torch[_-](?:scatter|sparse|cluster|"
    r"spline)|pytorch3d|\bdgl\b|causal[_-]conv1d|mamba[_-]ssm|selective[_-]scan|natten|spconv|transformer[_-]engine|"
    r"bitsandbytes|vllm|deformable|pointnet|minkowski|kaolin|nvdiffrast|auto_gptq|autoawq|awq_ext|exllama|"
    r"torchtext|torchdata|warpctc|k2\b|dcnv|correlation_cuda|sageattention|gsplat|diff_gaussian|tiny-?cuda-?nn|tinycudann"
)

DRIVER = (
    S("driver-too-old", 96, r"cuda driver version is insufficient for cuda runtime"),
    S("driver-too-old", 96, r"nvidia driver on your system is too old"),
    S("driver-too-old", 94, r"unsatisfied condition: ?cuda ?>="),
    S("driver-too-old", 90, r"please update your (?:gpu|nvidia) driver"),
    S("driver-too-old", 88, r"cudaerrorinsufficientdriver|cuda_error_insufficient_driver"),
    S(
        "driver-too-old",
        86,
        r"unsupported_ptx_version|ptx was compiled with an unsupported toolchain|error 222\b",
    ),
    S("driver-too-old", 82, r"this container was built for nvidia driver release [\d.]{1,12} or later"),
    S(
        "driver-too-old",
        64,
        r"driver (?:version )?(?:is |was |were )?(?:too|rather|very) old|outdated (?:nvidia |gpu )?driver",
    ),
    S(
        "driver-too-old",
        57,
        r"driver (?:only |that )?(?:supports|stops at|reports) (?:only )?(?:up to )?cuda \d",
    ),
    S("driver-too-old", 58, r"old(?:er)? (?:host |nvidia |gpu )?driver\b", unless=r"mismatch"),
    S("forward-compat-on-geforce", 97, r"forward compatibility was attempted on non[ -]supported h"),
    S(
        "forward-compat-on-geforce",
        95,
        r"error 804\b|cudaerrorcompatnotsupportedondevice|compat_not_supported_on_device",
    ),
    S(
        "forward-compat-on-geforce",
        62,
        r"cuda[-/ ]compat|compat(?:ibility)? (?:libcuda|package|libraries)",
        also=r"geforce|[gr]tx",
    ),
    S("driver-library-mismatch", 97, r"driver/library version mismatch|nvml_error_lib_rm_version_mismatch"),
    S("driver-library-mismatch", 96, r"unsupported display driver ?/ ?cuda driver combination|error 803\b"),
    S("driver-library-mismatch", 95, r"api mismatch: ?(?:the )?(?:client|nvidia kernel module)"),
    S("driver-library-mismatch", 95, r"cudaerrorsystemdrivermismatch|cuda_error_system_driver_mismatch"),
    S("driver-library-mismatch", 92, r"kernel module has the version|nvml library version: ?\d{3}"),
    S(
        "driver-library-mismatch",
        66,
        r"(?:driver|kernel module).{0,60}(?:librar(?:y|ies)|user.?space).{0,40}(?:differ|mismatch|do(?:es)? not match)",
    ),
    S(
        "driver-library-mismatch",
        62,
        r"driver (?:was |got )?(?:upgraded|updated).{0,50}(?:without|no|before|not) (?:a )?reboot|unattended.upgrade",
        also=r"nvidia|driver|gpu|cuda",
    ),
    S("driver-library-mismatch", 60, r"nvidia-smi works on the host.{0,40}fail", also=_CONTAINER),
    S(
        "driver-library-mismatch",
        58,
        r"(?:host|outside).{0,60}(?:works|fine).{0,60}(?:fails?|not).{0,30}(?:in|inside) the (?:user )?container",
        also="nvidia-smi",
    ),
    S(
        "kernel-module-not-loaded",
        92,
        r"(?:couldn.?t|cannot|can.t|could not|unable to|fail\w{0,2} to) communicate with (?:the )?(?:nvidia )?driver",
    ),
    S(
        "kernel-module-not-loaded",
        95,
        r"module nvidia not found|could not insert .?nvidia|modprobe: [a-z]{1,6}: .{0,40}nvidia",
    ),
    S(
        "kernel-module-not-loaded",
        95,
        r"key was rejected by service|required key not available|loading of unsigned module",
    ),
    S(
        "kernel-module-not-loaded",
        90,
        r"nvml error: driver not loaded|nvml: driver not loaded|driver not loaded",
    ),
    S(
        "kernel-module-not-loaded",
        88,
        r"nvidia kernel module (?:is )?(?:not|isn.t) (?:loaded|installed)|no nvidia kernel module|nvidia.ko.{0,40}(?:not found|missing)",
    ),
    S(
        "kernel-module-not-loaded",
        84,
        r"secure ?boot",
        also=r"nvidia|driver|module|gpu",
        unless=r"secure ?boot[\"':= ]{1,4}(?:is )?(?:off|disabled|false|no\b)",
    ),
    S("kernel-module-not-loaded", 82, r"\bdkms\b", also=r"fail|error|not|miss|broken"),
    S("kernel-module-not-loaded", 82, r"\bnouveau\b", unless=r"nouveau.{0,30}blacklist"),
    S("kernel-module-not-loaded", 80, r"(?:nvidia )?module (?:does not|doesn.t|not|won.t|fails to) load"),
    S(
        "kernel-module-not-loaded",
        74,
        r"(?:works|boots?) with (?:one|the old|an older|the previous) kernel|after (?:a |the )?kernel (?:update|upgrade)|new(?:er)? kernel.{0,60}nvidia|for the running kernel",
    ),
    S(
        "kernel-module-not-loaded",
        72,
        r"lsmod.{0,60}(?:nothing|empty|no nvidia)|no module named nvidia in the kernel",
    ),
    S("kernel-module-not-loaded", 48, r"found no nvidia driver on your system"),
    S(
        "kernel-module-not-loaded",
        88,
        r"no devices were found",
        also=r"nvrm: this can occur when|another driver|probe routine was not called|vfio",
    ),
    S(
        "gpu-driver-open-module-needed",
        95,
        r"requires? use of the nvidia open kernel modules|require the open kernel module",
    ),
    S(
        "fabricmanager-not-running",
        97,
        r"error 802\b|system not yet initiali[sz]ed|cudaerrorsystemnotready|cuda_error_system_not_ready",
    ),
    S(
        "fabricmanager-not-running",
        88,
        r"fabric[ _-]?manager",
        unless=r"fabric[ _-]?manager.{0,20}(?:is )?(?:running|active\b)",
    ),
    S("fabricmanager-not-running", 86, r"fabric\s{1,60}state\s{1,60}: (?:in progress|not started)"),
    S(
        "fabricmanager-not-running",
        82,
        r"fabric.{0,30}(?:state|status).{0,40}(?:in progress|not started|never)|nv_warn_nothing_to_do|nvswitch.{0,60}(?:fail|error|not)",
    ),
    S("cuda-unknown-error", 62, r"cuda unknown error|error 999\b|cudaerrorunknown"),
    S(
        "wsl-libcuda-not-on-path",
        92,
        r"/usr/lib/wsl/lib",
        also=r"libcuda\.so|libcuda\b|no nvidia driver|(?:cuda|gpu) (?:is )?(?:not |un)avail|is_available\(\)[^\n]{0,20}false",
        unless=r"is not a symbolic link",
    ),
    S(
        "wsl-libcuda-not-on-path",
        88,
        r"libcuda\.so(?:\.1)?.{0,40}(?:cannot open|not found|no such file)",
        also=r"wsl|microsoft",
    ),
    S(
        "wsl-libcuda-not-on-path",
        84,
        r"libcuda\.so|libcuda\b",
        also=r"\bwsl ?2?\b|windows subsystem|microsoft-standard",
    ),
    S(
        "wsl-libcuda-not-on-path",
        74,
        r"found no nvidia driver|cuda (?:is )?(?:not available|unavailable)|is_available\(\).{0,20}false|no cuda",
        also=r"\bwsl ?2?\b|windows subsystem|microsoft-standard",
    ),
)

CONTAINERS = (
    S("container-toolkit-missing", 98, r"could not select device driver"),
    S("container-toolkit-missing", 96, r"unknown (?:or invalid )?runtime(?: name| specified)?:? .?nvidia"),
    S(
        "container-toolkit-missing",
        92,
        r"nvidia-container-(?:runtime|cli|toolkit)(?:-hook)?.{0,40}(?:not found|no such file|missing|not installed)",
    ),
    S("container-toolkit-missing", 90, r"unresolvable cdi devices|failed to (?:inject|discover) cdi"),
    S(
        "container-toolkit-missing",
        74,
        r"--gpus.{0,40}(?:does not|doesn.t|won.t|fails? to|not|cannot) (?:start|run|work)|--gpus.{0,30}(?:error|fail|refus)",
    ),
    S(
        "container-toolkit-missing",
        70,
        r"(?:no|without|lacks?|missing|not) .{0,20}(?:nvidia )?container toolkit|install(?:ed|ing)? .{0,20}container[- ]toolkit",
    ),
    S("container-lost-gpu-cgroup", 90, r"failed to initiali[sz]e nvml: unknown error"),
    S("container-lost-gpu-cgroup", 88, r"daemon-reload"),
    S(
        "container-lost-gpu-cgroup",
        86,
        r"(?:container|docker|pod).{0,120}(?:los[et]s?|lost) (?:access to )?(?:the |its |all )?(?:gpu|device)",
    ),
    S(
        "container-lost-gpu-cgroup",
        76,
        r"(?:after (?:a while|some time|several|a few|hours|days)|suddenly|at first|eventually).{0,120}(?:nvidia-smi|nvml|gpu|cuda).{0,60}(?:fail|unknown|gone|disappear|vanish|lost|no longer|unavailable)",
        also=_CONTAINER,
    ),
    S(
        "container-without-gpus",
        94,
        r"use the nvidia container toolkit to start this container with gpu support",
    ),
    S("container-without-gpus", 92, r"nvidia driver was not detected"),
    S(
        "container-without-gpus",
        86,
        r"(?:without|no|missing|forgot(?:ten)?|lacks?) .{0,12}--gpus|without (?:the )?(?:--)?runtime[= ]nvidia|started without (?:any )?gpus?",
    ),
    S(
        "container-without-gpus",
        78,
        r"found no nvidia driver|nvidia-smi: (?:command )?not found|libcuda\.so\.1: cannot open|no cuda-capable device|is_available\(\).{0,20}false|(?:cuda|gpu)s? (?:is |are )?(?:not available|unavailable|not visible|invisible|not found)",
        also=_CONTAINER,
        unless=_NO_GPU + r"|--gpus|runtime[= ]{1,2}nvidia|gpus:|nvidia\.com/gpu|capabilities:",
    ),
    S(
        "container-without-gpus",
        64,
        r"(?:container|docker|pod).{0,80}(?:sees? no|no|cannot see|can.t see|does not see|not see|none of the|without) (?:the |any )?(?:gpu|cuda|nvidia)",
    ),
)

BUILDS = (
    S("arch-not-in-build", 84, r"is not compatible with the current pytorch installation"),
    S("arch-not-in-build", 80, r"no kernel image is available"),
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
        unless=_NO_GPU,
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
    S("extension-abi-mismatch", 93, rf"(?:{_EXTENSION})[^\n]{{0,160}}undefined symbol"),
    S(
        "extension-abi-mismatch",
        92,
        r"undefined symbol: _zn?k?\d?(?:2at|3c10|5torch)[^\n]{0,200}",
        unless=r"torch(?:vision|audio)[^\n]{0,80}undefined symbol|(?:lib(?:torch|c10|shm)\w{0,20}\.so|/torch/_c[\w.-]{0,60}\.so)[^\n]{0,40}undefined symbol|image python extension",
    ),
    S("extension-abi-mismatch", 90, r"xformers can.?t load c\+\+/cuda extensions|xformers was built for"),
    S("extension-abi-mismatch", 88, rf"(?:{_EXTENSION})[^\n]{{0,80}}dll load failed"),
    S(
        "extension-abi-mismatch",
        76,
        rf"(?:{_EXTENSION})[^\n]{{0,80}}(?:stops? (?:importing|working)|(?:no longer|cannot be|can.t be|not) import|fails? (?:to|at|on) import|import(?:ing)? fails|\babi\b)",
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
    S("numpy2-abi", 92, r"_array_api not found"),
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
        r"cudnn version incompatibility|pytorch was compiled +against +\(?\d[^\n]{0,60}but (?:found )?(?:linked|runtime|found)",
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

GPUS = (
    S("exclusive-compute-mode", 86, r"exclusive[_ -]?(?:process|thread|mode|compute)|e\. process"),
    S(
        "exclusive-compute-mode",
        74,
        r"cuda-capable device(?:s|\(s\))? (?:are|is|is/are) busy or unavailable|cudaerrordevicesunavailable",
        unless=r"error 46[^\n]{0,80}mig|default",
    ),
    S(
        "mig-single-device",
        84,
        r"\bmig\b[- _]?(?:\d+g|slice|instance|device|uuid|partition|gpu)|multi-instance",
        unless=r"mig[^\n]{0,12}(?:disabled|n/a|off\b|mode: disabled)",
    ),
    S("bios-large-bar-off", 96, r"pci i/o region assigned to your nvidia device is invalid|bar ?\d? is 0m"),
    S("bios-large-bar-off", 90, r"above[ -]?4g|resi[sz]able[ -]bar|re-?bar\b|large bar"),
    S(
        "bios-large-bar-off",
        76,
        r"rminitadapter failed|adapter (?:failing|fails|failed) to initiali[sz]e",
        unless=r"gsp|open kernel modules|uncorrectable|fallen off",
    ),
    S("bios-large-bar-off", 74, r"bar \d{1,2}[^\n]{0,60}(?:can.t assign|no space|failed to assign)"),
    S(
        "gpu-ecc-error",
        95,
        r"uncorrectable ecc error|cudaerroreccuncorrectable|double[ -]bit (?:ecc )?error",
        unless=r"\bno (?:uncorrectable|double)",
    ),
    S(
        "gpu-ecc-error",
        90,
        r"(?:dram|sram|device memory) uncorrectable {0,40}: [1-9]|remapping failure occurred {0,40}: yes",
    ),
    S(
        "gpu-ecc-error",
        92,
        r"row[ -]?remap\w{0,5}[^\n]{0,60}(?:fail|pending: ?yes)|remapping failure occurred[ :]{1,4}yes|(?:contained|uncontained) (?:ecc|memory) error",
    ),
    S(
        "gpu-ecc-error",
        72,
        r"(?:defective|faulty|broken|bad|failing) (?:gpu|card|vram|gpu memory|memory)|\brma\b[^\n]{0,30}(?:gpu|card|board)|(?:gpu|card|board)[^\n]{0,30}\brma\b|ecc error",
        unless=r"no (?:uncorrectable |double[ -]bit )?ecc error|0 ecc error|memory leak|ecc errors?\s{1,60}volatile",
    ),
    S(
        "gpu-lost",
        92,
        r"gpu is lost|fallen off the bus|gpu has fallen|nvml_error_gpu_is_lost|unable to determine the device handle",
    ),
    S("gpu-inforom-corrupted", 80, r"inforom is corrupted"),
    S(
        "p2p-blocked-by-acs-iommu",
        90,
        r"intel_iommu ?= ?o|amd_iommu ?= ?o|iommu ?= ?(?:pt|off|on|soft)|pci ?= ?noacs|acsctl|\bacs\b[^\n]{0,60}(?:on|enabled|redirect|p2p|bridge)|disabl\w{1,4} (?:pcie? )?acs\b|io_page_fault|dmar[^\n]{0,60}fault",
    ),
    S(
        "p2p-blocked-by-acs-iommu",
        84,
        r"\biommu\b",
        also=_HANG + r"|p2p|peer|nccl|corrupt|garbage|wrong result|\bddp\b",
        unless=r"iommu[^\n]{0,12}(?:disabled|off\b)",
    ),
    S("p2p-blocked-by-acs-iommu", 82, r"nccl_p2p_disable", also=_HANG, unless=_NO_HELP),
    S(
        "p2p-blocked-by-acs-iommu",
        74,
        r"(?:p2p|peer[- ]to[- ]peer|peer access)[^\n]{0,80}(?:hang|deadlock|corrupt|wrong|stall|slow|fail|broken)|simplep2p|p2pbandwidth",
    ),
)

LIMITS = (
    S("shm-too-small", 97, r"insufficient shared memory"),
    S(
        "shm-too-small",
        96,
        r"(?:creating|attach\w{0,4}|open\w{0,3}|extend\w{0,4}) (?:to )?shared memory segment|/dev/shm/nccl|no space left on device[^\n]{0,60}(?:shm|torch_)|shm[^\n]{0,60}no space left",
    ),
    S(
        "shm-too-small",
        86,
        r"bus error",
        also=r"worker|dataloader|data loader|shm|shared memory|docker|container|nccl",
    ),
    S(
        "shm-too-small",
        84,
        r"shm[-_]size|/dev/shm[^\n]{0,60}(?:full|small|64 ?m|limit)|shared memory (?:is |was )?(?:too small|full|exhausted|limit)|out of shared memory",
    ),
    S(
        "shm-too-small",
        74,
        r"unable to (?:open|mmap|write to) (?:shared memory|file)[^\n]{0,60}(?:torch_|shm)|unable to allocate shared memory",
    ),
    S(
        "shm-too-small",
        64,
        r"(?:--)?ipc[= :]host",
        also=r"bus error|shared memory|killed|dead-?lock|fixe[sd]|solve|helps|cures",
    ),
    S(
        "memlock-limit-too-low",
        94,
        r"ibv_(?:reg_mr|create_cq|create_qp|reg_mr_iova2?)[^\n]{0,60}(?:failed|cannot allocate)",
    ),
    S(
        "memlock-limit-too-low",
        88,
        r"memlock|locked[- ]memory|ulimit -l\b|register memory",
        also=r"\bib\b|infiniband|rdma|roce|ibv|ucx|mlx|efa|nccl",
        unless=r"memlock[^\n]{0,12}unlimited",
    ),
    S("hostname-resolves-to-loopback", 86, r"unable to resolve hostname to a \(local\) address"),
    S(
        "hostname-resolves-to-loopback",
        78,
        r"(?:connect\w{0,4}|remote=)[^\n]{0,40}\[?127\.0\.[01]\.1\]?:\d",
        also=r"gloo|nnodes|nodes|refused",
        unless=r"single node",
    ),
    S(
        "hostname-resolves-to-loopback",
        88,
        r"(?:host ?name|own name|/etc/hosts|gethostbyname)[^\n]{0,80}127\.0\.[01]\.1|127\.0\.[01]\.1[^\n]{0,60}(?:host ?name|/etc/hosts)|resolves? to (?:127|loopback|localhost|the loopback)",
    ),
    S(
        "hostname-resolves-to-loopback",
        70,
        r"127\.0\.[01]\.1",
        also=r"(?:two|2|several|multiple|second|other|multi)[- ]?(?:nodes?|machines?|hosts?)|nnodes|gloo",
        unless=r"address already in use|single node|nproc_per_node[^\n]{0,30}$",
    ),
    S("too-many-open-files", 90, r"too many open files"),
    S("disk-full", 86, r"no space left on device|disk quota exceeded", unless=r"shm|shared memory"),
)

VARIABLES = (
    S(
        "cuda-visible-devices-invalid",
        84,
        r"cuda_visible_devices[^\n]{0,120}(?:not exist|nonexist|non-exist|hides?|invalid|wrong|empty|out of range|no such|too (?:high|large))",
    ),
    S(
        "cuda-visible-devices-invalid",
        80,
        r"(?:selects?|asks? for|hard-?codes?|uses?) (?:gpus?|devices?|gpu ids?)[^\n]{0,50}(?:not exist|nonexist|missing|not there)",
    ),
    S(
        "cuda-visible-devices-invalid",
        62,
        r"no cuda gpus are available|no cuda-capable device is detected",
        also=r"cuda_visible_devices",
    ),
    S("cuda-visible-devices-invalid", 44, r"no cuda gpus are available"),
    S(
        "cuda-visible-devices-set-too-late",
        88,
        r"(?:set|assign|chang|export|modif)\w{0,4}[^\n]{0,80}cuda_visible_devices[^\n]{0,120}(?:after (?:\S{1,20} ){0,2}(?:import|torch|cuda|the first|init)|too late)|cuda_visible_devices[^\n]{0,120}(?:after|before) (?:\S{1,20} )?(?:import|torch|cuda|the first)|cuda_visible_devices[^\n]{0,60}too late",
    ),
    S(
        "cuda-visible-devices-set-too-late",
        78,
        r"cuda_visible_devices[^\n]{0,80}(?:no effect|not (?:take|taking|respected|work|effective|honou?red)|ignored|does nothing|doesn.t (?:work|have|change))|(?:ignor|not respect)\w{0,4} (?:the )?cuda_visible_devices",
    ),
    S(
        "cuda-visible-devices-set-too-late",
        76,
        r"os\.environ\[.cuda_visible_devices.\]",
        also=r"(?:still|always) (?:\w{1,20} ){0,4}(?:gpu|cuda|device|card)|all \w{1,6} ?gpus are|no effect|not work|ignored|does nothing",
    ),
)

# A subject in one place and trouble in another: what people write who quote no message.
SUBJECTS = (
    S(
        "driver-library-mismatch",
        66,
        r"version mismatch[^\n]{0,40}(?:nvidia-smi|nvml|driver)|(?:nvidia-smi|nvml|driver)[^\n]{0,60}(?:version )?mismatch|(?:libnvidia-ml|libcuda)[^\n]{0,30}(?:another|different|other|wrong) (?:driver )?version",
        unless=r"cuda version mismatch|cudnn",
    ),
    S(
        "kernel-module-not-loaded",
        72,
        r"\bakmods?\b|(?:build|built|compiled?)[^\n]{0,30}modules? for (?:the |this )?(?:new |running |current )?kernel|(?:no|not|without|missing) [^\n]{0,30}module for (?:the |this )?(?:new |running |current )?kernel",
        also=r"nvidia|driver|gpu|[rg]tx",
    ),
    S(
        "p2p-blocked-by-acs-iommu",
        64,
        r"(?<!via )\bp2p\b(?!/)|peer[- ]to[- ]peer|\bacs\b|\bvt-d\b|access control services",
        also=_HANG,
        unless=_NO_HELP,
    ),
    S(
        "duplicate-torch-install",
        66,
        r"(?:two|2|several|multiple|different|both) (?:different )?(?:versions?|copies|installs?|installations?|builds?) of (?:py)?torch|torch[^\n]{0,30}\(?(?:conda|pip)\)?[^\n]{0,12} and [^\n]{0,20}(?:pip|conda)\b|torch[^\n]{0,60}(?:user'?s? home|user site)",
    ),
    S(
        "duplicate-torch-install",
        62,
        r"(?:lib(?:torch|c10|shm)\w{0,20}\.so(?:\.\d)?|/torch/_c[\w.-]{0,60}\.so): undefined symbol: (?!ijit|p?nccl|cu[a-z]|__nv|mkl|iomp)",
    ),
    S("exclusive-compute-mode", 66, r"busy or unavailable"),
    S(
        "container-toolkit-missing",
        66,
        r"(?:does not|doesn.t|not) (?:know|recogni[sz]e|find|have) (?:the |an? )?.?nvidia.? runtime|no (?:such )?.?nvidia.? runtime|nvidia[- ]docker2? (?:is )?(?:not|missing)|nvidia runtime[^\n]{0,30}(?:missing|not)",
    ),
    S(
        "container-without-gpus",
        68,
        r"(?:plain|simple|bare|normal|just) .?docker run|no gpu (?:reservation|section|request|option)|gpus? (?:was |were )?not passed|without passing (?:the )?gpus?|no gpus? (?:is |are )?(?:passed|mounted|requested|assigned|attached)|(?:no|without) .?--nv\b",
    ),
    S(
        "container-lost-gpu-cgroup",
        70,
        r"(?:gpu|device|card|nvml|nvidia-smi|cuda)\w{0,2}[^\n]{0,60}(?:disappear|vanish|lost|gone|goes away|unknown error)",
        also=_CONTAINER,
        unless=r"cuda unknown error|fallen off|error 999",
    ),
    S("extension-abi-mismatch", 72, rf"undefined symbol[^\n]{{0,80}}(?:{_EXTENSION})"),
    S(
        "extension-abi-mismatch",
        64,
        rf"(?:{_EXTENSION})[^\n]{{0,60}}(?:unavailable|not available|broken|incompatible|stopped|crash)[^\n]{{0,40}}(?:upgrade|update|new|torch)|(?:upgrad|updat)\w{{2,3}} (?:py)?torch[^\n]{{0,60}}(?:{_EXTENSION})",
    ),
    S(
        "bios-large-bar-off",
        66,
        r"\bbar ?[0-5]?\b[^\n]{0,30}(?:space|region|size|address|assign|memory|window)|(?:about|no|its|large|pci|a) bars?\b",
        also=r"kernel|pci|bios|gpu|nvidia",
        unless=r"progress bar|status bar|menu bar|colou?r ?bar",
    ),
    S(
        "cuda-libs-not-installed",
        74,
        r"lib(?:cublas|cublaslt|cudart|cufft|cusparse|cusolver|curand|nvrtc|cupti|cudnn|nccl)\.so(?:\.\d{1,3}){0,3} (?:is |was |can(?:no|.)t be |could not be )?(?:missing|not found|found on|absent|not there|found)",
        unless=r"ld_library_path|different versions of|\bfound at\b",
    ),
    S(
        "cuda-libs-not-installed",
        62,
        r"nvidia (?:pip )?(?:packages|wheels|libraries)[^\n]{0,40}(?:not (?:in|installed)|missing)",
    ),
    S(
        "wsl-libcuda-not-on-path",
        66,
        r"(?:finds?|sees?|detects?) no (?:gpu|cuda|device)|gpu (?:is )?not (?:found|detected|recogni[sz]ed|visible|available)|no gpu (?:is )?(?:found|detected)",
        also=r"\bwsl ?2?\b|windows subsystem",
    ),
    S(
        "cuda-visible-devices-set-too-late",
        68,
        r"cuda_visible_devices[^\n]{0,60}(?:in|inside|from|within) (?:the |my |a |python )?(?:script|code|program|python|main)[^\n]{0,60}(?:not|no effect|nothing|ignored|always|still)",
    ),
    S(
        "shm-too-small",
        62,
        r"shared memory|/dev/shm|\bshm\b",
        also=r"bus error|killed|no space|too small|\bfull\b|limit|exhaust|insufficient|hang|dead-?lock|crash|64 ?m",
        unless=r"via shm|triton|outofresources|smem|kernel[^\n]{0,40}shared memory|shared memory per block|shared memory across|multi_?threaded_shared_memory",
    ),
    S(
        "gpu-too-old-for-build",
        64,
        r"(?:gpu|card|device) (?:is |was )?(?:too old|no longer supported)|(?:too|very) old (?:gpu|card|device)",
    ),
    S(
        "arch-not-in-build",
        62,
        r"\bsm_?(?:8\d|9\d|1[02]\d)\b",
        also=r"not (?:supported|compatible|compiled|included)|unsupported|incompatible|no kernel|invalid device function",
    ),
    S(
        "driver-too-old",
        58,
        r"(?:newer|update|upgrade) (?:the |your |of the |a |to a newer )?(?:nvidia |gpu |host )?driver|driver[^\n]{0,40}(?:too old|outdated|insufficient|not new enough|needs? (?:an )?(?:update|upgrade))",
    ),
    S(
        "torch-torchvision-mismatch",
        57,
        r"torchvision",
        also=r"\bnms\b|undefined symbol|custom (?:c\+\+ )?op|no attribute .extension",
        unless=r"cuda. backend|different cuda",
    ),
    S(
        "hostname-resolves-to-loopback",
        64,
        r"(?:host ?name|own name|node.?s name|/etc/hosts)[^\n]{0,80}(?:127\.0\.|localhost|loopback)",
    ),
    S(
        "cuda-visible-devices-invalid",
        61,
        r"cuda_visible_devices",
        also=r"no cuda gpus are available|invalid device ordinal|no cuda-capable device",
    ),
    S(
        "fabricmanager-not-running",
        62,
        r"nvswitch|\bhgx\b|\bdgx\b",
        also=r"\b802\b|cuda (?:never|does not|cannot|fails)|not (?:yet )?initiali",
    ),
    S("libstdcxx-too-old", 62, r"glibcxx|cxxabi", also=r"missing|not found|too old|older"),
    S(
        "nccl-library-mismatch",
        64,
        r"(?:lib)?nccl[^\n]{0,60}(?:system|other|different|older|wrong) (?:version|library|one)|nccl (?:is |was )?(?:loaded|taken|found) from",
        unless=r"same version",
    ),
    S(
        "numpy2-abi",
        61,
        r"numpy[^\n]{0,30}\b2\.\d",
        also=r"compiled|abi|incompatib|not available|initiali[sz]e numpy",
    ),
    S(
        "memlock-limit-too-low",
        64,
        r"ibv_\w{4,20}[^\n]{0,40}(?:fail|cannot allocate|enomem)|memory registration[^\n]{0,30}fail",
    ),
    S(
        "gpu-ecc-error",
        66,
        r"(?:uncorrectable|double.bit|remapp?ed rows?|page retire)[^\n]{0,60}(?:ecc|memory|error|gpu|failed)|\becc\b[^\n]{0,30}(?:errors?|fault)",
        unless=r"\bno (?:uncorrectable |double[ -]bit )?ecc|0 ecc|ecc: ?0|uncorr\. ecc|(?:uncorrectable|error|pending|occurred) {0,40}: (?:0|no|n/a)\b|ecc errors?\s{1,60}volatile",
    ),
    S(
        "mig-single-device",
        62,
        r"\bmig\b",
        also=r"only one|single|one device|fails?|error|ddp|distributed",
        unless=r"mig[^\n]{0,12}(?:disabled|n/a|off\b)|mig mode\s{1,60}current\s{1,60}: (?:disabled|n/a)",
    ),
    S("libuv-missing-windows", 66, r"\buv\b[^\n]{0,30}(?:store|backend)|tcpstore[^\n]{0,60}libuv"),
    S(
        "jetson-wrong-wheel",
        61,
        r"\bjetson|\bl4t\b|\bjetpack",
        also=r"false|not available|unavailable|no gpu|cpu|pip (?:install|wheel)",
    ),
)

SYMPTOMS = (*DRIVER, *CONTAINERS, *BUILDS, *COMPANIONS, *LIBRARIES, *GPUS, *LIMITS, *VARIABLES, *SUBJECTS)
