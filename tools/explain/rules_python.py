"""Rules: plain Python exceptions whose cause is as plain, and what libraries around training raise."""

from __future__ import annotations

from phalanx.tools.explain.rule import Rule

RULES = (
    Rule(
        id="missing-module",
        when=("no module named",),
        patterns=(
            r"(?:ModuleNotFoundError|ImportError): No module named '?(?P<module>[\w.]{1,80})'?",
            r"No module named '?(?P<module>[\w.]{1,80})'?$",
        ),
        cause=("the Python that ran this has no module {module}",),
        fix=(
            "python -m pip install {module} with the Python that runs the ranks; a module of your own: start in its folder, or PYTHONPATH",
        ),
        look=("whether every node has the same environment: which python",),
        exception=True,
        weight=60,
    ),
    Rule(
        id="import-error",
        when=("cannot import name", "importerror", "dll load failed"),
        patterns=(
            r"cannot import name '(?P<name>\w{1,80})' from (?:partially initialized module )?'?(?P<module>[\w.]{1,120})",
            r"ImportError: (?P<what>[^\n]{1,200})",
            r"DLL load failed",
        ),
        cause=(
            "{module} has no {name}: its version is another than the code was written for",
            "an import failed: {what}",
            "an import failed",
        ),
        fix=(
            "pip show {module} and the version that the code asks for",
            "install the version that the code asks for",
        ),
        exception=True,
        weight=52,
    ),
    Rule(
        id="file-not-found",
        when=("no such file", "filenotfounderror", "can't open file"),
        patterns=(
            r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>[^'\n]{1,300})'",
            r"can't open file '(?P<path>[^'\n]{1,300})': \[Errno 2\]",
            r"FileNotFoundError: (?P<what>[^\n]{1,200})",
            r"\[WinError [23]\][^\n]{0,80}",
        ),
        cause=("{path} is not there", "a file is not there: {what}", "a file is not there"),
        fix=(
            "check the path on the node of that rank: relative paths start at the folder of the start, and not every disk is shared",
        ),
        look=("a file that rank 0 makes and the others read at once: rank_zero_first()",),
        weight=56,
    ),
    Rule(
        id="permission-denied",
        when=("permission denied", "permissionerror", "access is denied"),
        patterns=(
            r"(?:PermissionError: )\[Errno 13\] Permission denied: '(?P<path>[^'\n]{1,300})'",
            r"PermissionError: [^\n]{0,200}|\[Errno 13\] Permission denied",
        ),
        unless=(r"publickey|Permission denied \(",),
        cause=(
            "{path} may not be read or written by this user",
            "a file may not be read or written by this user",
        ),
        fix=(
            "ls -ld {path}; write elsewhere, or run as the user who owns it",
            "write elsewhere, or run as the user who owns it",
        ),
        weight=56,
    ),
    Rule(
        id="read-only-file-system",
        when=("read-only file system",),
        patterns=(r"Read-only file system(?:: '(?P<path>[^'\n]{1,300})')?",),
        cause=("{path} is on a file system that is mounted read-only", "a file system is mounted read-only"),
        fix=("write elsewhere (--output-dir, HF_HOME, TORCH_HOME, TMPDIR), or mount it writable",),
        weight=60,
    ),
    Rule(
        id="file-exists",
        when=("file exists", "fileexistserror"),
        patterns=(r"FileExistsError: \[Errno 17\] File exists: '(?P<path>[^'\n]{1,300})'",),
        cause=("{path} exists already: another rank, or an earlier run, made it",),
        fix=("os.makedirs(path, exist_ok=True); let one rank write: rank_zero_first()",),
        exception=True,
        weight=56,
    ),
    Rule(
        id="syntax-error",
        when=("syntaxerror", "indentationerror", "taberror"),
        patterns=(r"^(?:SyntaxError|IndentationError|TabError): (?P<what>[^\n]{1,200})",),
        cause=("the script does not parse: {what}",),
        fix=(
            "python -m py_compile the file, with the Python that runs the ranks (a newer syntax than it knows?)",
        ),
        exception=True,
        weight=60,
    ),
    Rule(
        id="recursion-limit",
        when=("maximum recursion depth",),
        patterns=(r"maximum recursion depth exceeded",),
        cause=("a function calls itself without end",),
        fix=(
            "the frames that repeat in the traceback are the cycle (often __getattr__ of a wrapper around itself)",
        ),
        weight=55,
    ),
    Rule(
        id="download-failed",
        when=(
            "max retries exceeded",
            "connectionerror",
            "couldn't connect to",
            "urlopen error",
            "localentrynotfound",
            "offline mode",
            "proxyerror",
            "httperror",
            "cannot find the requested files",
            "maxretryerror",
        ),
        patterns=(
            r"couldn'?t connect to '?(?P<host>https?://[\w./-]{3,120})'?",
            r"HTTPSConnectionPool\(host='(?P<host>[\w.-]{3,120})', port=\d+\): (?:Max retries exceeded|Read timed out)",
            r"urlopen error|LocalEntryNotFoundError|Cannot find the requested files in the (?:local|disk) cache|ProxyError|HTTP Error (?P<status>\d{3})",
            r"outgoing traffic has been disabled|offline mode is enabled",
        ),
        cause=(
            "{host} could not be reached: a download failed",
            "a download failed: the network of this node does not reach the server",
        ),
        fix=(
            "download on a node with network first, then HF_HUB_OFFLINE=1 (TORCH_HOME, HF_HOME on a shared disk); a proxy: https_proxy",
        ),
        look=("let one rank download: rank_zero_first()",),
        weight=60,
    ),
    Rule(
        id="model-access-denied",
        when=(
            "gated repo",
            "repositorynotfound",
            "is not a local folder and is not a valid model",
            "unauthorized",
            "client error",
        ),
        patterns=(
            r"(?:gated repo|GatedRepoError|RepositoryNotFoundError|is not a local folder and is not a valid model identifier)|(?:401|403) Client Error",
        ),
        cause=("the model or data set is private, gated, or has another name",),
        fix=("accept its terms on its page, then hf auth login (HF_TOKEN on every node); check the name",),
        weight=66,
        beats=("download-failed", "file-not-found"),
    ),
    Rule(
        id="broken-image-file",
        when=("image file", "unidentifiedimage", "truncated file read"),
        patterns=(
            r"image file is truncated|UnidentifiedImageError|cannot identify image file (?P<path>[^\n]{1,200})|Truncated File Read",
        ),
        cause=("an image cannot be read: {path}", "an image file is cut or damaged"),
        fix=(
            "fetch that file again, or leave it out; PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True takes what is there",
        ),
        weight=66,
        beats=("checkpoint-corrupted",),
    ),
    Rule(
        id="segfault",
        when=("segmentation fault", "sigsegv", "exitcode", "exits with return", "caught signal"),
        patterns=(
            r"Fatal Python error: Segmentation fault|[Ss]egmentation fault \(core dumped\)|Signal 11 \(SIGSEGV\) received by PID (?P<pid>\d+)|died with <Signals\.SIGSEGV",
            r"exitcode ?: ?-11\b|exit(?:s|ed)? with return code = -11|Caught signal 11|SIGSEGV:|signal: Segmentation fault|Segmentation fault$",
        ),
        unless=(r"DataLoader worker|encountered in worker",),
        cause=("a process crashed in native code (segmentation fault)",),
        fix=(
            "PYTHONFAULTHANDLER=1 shows the Python line; then suspect the newest compiled package (an extension built for another torch, two OpenMP libraries)",
        ),
        look=("gdb -batch -ex run -ex bt --args python train.py",),
        weight=58,
    ),
    Rule(
        id="illegal-instruction",
        when=("illegal instruction", "sigill"),
        patterns=(
            r"Illegal instruction(?: \(core dumped\))?$|Signal 4 \(SIGILL\)|exitcode ?: ?-4\b|died with <Signals\.SIGILL|SIGILL:",
        ),
        cause=("the CPU lacks an instruction that a package was compiled for",),
        fix=("a build for this CPU (no AVX-512, no AVX2?): lscpu; nodes of one job may differ",),
        weight=60,
    ),
    Rule(
        id="openmp-twice",
        when=("libiomp", "mkl_threading_layer"),
        patterns=(
            r"Initializing libiomp5\S{0,12}, but found libiomp5|MKL_THREADING_LAYER=INTEL is incompatible with libgomp",
        ),
        cause=("two OpenMP libraries are loaded into one process",),
        fix=(
            "install numpy, scipy and torch from one source (all pip, or all conda); MKL_THREADING_LAYER=GNU, or KMP_DUPLICATE_LIB_OK=TRUE at your own risk",
        ),
        weight=70,
    ),
    Rule(
        id="triton-shared-memory",
        when=("out of resource",),
        patterns=(
            r"out of resource: shared memory, Required: (?P<wanted>\d+), Hardware limit: (?P<limit>\d+)",
        ),
        cause=("a Triton kernel needs {wanted} bytes of the GPU's shared memory, and the GPU has {limit}",),
        fix=(
            "a smaller block size or fewer stages in that kernel; a newer triton or flash-linear-attention",
        ),
        weight=70,
    ),
)
