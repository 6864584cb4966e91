"""A subject in one place and trouble in another: what people write who quote no message."""

from __future__ import annotations

from phalanx.tools.doctor.symptom_words import CONTAINER, EXTENSION, HANG, NO_HELP
from phalanx.tools.doctor.symptoms import Symptom as S

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
        also=HANG,
        unless=NO_HELP,
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
        84,
        r"(?:plain|simple|bare|normal|just) .?docker run|no gpu (?:reservation|section|request|option)|gpus? (?:was |were )?not passed|without passing (?:the )?gpus?|no gpus? (?:is |are )?(?:passed|mounted|requested|assigned|attached)|(?:no|without) .?--nv\b",
    ),
    S(
        "container-lost-gpu-cgroup",
        70,
        r"(?:gpu|device|card|nvml|nvidia-smi|cuda)\w{0,2}[^\n]{0,60}(?:disappear|vanish|lost|gone|goes away|unknown error)",
        also=CONTAINER,
        unless=r"cuda unknown error|fallen off|error 999",
    ),
    S("extension-abi-mismatch", 72, rf"undefined symbol[^\n]{{0,80}}(?:{EXTENSION})"),
    S(
        "extension-abi-mismatch",
        64,
        rf"(?:{EXTENSION})[^\n]{{0,60}}(?:unavailable|not available|broken|incompatible|stopped|crash)[^\n]{{0,40}}(?:upgrade|update|new|torch)|(?:upgrad|updat)\w{{2,3}} (?:py)?torch[^\n]{{0,60}}(?:{EXTENSION})",
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
        "wsl-libcuda-not-on-path",
        68,
        r"(?:unable|cannot|can.t|could not|couldn.t|fail\w{0,3}) (?:to )?(?:find|load|open|locate|link)[^\n]{0,60}(?:cuda|nvidia)[^\n]{0,40}(?:\blib|librar|driver|nvcuda|shared)",
        also=r"\bwsl ?2?\b|windows subsystem",
    ),
    S(
        "cuda-visible-devices-set-too-late",
        72,
        r"cuda_visible_devices",
        also=r"(?:consistently|always|still|by default|keeps?|only ever) (?:\w{1,20} ){0,5}(?:gpu|cuda|device|card)s?:? ?(?:index )?(?:0|zero|first|one\b)|(?:first|wrong|default) (?:gpu|card|device) (?:is |gets )?(?:always|still|used)|(?:always|still) (?:\w{1,12} ){0,3}(?:the )?first (?:gpu|card|device)",
        unless=r"no cuda gpus are available|invalid device ordinal",
    ),
    S(
        "cuda-visible-devices-set-too-late",
        74,
        r"cuda_visible_devices",
        also=r"(?:revers|swap|mov|put|plac|sett?)\w{0,4} [^\n]{0,60}(?:both|order|before|above|top|earlier|first line)[^\n]{0,60}(?:works?|fix|solve|helps|effect)",
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
