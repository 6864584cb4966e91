"""Rules: compilers, CUDA toolkits, DeepSpeed's and Triton's builds at run time."""

from __future__ import annotations

from phalanx.tools.explain.rule import Rule

RULES = (
    Rule(
        id="cuda-home-missing",
        when=("cuda_home", "nvcc", "missingcuda"),
        patterns=(
            r"CUDA_HOME environment variable is not set|CUDA_HOME does not exist|MissingCUDAException",
            r"No such file or directory: '[^'\n]{0,120}/bin/nvcc'|(?:sh|bash): (?:line )?\d{0,4}:? ?(?:[\w/.-]{0,80})?nvcc: (?:command )?not found|nvcc not found",
            r"Cannot find CUDA_HOME|CUDA_HOME[^\n]{0,60}(?:is not set|not found|undefined|is unset)",
        ),
        unless=(r"^\s*No CUDA runtime is found",),
        cause=("no CUDA toolkit (nvcc) is found where something must be compiled: CUDA_HOME is not set",),
        fix=(
            "install the toolkit of torch's CUDA version and export CUDA_HOME=/usr/local/cuda (conda: conda install -c nvidia cuda-toolkit)",
            "or a wheel that is compiled already; DS_BUILD_OPS=0 pip install deepspeed needs none to install",
        ),
        weight=74,
        beats=("file-not-found", "import-error"),
    ),
    Rule(
        id="deepspeed-cuda-mismatch",
        when=("installed cuda version", "cudamismatch"),
        patterns=(
            r"Installed CUDA version (?P<nvcc>[\d.]+) does not match the version torch was compiled with (?P<torch>[\d.]+)",
            r"CUDAMismatchException",
        ),
        cause=(
            "DeepSpeed found the CUDA toolkit {nvcc}, and torch was built with {torch}",
            "the CUDA toolkit is another than torch's",
        ),
        fix=(
            "CUDA_HOME=/usr/local/cuda-{torch} with that toolkit installed, or a torch built for CUDA {nvcc}",
            "DS_SKIP_CUDA_CHECK=1 where only the minor version differs",
        ),
        weight=82,
        beats=("deepspeed-op-load-failed", "nvcc-torch-cuda-mismatch"),
    ),
    Rule(
        id="nvcc-torch-cuda-mismatch",
        when=("mismatches the version",),
        patterns=(
            r"detected CUDA version \((?P<nvcc>[\d.]+)\) mismatches the version that was used to compile\s+PyTorch \((?P<torch>[\d.]+)\)",
            r"mismatches the version that was used to compile",
        ),
        cause=(
            "nvcc is of CUDA {nvcc}, and torch was built with {torch}",
            "nvcc's CUDA is another than torch's",
        ),
        fix=(
            "CUDA_HOME=/usr/local/cuda-{torch} with that toolkit installed, or a torch built for CUDA {nvcc}",
            "pip install --no-build-isolation, since an isolated build takes another torch",
        ),
        weight=80,
    ),
    Rule(
        id="deepspeed-op-load-failed",
        when=(
            "torch_extensions",
            "building extension",
            "op_builder",
            "ds_opt_adam",
            "jit load",
            "async_io",
            "fused_adam",
            "cpu_adam",
            "curandcreate",
            "error loading",
        ),
        patterns=(
            r"(?:Error building extension|Error loading extension) '(?P<op>(?:cpu|fused)_?(?:adam|adagrad|lamb|lion)\w{0,20}|utils|async_io|transformer_inference|sparse_attn|quantizer|random_ltd|\w{1,40}_op|inference_\w{1,40}|ragged\w{0,20})'",
            r"Unable to JIT load the (?P<op>\w{1,60}) op",
            r"torch_extensions/[^\n]{1,200}?/(?P<op>\w{1,60})\.so: (?:cannot open shared object file|undefined symbol)[^\n]{0,120}",
            r"has no attribute 'ds_opt_(?P<op>\w{1,40})'",
            r"undefined symbol: curandCreateGenerator|cpu_adam\.so[^\n]{0,80}(?:undefined|cannot open)",
            r"(?:deepspeed|DeepSpeed)[^\n]{0,80}(?:op|ops|extension)[^\n]{0,40}(?:failed to (?:build|load|compile)|not compatible)",
        ),
        cause=(
            "DeepSpeed's op {op} did not build, link or load",
            "a DeepSpeed op did not build, link or load",
        ),
        fix=(
            "rm -rf ~/.cache/torch_extensions, then run it with the compiler's messages in view: ds_report lists what is missing",
            "the usual reasons: no nvcc of torch's CUDA (CUDA_HOME), no ninja or g++, no libcurand for the linker, two ranks building at once",
        ),
        look=("the first `error:` above, from nvcc, g++ or ld",),
        weight=66,
        refine="deepspeed_op",
    ),
    Rule(
        id="deepspeed-batch-size",
        when=("train_batch_size", "train batch size", "batch related parameters", "micro batch size per gpu"),
        patterns=(
            r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size \(?(?P<total>\d+) != (?P<micro>\d+) \* (?P<steps>\d+) \* (?P<world>\d+)",
            r"Check batch related parameters|[Tt]rain batch size: (?P<total>-?\d+) has to be greater than 0|[Mm]icro batch size per gpu: \S{1,20} has to be greater than 0",
            r"Either train_batch_size or (?:train_)?micro_batch(?:_size)?_per_gpu needs to be provided|train_batch_size[^\n]{0,120}(?:not divisible|must be divisible|mismatch|is not equal)",
        ),
        cause=(
            "train_batch_size {total} is not micro batch {micro} x accumulation {steps} x {world} ranks",
            "DeepSpeed's batch sizes do not multiply up: train_batch_size = micro batch x accumulation x ranks",
        ),
        fix=(
            'give two of the three (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps) and leave the third out, or "auto" under transformers',
        ),
        look=("the number of ranks: a job on fewer GPUs than planned",),
        weight=82,
    ),
    Rule(
        id="deepspeed-config-mismatch",
        when=("mismatch trainingarguments",),
        patterns=(r"correct the following DeepSpeed config values that mismatch TrainingArguments",),
        cause=("the DeepSpeed configuration and TrainingArguments contradict each other",),
        fix=('"auto" for those values in the DeepSpeed file',),
        weight=78,
    ),
    Rule(
        id="ninja-missing",
        when=("ninja",),
        patterns=(
            r"Ninja is required to load C\+\+ extensions|No such file or directory: '?ninja'?|ninja: (?:command )?not found|ModuleNotFoundError: No module named 'ninja'|Could not find ninja",
        ),
        cause=("ninja is not on the PATH, and an extension has to be compiled",),
        fix=("pip install ninja, and start from that environment's bin on the PATH (ninja --version)",),
        weight=80,
        beats=("file-not-found", "missing-module", "deepspeed-op-load-failed"),
    ),
    Rule(
        id="gcc-too-new-for-nvcc",
        when=(
            "unsupported gnu version",
            "maximum required version",
            "unsupported clang version",
            "unsupported microsoft visual studio",
            "host_config",
        ),
        patterns=(
            r"unsupported GNU version! gcc versions later than (?P<limit>\d+) are not supported",
            r"current installed version of (?P<compiler>[\w+-]{1,40}) \((?P<version>[\d.]+)\) is greater than the maximum required version by CUDA (?P<cuda>[\d.]+)(?: \((?P<limit>[\d.]+)\))?",
            r"unsupported (?:GNU|clang|Microsoft Visual Studio) version",
        ),
        cause=(
            "{compiler} {version} is newer than CUDA {cuda} allows ({limit})",
            "gcc is newer than this nvcc allows (at most {limit})",
            "the host compiler is newer than this nvcc allows",
        ),
        fix=(
            "install gcc-{limit} and g++-{limit}, then CC=gcc-{limit} CXX=g++-{limit} NVCC_PREPEND_FLAGS='-ccbin g++-{limit}'",
            "an older gcc for nvcc: CC, CXX and NVCC_PREPEND_FLAGS='-ccbin ..'",
            "or a newer CUDA toolkit",
        ),
        weight=86,
        beats=("deepspeed-op-load-failed",),
    ),
    Rule(
        id="nvcc-too-old-for-gpu",
        when=("unsupported gpu architecture", "unknown cuda arch", "is not defined for option"),
        patterns=(
            r"nvcc fatal {0,4}: Unsupported gpu architecture '(?P<arch>compute_\w+)'|Unknown CUDA arch \((?P<arch2>[\d.]+)\)|Value '(?P<arch3>sm_\w+)' is not defined for option 'gpu-name'",
        ),
        cause=(
            "the CUDA toolkit's compiler does not know the GPU's architecture ({arch})",
            "the CUDA toolkit's compiler does not know the GPU's architecture",
        ),
        fix=(
            "a newer CUDA toolkit (CUDA_HOME) or a newer torch and triton; or TORCH_CUDA_ARCH_LIST with one that it knows and +PTX",
        ),
        weight=84,
        beats=("deepspeed-op-load-failed", "arch-not-in-build"),
    ),
    Rule(
        id="compiler-missing",
        when=(
            "c compiler",
            "'g++'",
            "'gcc'",
            "'c++'",
            "g++: not found",
            "gcc: not found",
            "cl.exe",
            "where', 'cl",
        ),
        patterns=(
            r"Failed to find C compiler|No such file or directory: '(?:gcc|g\+\+|c\+\+|x86_64-linux-gnu-g(?:cc|\+\+))'|(?:gcc|g\+\+|c\+\+): (?:command )?not found|InvalidCxxCompiler|No working C\+\+ compiler|Command '\['where', 'cl'\]'|'cl' is not recognized|Compiler: cl is not found",
        ),
        cause=("no C/C++ compiler is found where something must be compiled",),
        fix=(
            "apt-get install build-essential (or module load gcc), and CC=gcc CXX=g++ if they have other names",
        ),
        weight=76,
        beats=("file-not-found",),
    ),
    Rule(
        id="python-headers-missing",
        when=("python.h",),
        patterns=(r"Python\.h: No such file or directory",),
        cause=("Python's C headers are missing, and Triton or an extension compiles against them",),
        fix=(
            "apt-get install python3-dev (python3.X-dev of this Python), or a conda Python, which has them",
        ),
        weight=80,
        beats=("deepspeed-op-load-failed",),
    ),
    Rule(
        id="extension-build-failed",
        when=("error building extension", "error compiling objects", "building wheel"),
        patterns=(
            r"Error building extension '(?P<name>[\w.-]{1,80})'|Error compiling objects for extension",
        ),
        cause=("the extension {name} did not compile", "an extension did not compile"),
        fix=("the first `error:` above it says why; MAX_JOBS=2 if the compiler was killed",),
        kind="symptom",
        weight=50,
    ),
)
