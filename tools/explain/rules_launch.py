"""Rules: launchers, rendezvous, schedulers, signals."""

from __future__ import annotations

from phalanx.tools.explain.rule import Rule

RULES = (
    Rule(
        id="launcher-env-missing",
        when=("expected, but not set", "keyerror", "environment variable"),
        patterns=(
            r"environment variable (?P<name>RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_RANK) expected, but not set",
            r"KeyError: '(?P<name>RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|LOCAL_WORLD_SIZE|OMPI_COMM_WORLD_\w{1,30}|SLURM_(?:PROCID|NTASKS|LOCALID)|GROUP_RANK)'",
            r"(?P<name>RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)[^\n]{0,30} (?:is|are) (?:not set|unset|missing)",
            r"rendezvous[^\n]{0,40}: environment variable",
        ),
        cause=(
            "{name} is not set: the script was started without a launcher",
            "a launcher's variables are not set: the script was started without one",
        ),
        fix=(
            "phalanx run --nproc-per-node N train.py (or torchrun, or srun with one task per GPU)",
            "a single process: init_world() needs no variables",
        ),
        look=("srun sets SLURM_PROCID, not RANK: init_world() reads it",),
        weight=75,
    ),
    Rule(
        id="local-rank-argument",
        when=("local-rank", "local_rank"),
        patterns=(
            r"unrecognized arguments:[^\n]{0,300}?(?P<option>--local[-_]rank)\b",
            r"(?:no such option|unknown option|unrecognized option|Could not consume arg|Got unexpected|UNRECOGNIZED)[^\n]{0,20}? ?'?(?P<option>--local[-_]rank)",
            r"arguments are required: (?:[^\n]{0,100}, )?(?P<option>--local[-_]rank)",
            r"(?:Some specified arguments are not used|ValueError)[^\n]{0,120}(?P<option>--local[-_]rank)",
        ),
        cause=("the launcher passed {option}, and the script does not take it in that spelling",),
        fix=(
            "read int(os.environ['LOCAL_RANK']) and start by phalanx run or torchrun, which pass no such argument",
            "or accept both: parser.add_argument('--local-rank', '--local_rank', type=int)",
        ),
        look=(
            "python -m torch.distributed.launch passes --local-rank since torch 2.0 and --local_rank before; --use-env passes none",
        ),
        weight=85,
        beats=("arguments-refused",),
    ),
    Rule(
        id="arguments-refused",
        when=("unrecognized arguments", "arguments are required", "invalid choice", "no such option"),
        patterns=(
            r"error: unrecognized arguments: (?P<words>[^\n]{1,200})",
            r"error: the following arguments are required: (?P<words>[^\n]{1,200})",
            r"error: argument (?P<words>[^\n]{1,60}): invalid",
        ),
        cause=("the script does not take these arguments: {words}",),
        fix=("options of the launcher go before the script's name, the script's own after it",),
        weight=55,
    ),
    Rule(
        id="invalid-device-ordinal",
        when=("invalid device ordinal", "invalid device id", "device ordinal", "invaliddevice"),
        patterns=(
            r"invalid device ordinal|cudaErrorInvalidDevice\b|hipErrorInvalidDevice",
            r"AssertionError: Invalid device id|Invalid device id|device ordinal(?:[^\n]{0,30}) out of range",
        ),
        cause=(
            "a rank asked for a GPU that it cannot see: there are more local ranks than visible GPUs, or the index counts others than the visible ones",
        ),
        fix=(
            "as many ranks per node as visible GPUs: phalanx run --nproc-per-node gpu",
            "indices count within CUDA_VISIBLE_DEVICES: with CUDA_VISIBLE_DEVICES=2,3 they are 0 and 1; use LOCAL_RANK, not RANK",
        ),
        look=(
            "phalanx gpus; echo $CUDA_VISIBLE_DEVICES on that node; srun --gpus-per-task=1 shows one GPU to each task",
        ),
        weight=72,
    ),
    Rule(
        id="fewer-gpus-than-requested",
        when=(
            "requested gpu",
            "but your machine only has",
            "gpus are available",
            "available gpus",
            "gpus available",
            "gpu",
            "no slot",
            "device_count",
        ),
        patterns=(
            r"requested gpu[s]?: ?\[?(?P<asked>[\d, ]{1,40})\]?[^\n]{0,20}\s*But your machine only has: ?\[?(?P<there>[\d, ]{0,40})",
            r"(?:requested|asked for|needs?|require[sd]?|specified|expected) (?:for )?(?P<asked>\d+) GPUs?[^\n]{0,60}(?:only|but)[^\n]{0,30}?(?P<there>\d+)",
            r"But your machine only has",
            r"number of required GPUs exceeds the total number of available GPUs|world size \(?(?P<asked>\d+)\)? (?:is )?(?:larger|greater) than (?:the )?(?:number of )?available (?:GPUs|devices) \(?(?P<there>\d+)",
            r"No slot '(?P<slot>\d+)' specified on host|Insufficient nvidia\.com/gpu",
            r"not enough GPUs|(?:nproc_per_node|nproc-per-node|num_gpus|world_size|ngpus?)[^\n]{0,60}(?:exceeds?|more than|greater than|larger than|<=|>)[^\n]{0,60}(?:device_count|available|GPUs)",
            r"using (?P<asked>\d+) ranks per node[^\n]{0,60}(?P<there>\d+) GPUs?|local ranks for \d+ GPUs",
            r"AssertionError:[^\n]{0,80}(?:num_gpus|ngpus?|gpus)[^\n]{0,60}device_count",
        ),
        cause=(
            "the job wants GPUs {asked}, and this machine shows {there}",
            "GPU {slot} was asked for, and the machine shows fewer",
            "the job wants more GPUs than the allocation shows",
        ),
        fix=(
            "ask the scheduler for them (--gpus-per-node, resources.limits), or start fewer ranks: phalanx run --gpus all",
        ),
        look=("phalanx gpus; CUDA_VISIBLE_DEVICES and SLURM_GPUS_ON_NODE on that node",),
        weight=68,
    ),
    Rule(
        id="port-in-use",
        when=(
            "address already in use",
            "eaddrinuse",
            "another process is utilizing it",
            "only one usage of each socket address",
            "failed to bind",
        ),
        patterns=(
            r"(?:server socket|bind)[^\n]{0,200}?(?:\[?(?:\[::\]|0\.0\.0\.0|[\w.-]{1,60})\]?:|port: ?)(?P<port>\d{2,5})[^\n]{0,200}(?:Address already in use|EADDRINUSE)",
            r"communication on port `(?P<port>\d+)`, but another process is utilizing it",
            r"[Aa]ddress already in use|EADDRINUSE|\[Errno 98\]|Only one usage of each socket address",
        ),
        unless=(r"tensorboard|jupyter|gradio|uvicorn|visdom|prometheus|metrics port|retry(?:ing)? with",),
        cause=(
            "port {port} belongs to another job, or to an earlier run of this one",
            "the rendezvous port belongs to another job, or to an earlier run of this one",
        ),
        fix=(
            "another port: --master-port 29511 (or --rdzv-endpoint HOST:0, torchrun --standalone); phalanx run chooses a free one",
            "an earlier run: end what is left of it (ss -ltnp | grep {port})",
        ),
        refine="port",
        look=("with Slurm: srun must start the launcher once per node, not once per GPU",),
        weight=74,
        beats=("rendezvous-timeout",),
    ),
    Rule(
        id="launcher-started-many-times",
        when=("ntasks", "tasks per node", "torchrun", "torch.distributed.run", "omp_num_threads"),
        patterns=(
            r"number of tasks per node configured in SLURM `?--ntasks-per-node=(?P<tasks>\d+)`? does not match",
            r"You set `?(?:--ntasks|ntasks)=(?P<tasks>\d+)`? in your SLURM bash script, but this variable is not supported",
        ),
        cause=(
            "the launcher was started {tasks} times on a node, once per task, instead of once",
            "the launcher was started once per task instead of once per node",
        ),
        fix=(
            "#SBATCH --ntasks-per-node=1 with a launcher (phalanx run, torchrun), or srun with one task per GPU and no launcher",
        ),
        refine="many_launchers",
        weight=76,
        beats=("port-in-use",),
    ),
    Rule(
        id="rendezvous-no-host",
        when=("connection refused", "econnrefused", "errno: "),
        patterns=(
            r"client socket has failed to connect to \[?(?P<host>[\w.:-]{1,100}?)\]?:(?P<port>\d+) \(errno: 111",
            r"The client socket has (?:timed out|failed)[^\n]{0,200}Connection refused",
            r"RendezvousConnectionError[^\n]{0,200}refused",
        ),
        kind="symptom",
        cause=(
            "nobody listens at {host}:{port}: no node took the rendezvous endpoint for its own",
            "nobody listens at the rendezvous endpoint: no node took it for its own",
        ),
        fix=(
            "the endpoint must be an address of node 0 as node 0 itself sees it: an IP of one of its interfaces (hostname -I), not a public or translated one",
            "or --rdzv-conf is_host=1 on node 0 and is_host=0 on the others; phalanx run decides by node rank",
        ),
        look=("that node 0 was started at all, and with the same port",),
        refine="no_host",
        weight=62,
    ),
    Rule(
        id="rendezvous-timeout",
        when=("timed out", "timeout", "rendezvous", "clients joined", "d store has failed", "connect()"),
        patterns=(
            r"client socket has (?:timed out|failed)[^\n]{0,60}(?:after (?P<after>\d+m?s) )?[^\n]{0,40}connect(?:ing)? to \(?\[?(?P<host>[\w.:-]{1,100}?)\]?[:,] ?(?P<port>\d+)",
            r"RendezvousTimeoutError|Timed out (?:after \d+ seconds )?waiting for clients[.,] ?(?P<joined>\d+/\d+) clients joined",
            r"connect\(\) timed out\. Original timeout was (?P<after>\d+ ms)",
            r"The connection to the C10d store has failed|RendezvousConnectionError",
            r"rendezvous[^\n]{0,60}timed out|Timed out (?:while )?waiting for (?:all )?(?:nodes|agents|workers)[^\n]{0,20}join",
            r"failed to connect to \[?(?P<host>[\w.:-]{1,100}?)\]?:(?P<port>\d+) \(errno: (?:110|113|101)",
            r"(?:DistStoreError|RuntimeError|store)[^\n]{0,40}wait timeout after (?P<after>\d+ms), keys: (?P<keys>[^\n]{1,120})",
            r"Timed out after \d+ seconds waiting for clients",
        ),
        kind="symptom",
        unless=(r"errno: (?:97|99)\b",),
        cause=(
            "only {joined} nodes came to the rendezvous in time",
            "the rendezvous at {host}:{port} could not be reached within {after}",
            "the rendezvous at {host}:{port} could not be reached",
            "the rendezvous could not be reached, or a node never came",
        ),
        fix=(
            "from every node: nc -zv {host} {port}; open that port, and the ephemeral ports between nodes, in the firewall",
            "start all nodes with the same endpoint, --nnodes and --rdzv-id; node 0 must be up first or soon after",
        ),
        look=(
            "phalanx doctor --hosts .. tries each pair of nodes on that port",
            "a host name that resolves to 127.0.1.1 on its own node (/etc/hosts)",
        ),
        weight=56,
    ),
    Rule(
        id="hostname-not-resolved",
        when=(
            "name or service not known",
            "temporary failure in name resolution",
            "gai error",
            "nodename nor servname",
            "could not resolve hostname",
            "no address associated",
        ),
        patterns=(
            r"addresses of \(?\[?(?P<host>[\w.:-]{1,100}?)\]?, ?(?P<port>\d+)\)? cannot be retrieved",
            r"(?:getaddrinfo|resolve hostname) (?P<host>[\w.-]{1,100})?[^\n]{0,30}?(?:Name or service not known|Temporary failure|nodename nor servname)",
            r"gai error: -?\d+",
        ),
        cause=("the name {host} cannot be resolved on this node", "a node's name cannot be resolved"),
        fix=(
            "use its IP address for --master-addr or --rdzv-endpoint, or add the name to DNS or /etc/hosts",
        ),
        weight=70,
        beats=("rendezvous-timeout", "rendezvous-no-host"),
        unless=(r"huggingface|https?://|github\.com|wandb|s3\.|amazonaws|pypi",),
    ),
    Rule(
        id="hostname-resolves-to-loopback",
        when=("loopback", "connect"),
        patterns=(
            r"connect[^\n]{0,60}\[?127\.0\.\d\.\d\]?:\d+[^\n]{0,40}(?:Connection refused|refused)",
            r"resolves? to (?:a )?loopback|Connection refused[^\n]{0,60}127\.0\.1\.1|127\.0\.1\.1[^\n]{0,80}(?:refused|unreachable|timed out)",
        ),
        kind="symptom",
        cause=("a node announced a loopback address to the others: its own name resolves to 127.x",),
        fix=(
            "take the name out of the 127.0.1.1 line in /etc/hosts, or GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME = the interface between the nodes",
        ),
        refine="loopback",
        weight=66,
        beats=("rendezvous-no-host", "nccl-network-unreachable"),
    ),
    Rule(
        id="stale-rendezvous-file",
        when=("file://", "filestore", "file_store", "init_method"),
        patterns=(
            r"file://(?P<path>/?[\w./-]{1,200})",
            r"(?P<store>FileStore|file_store)",
        ),
        kind="warning",
        cause=(
            "the rendezvous file {path} was left by an earlier run: ranks read addresses of processes that are gone",
            "the rendezvous file was left by an earlier run: ranks read addresses of processes that are gone",
        ),
        fix=("rm {path} before the start, a new name for each run, or tcp:// and env:// (phalanx run)",),
        refine="stale_file",
        weight=70,
        beats=("rendezvous-timeout", "rendezvous-no-host"),
    ),
    Rule(
        id="sighup-terminal-closed",
        when=("sighup", "got signal: ", "hangup"),
        patterns=(
            r"got signal: 1\b|death signal,? ?(?:Signals\.)?SIGHUP|Received (?:Signals\.SIGHUP|SIGHUP|1) death signal|closing signal (?:Signals\.)?SIGHUP|Signals\.SIGHUP|signal:? SIGHUP|SIGHUP received",
        ),
        cause=("the terminal or ssh session was closed, and its SIGHUP ended the launcher",),
        fix=(
            "start it in tmux or screen, with nohup phalanx run .. & (SIGHUP then stays ignored), or by sbatch",
        ),
        weight=80,
        beats=("ended-from-outside",),
    ),
    Rule(
        id="slurm-time-limit",
        when=("time limit",),
        patterns=(r"DUE TO TIME LIMIT|slurmstepd: error: [^\n]{0,120}TIME LIMIT|State: TIMEOUT",),
        cause=("the Slurm job reached its time limit",),
        fix=(
            "a longer --time, or #SBATCH --signal=B:USR1@120 and a checkpoint: phalanx run saves on the signal and exits with 75",
        ),
        weight=88,
        beats=("ended-from-outside", "host-oom-kill", "nccl-timeout-unknown"),
    ),
    Rule(
        id="preempted-by-scheduler",
        when=("preempt", "spot instance", "instance is being"),
        patterns=(
            r"DUE TO PREEMPTION|(?:job|instance|node|pod|worker)[^\n]{0,30}(?:was|been|is being|is about to be) preempted|[Pp]reemption notice|spot instance (?:interruption|reclaim)|reason: Preempt",
        ),
        cause=("the scheduler took the node for another job (preemption)",),
        fix=(
            "checkpoint on the signal and resume: phalanx run exits with 75 after a save; sbatch --requeue",
        ),
        weight=86,
        beats=("ended-from-outside", "host-oom-kill"),
    ),
    Rule(
        id="node-failure",
        when=("node failure", "node_fail", "nodes are not responding", "node is not responding"),
        patterns=(
            r"DUE TO NODE FAILURE|NODE_FAIL|Node failure on (?P<node>[\w.-]{1,80})|due to node failure|CANCELLED[^\n]{0,60}NODE FAIL",
        ),
        cause=("the node {node} failed", "a node failed"),
        fix=(
            "submit it again without that node (sbatch --exclude {node})",
            "submit it again, and report the node",
        ),
        weight=86,
        beats=("ended-from-outside",),
    ),
    Rule(
        id="job-cancelled",
        when=("cancelled at",),
        patterns=(
            r"(?:JOB|STEP) (?P<job>[\d.]+)(?: ON (?P<node>[\w.-]{1,80}))? CANCELLED AT (?P<time>[\dT:-]{10,25})",
        ),
        unless=(r"DUE TO",),
        cause=("the Slurm job or step {job} was cancelled",),
        fix=(
            "sacct -j {job} --format=JobID,State,ExitCode,Reason tells by whom; a step is cancelled when one of its tasks fails",
        ),
        kind="symptom",
        weight=40,
        beats=("ended-from-outside",),
    ),
    Rule(
        id="ended-from-outside",
        when=("got signal: ", "sigterm", "sigint", "keyboardinterrupt"),
        patterns=(
            r"SignalException: Process \d+ got signal: (?P<number>15|2|3|10|12)\b",
            r"Received (?:Signals\.)?(?P<name>SIGTERM|SIGINT|15|2) death signal, shutting down",
            r"^KeyboardInterrupt\b",
        ),
        kind="symptom",
        cause=(
            "the launcher was asked to end by signal {number} from outside",
            "the launcher was asked to end by {name} from outside",
            "it was interrupted from the keyboard (Ctrl-C)",
        ),
        fix=("ask who sent it: the scheduler (sacct -j JOB), a supervisor, or a person",),
        weight=45,
    ),
    Rule(
        id="ssh-failed",
        when=("permission denied (", "host key verification", "ssh:", "ssh_exchange", "kex_exchange"),
        patterns=(
            r"(?:(?P<host>[\w.@-]{1,100}): )?Permission denied \((?:publickey|password|keyboard-interactive|gssapi)[^)\n]{0,80}\)",
            r"Host key verification failed|ssh: connect to host (?P<host>[\w.-]{1,100}) port (?P<port>\d+): (?P<why>[^\n]{1,60})|ssh: Could not resolve hostname|(?:ssh|kex)_exchange_identification",
        ),
        cause=("ssh to {host} fails: {why}", "ssh to {host} fails", "ssh to a node fails"),
        fix=(
            "ssh {host} true must work without a question: ssh-copy-id, and ssh-keyscan {host} >> ~/.ssh/known_hosts",
            "ssh NODE true must work without a question: ssh-copy-id, and ssh-keyscan NODE >> ~/.ssh/known_hosts",
        ),
        weight=72,
    ),
    Rule(
        id="process-group-not-initialized",
        when=(
            "has not been initialized",
            "is not initialized",
            "init_process_group",
            "not been initialized",
            "backend not set",
        ),
        patterns=(
            r"Default process group (?:has not been|is not) initialized",
            r"please make sure to call init_process_group|call `?torch\.distributed\.init_process_group`? (?:first|before)|Please call init_process_group",
            r"[Tt]orch\.distributed (?:is|has) not (?:been )?(?:yet )?initialized|DeepSpeed backend not set|distributed (?:environment|package|process group) (?:is|has) not (?:been )?initialized",
            r"(?:data|tensor model|pipeline model|model|context) parallel group is not initialized",
        ),
        unless=(r"destroy_process_group", r"Cannot initialize"),
        cause=("a collective, SyncBatchNorm or DDP was used before the process group was made",),
        fix=(
            "call phalanx.dist.init_world() (or torch.distributed.init_process_group()) first, and start with a launcher",
            "a single process: use the model without SyncBatchNorm and DDP; sync_batchnorm=False",
        ),
        look=("subprocesses and DataLoader workers have no process group of their own",),
        weight=70,
    ),
    Rule(
        id="process-group-initialized-twice",
        when=("initialize the default process group twice",),
        patterns=(r"trying to initialize the default process group twice",),
        cause=("init_process_group was called twice in one process",),
        fix=("init_world() adopts a group that exists; else test torch.distributed.is_initialized() first",),
        weight=70,
    ),
)
