"""Symptoms of drivers, containers, GPUs, limits and variables."""

from __future__ import annotations

from phalanx.tools.doctor.symptom_words import CONTAINER, HANG, NO_GPU, NO_HELP
from phalanx.tools.doctor.symptoms import Symptom as S

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
    S("driver-library-mismatch", 60, r"nvidia-smi works on the host.{0,40}fail", also=CONTAINER),
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
        also=CONTAINER,
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
        also=CONTAINER,
        unless=NO_GPU + r"|--gpus|runtime[= ]{1,2}nvidia|gpus:|nvidia\.com/gpu|capabilities:",
    ),
    S(
        "container-without-gpus",
        87,
        r"(?:docker|podman)(?: container)? run (?![^\n]{0,400}(?:--gpus|nvidia|--device|--runtime))",
        also=r"nvidia-smi: (?:command )?not found|nvidia-smi[^\n]{0,20}not found|found no nvidia driver|is_available\(\)[^\n]{0,20}\n?[^\n]{0,12}\b(?:false|flase)|(?:cuda|gpu)s? (?:is |are )?(?:not (?:available|found|visible|detected)|unavailable)|no gpu|sees? no",
        unless=NO_GPU + r"|--gpus|runtime[= ]{1,2}nvidia|nvidia\.com/gpu",
    ),
    S(
        "container-without-gpus",
        64,
        r"(?:container|docker|pod).{0,80}(?:sees? no|no|cannot see|can.t see|does not see|not see|none of the|without) (?:the |any )?(?:gpu|cuda|nvidia)",
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
        also=HANG + r"|p2p|peer|nccl|corrupt|garbage|wrong result|\bddp\b",
        unless=r"iommu[^\n]{0,12}(?:disabled|off\b)",
    ),
    S("p2p-blocked-by-acs-iommu", 82, r"nccl_p2p_disable", also=HANG, unless=NO_HELP),
    S(
        "p2p-blocked-by-acs-iommu",
        74,
        r"(?:p2p|peer[- ]to[- ]peer|peer access)[^\n]{0,80}(?:hang|deadlock|corrupt|wrong|stall|slow|fail|broken)|simplep2p|p2pbandwidth",
    ),
)

LIMITS = (
    S("shm-too-small", 97, r"insufficient shared memory"),
    S("shm-too-small", 94, r"posix_fallocate[^\n]{0,20}fail|ncclshmopen|nccl-shm-"),
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
        r"(?:connect\w{0,4}|remote=)[^\n]{0,40}\[?(?:127\.0\.[01]\.1|::1)\]?:\d",
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
    S(
        "disk-full",
        86,
        r"no space left on device|disk quota exceeded",
        unless=r"shm|shared memory|posix_fallocate",
    ),
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
        r"no cuda gpus are available|no cuda-capable device is detected|cuda_error_no_device",
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
