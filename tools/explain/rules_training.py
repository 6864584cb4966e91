"""Rules: DDP, FSDP, autograd, shapes and precision: what the training script itself does."""

from __future__ import annotations

from phalanx.tools.explain.rule import Rule

RULES = (
    Rule(
        id="ddp-unused-parameters",
        when=(
            "finished reduction in the prior iteration",
            "did not receive grad",
            "were not used in producing",
        ),
        patterns=(
            r"Parameters? (?:which did not receive grad|that did not receive gradient)s? for rank (?P<at_rank>\d+): (?P<names>[\w.,: -]{1,300})",
            r"Parameter indices which did not receive grad for rank (?P<at_rank>\d+): (?P<indices>[\d ]{1,200})",
            r"Expected to have finished reduction in the prior iteration before starting a new one",
            r"has parameters that were not used in producing (?:the )?loss",
        ),
        cause=(
            "these parameters got no gradient in a step: {names}",
            "the parameters number {indices} got no gradient in a step",
            "some parameters got no gradient in a step: the part of the model that holds them was not used in the loss",
        ),
        fix=(
            "use every output in the loss, freeze or delete the unused layer, or pass find_unused_parameters=True to DistributedDataParallel",
            "Lightning: strategy='ddp_find_unused_parameters_true'; accelerate: DistributedDataParallelKwargs(find_unused_parameters=True)",
        ),
        look=(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL prints the names",
            "whether some ranks skip a step or a branch of the model",
        ),
        weight=70,
    ),
    Rule(
        id="ddp-param-ready-twice",
        when=(
            "ready only once",
            "marked as ready twice",
            "has already been reduced",
            "gradient computed twice",
            "marked as ready",
        ),
        patterns=(
            r"Parameter at index (?P<index>\d+)(?: with name (?P<name>[\w.]{1,200}))? has been marked as ready twice",
            r"Expected to mark a variable ready only once",
            r"The parameter (?P<index>\d+) has already been reduced|Gradient computed twice for this partition",
        ),
        cause=(
            "the gradient of {name} was made twice in one step",
            "the gradient of parameter number {index} was made twice in one step",
            "a parameter's gradient was made twice in one step",
        ),
        fix=(
            "activation checkpointing: use_reentrant=False; two backward passes: sum the losses first, or one forward through DDP each",
            "a graph that never changes: DistributedDataParallel(static_graph=True), without find_unused_parameters",
        ),
        look=(
            "parameters that two modules share; Hugging Face: gradient_checkpointing_kwargs={{'use_reentrant': False}}",
        ),
        weight=72,
        beats=("ddp-unused-parameters",),
    ),
    Rule(
        id="ddp-inplace-buffer",
        when=(
            "by an inplace operation",
            "by an in-place operation",
            "needed for gradient computation has been",
        ),
        patterns=(
            r"modified by an in-?place operation: \[?(?P<tensor>[\w.]{1,60}(?: \[[\d, ]{0,60}\])?)\][^\n]{0,120}is at version (?P<version>\d+); expected version (?P<expected>\d+)",
            r"needed for gradient computation has been modified by an in-?place operation",
        ),
        cause=(
            "DDP's broadcast of buffers overwrote {tensor} (version {version} instead of {expected}) between two forwards and the backward",
            "DDP's broadcast of buffers overwrote a tensor that the backward pass still needed",
        ),
        fix=(
            "one forward per backward, or DistributedDataParallel(broadcast_buffers=False), or SyncBatchNorm",
        ),
        look=(
            "torch.autograd.set_detect_anomaly(True) names the operation",
            "in-place operations of your own (+=, relu_, copy_) on activations",
        ),
        refine="inplace",
        weight=60,
    ),
    Rule(
        id="ddp-model-mismatch",
        when=(
            "same model across all ranks",
            "in this process with",
            "appears not to match",
            "the ranks built different models",
            "verifying",
        ),
        patterns=(
            r"DDP expects same model across all ranks, but Rank (?P<one>\d+) has (?P<one_count>\d+) params, while rank (?P<other>\d+) has inconsistent (?P<other_count>\d+)",
            r"DDP expects same model across all ranks",
            r"params?\[(?P<index>\d+)\] in this process with (?:sizes|strides|shape) (?P<here>\[[\d, ]{0,60}\])[^\n]{0,60}not to match",
            r"replicas\[0\]\[(?P<index>\d+)\] in this process with (?:sizes|strides) (?P<here>\[[\d, ]{0,60}\])",
            r"appears not to match (?:sizes|strides|dtypes?) of the same param in process",
            r"parallelize: (?:the )?(?:ranks|models?)[^\n]{0,80}differ",
        ),
        cause=(
            "rank {one} built a model of {one_count} parameters, rank {other} one of {other_count}",
            "parameter number {index} has the shape {here} on one rank and another one on rank 0",
            "the ranks built different models",
        ),
        fix=(
            "build the model from the same settings on every rank: the number of classes, vocabulary or layers must not depend on a rank's own data",
        ),
        look=("a dataset split, vocabulary or random choice made per rank before the model is built",),
        weight=75,
    ),
    Rule(
        id="fsdp-mixed-params",
        when=("must flatten tensors", "requires uniform", "expects uniform", "uniform original"),
        patterns=(
            r"Must flatten tensors with (?:the same|uniform) (?:`)?(?P<what>dtype|requires_grad)(?:`)?(?: but got (?P<got>[\w., ]{1,80}))?",
            r"Must flatten tensors on the same device",
            r"FSDP expects uniform original parameter dtype but got (?P<got>[^\n]{1,120})",
            r"FlatParameter`? requires uniform `?(?P<what>dtype|requires_grad)`?(?: but got (?P<got>[\w., ]{1,80}))?|(?:expects|requires) uniform `?(?:dtype|requires_grad)`?[^\n]{0,80}(?:FlatParameter|fully_shard|parameter)",
            r"fully_shard[^\n]{0,60}uniform (?:original )?(?:parameter )?dtype",
        ),
        cause=(
            "one FSDP unit holds parameters of mixed {what}: {got}",
            "one FSDP unit holds parameters of mixed {what}",
            "one FSDP unit holds parameters of mixed dtype: {got}",
            "one FSDP unit holds parameters that do not belong together (mixed dtypes, or frozen beside trainable)",
        ),
        fix=(
            "dtypes: model.to(torch.bfloat16) before wrapping (also adapters and norms); frozen beside trainable: use_orig_params=True",
            "or wrap adapters in units of their own (peft: fsdp_auto_wrap_policy)",
        ),
        weight=72,
    ),
    Rule(
        id="checkpointing-without-input-grads",
        when=("none of the inputs have requires_grad",),
        patterns=(r"None of the inputs have requires_grad=True",),
        kind="warning",
        cause=(
            "activation checkpointing cut the graph: its inputs need no gradient, so nothing before the loss has one",
        ),
        fix=(
            "use_reentrant=False in torch.utils.checkpoint (Hugging Face: gradient_checkpointing_kwargs={{'use_reentrant': False}})",
            "or model.enable_input_require_grads() where the embedding is frozen, as with LoRA",
        ),
        weight=78,
        beats=("loss-without-grad",),
    ),
    Rule(
        id="loss-without-grad",
        when=("does not require grad",),
        patterns=(r"element 0 of (?:tensors|variables) does not require grad",),
        cause=("backward() was called on a loss that no trainable parameter leads to",),
        fix=(
            "look for torch.no_grad(), .detach(), .item() or .data between model and loss, and for a model that is frozen as a whole",
            "with activation checkpointing: use_reentrant=False, or model.enable_input_require_grads()",
        ),
        refine="loss_without_grad",
        weight=60,
    ),
    Rule(
        id="backward-twice",
        when=("backward through the graph a second time",),
        patterns=(r"Trying to backward through the graph a second time",),
        cause=(
            "backward() went through a graph whose intermediate results were freed by an earlier backward()",
        ),
        fix=(
            "detach what is carried from one step to the next (hidden states, running losses): h = h.detach()",
            "or sum the losses and call backward() once",
        ),
        weight=60,
    ),
    Rule(
        id="batchnorm-batch-of-one",
        when=("value per channel", "spatial element when training"),
        patterns=(
            r"Expected more than 1 (?:value per channel|spatial element) when training, got input size (?P<size>(?:torch\.Size\()?\[[\d, ]{1,60}\]\)?)",
            r"Expected more than 1 (?:value per channel|spatial element) when training",
        ),
        cause=(
            "batch norm in training mode got one value per channel (input {size}): this rank's last batch has one sample",
            "batch norm in training mode got one value per channel: this rank's last batch has one sample",
        ),
        fix=(
            "drop_last=True, or a batch size that leaves no batch of one per rank",
            "or model.eval() where nothing is trained; SyncBatchNorm on GPUs",
        ),
        weight=70,
    ),
    Rule(
        id="label-out-of-range",
        when=("n_classes", "is out of bounds", "class values must be", "nll_loss", "nllcriterion", "nllloss"),
        patterns=(
            r"Target (?P<label>-?\d+) is out of bounds",
            r"Assertion [`'\"]?\(?(?:t|cur_target|target_val|target) >= 0 &&? ?&? ?(?:t|cur_target|target_val|target) < n_classes",
            r"(?:nll_loss|SpatialClassNLLCriterion|ClassNLLCriterion|NLLLoss)[^\n]{0,300}Assertion",
            r"Class values must be (?:smaller than num_classes|non-negative)",
            r"Expected target size|target_id|multi-target not supported(?! at)",
        )[:4],
        cause=(
            "a target is {label}, outside [0, number of classes)",
            "a target is outside [0, number of classes)",
        ),
        fix=(
            "print targets.min(), targets.max() against the model's last layer; labels that start at 1 need -1, a marker such as 255 needs ignore_index=255",
            "CUDA_LAUNCH_BLOCKING=1, or one step on the CPU, shows the line",
        ),
        weight=80,
        beats=(
            "index-out-of-bounds",
            "cublas-oom-in-disguise",
            "cudnn-oom-in-disguise",
            "cuda-illegal-memory-access",
            "device-side-assert",
        ),
    ),
    Rule(
        id="index-out-of-bounds",
        when=(
            "device-side assert",
            "srcselectdimsize",
            "index out of bounds",
            "out of range in self",
            "index_size",
            "ind_dim_size",
            "assertion",
            "out of bounds",
        ),
        patterns=(
            r"Assertion [`'\"]?(?:srcIndex|dstIndex|indexValue|index|idx_dim|ind|idx|-sizes\[i\]|-arg_size)[^\n]{0,120}",
            r"[\"']index out of bounds[\"']|index out of bounds(?:`| failed)",
            r"index out of range in self",
            r"index (?P<index>-?\d+) is out of bounds for dimension (?P<dim>\d+) with size (?P<size>\d+)",
            r"index out of range: Tried to access index (?P<index>-?\d+) out of table with (?P<size>\d+) rows",
        ),
        cause=(
            "index {index} is out of bounds: dimension {dim} has {size} entries",
            "index {index} is out of bounds: the table has {size} rows",
            "a kernel got an index outside its table: most often a token id not below the embedding's size, or a position beyond its length",
        ),
        fix=(
            "compare ids.max() with embedding.num_embeddings: model.resize_token_embeddings(len(tokenizer)) after adding tokens, truncate to the longest position",
            "CUDA_LAUNCH_BLOCKING=1, or one step on the CPU, shows the line",
        ),
        weight=72,
        beats=(
            "device-side-assert",
            "cuda-illegal-memory-access",
            "cublas-oom-in-disguise",
            "cudnn-oom-in-disguise",
        ),
    ),
    Rule(
        id="bce-input-out-of-range",
        when=("input_val", "should be between"),
        patterns=(
            r"Assertion [`'\"]?\(?input_val >= zero && input_val <= one|all elements of (?:input|target) should be between 0 and 1|target_val >= zero && target_val <= one",
        ),
        cause=("binary cross entropy got values outside [0, 1]",),
        fix=("BCEWithLogitsLoss on raw outputs; check that targets are 0 or 1, and that nothing is nan",),
        weight=80,
        beats=("index-out-of-bounds", "device-side-assert"),
    ),
    Rule(
        id="device-side-assert",
        when=("device-side assert",),
        patterns=(r"device-side assert(?:ion)? triggered|cudaErrorAssert",),
        cause=(
            "a kernel's assertion failed, and the log lacks its line (`Assertion ... failed`): mostly an index or a label out of range",
        ),
        fix=(
            "CUDA_LAUNCH_BLOCKING=1, or one step on the CPU, shows the line; then compare labels with the number of classes, ids with the embedding's size",
        ),
        refine="device_assert",
        weight=50,
    ),
    Rule(
        id="fp16-overflow",
        when=("loss scale", "overflow", "loss scaler", "unscale", "float division by zero"),
        patterns=(
            r"Current loss scale already at minimum",
            r"Minimum loss scale reached",
            r"Attempted loss scale: (?P<scale>[\d.]{1,12}), reducing to (?P=scale)(?![\d.])",
            r"loss scal(?:e|er)[^\n]{0,40} (?:reduc|decreas)[^\n]{0,40} to (?P<scale>(?:0(?:\.0+)?|[\d.]+e-\d+|0\.\d+))(?![\d.])",
            r"reducing (?:loss scale )?to (?P<scale>(?:0(?:\.0+)?|[\d.]+e-\d+|0\.\d+|[01](?:\.0)?))\b",
        ),
        kind="warning",
        cause=(
            "the loss scale fell to {scale}: gradients overflow in every step",
            "the loss scale fell to its floor: gradients overflow in every step",
        ),
        fix=(
            "bf16 instead of fp16 where the GPU has it (Ampere and newer)",
            "a lower learning rate, gradient clipping, a check of the data for nan and inf",
        ),
        look=("models trained in bf16 (T5, many LLMs) do not fit into fp16 at all",),
        refine="loss_scale",
        weight=65,
    ),
    Rule(
        id="fp16-gradients-unscaled",
        when=("attempting to unscale",),
        patterns=(r"Attempting to unscale FP16 gradients",),
        cause=("the model's own weights are fp16, and a gradient scaler needs fp32 weights",),
        fix=(
            "keep the weights in fp32 (no .half(), no torch_dtype=float16 for training) and use autocast, or bf16 without a scaler",
        ),
        weight=70,
    ),
    Rule(
        id="nan-loss",
        when=(
            "nan values",
            "is nan",
            "became nan",
            "was nan",
            "nan loss",
            "nan in loss",
            "is inf",
            "became inf",
            "was inf",
            "nan detected",
            "nan encountered",
            "nan found",
            "probability tensor contains",
            "contains nan",
            "inf loss",
        ),
        patterns=(
            r"returned nan values in its \d+th output",
            r"loss[^\n]{0,20} (?:is|became|was) (?:nan|inf|infinite)\b|(?:NaN|nan|inf) (?:loss|losses) (?:encountered|detected|found)|Loss is (?:nan|inf), stopping training",
            r"The loss returned in `?training_step`? is (?:nan|inf)|probability tensor contains either `?inf`?, `?nan`?|Input contains NaN",
        ),
        cause=("the loss or an output became nan",),
        fix=(
            "a lower learning rate or longer warm-up, gradient clipping, bf16 instead of fp16; torch.autograd.set_detect_anomaly(True) names the first operation",
        ),
        look=("the samples of that step: empty targets, division by a length of zero, log of zero",),
        weight=60,
    ),
    Rule(
        id="cuda-illegal-memory-access",
        when=(
            "illegal memory access",
            "misaligned address",
            "illegaladdress",
            "illegal address",
            "unspecified launch failure",
            "illegal instruction was encountered",
            "launch_failed",
        ),
        patterns=(
            r"an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS|cudaErrorIllegalAddress|illegal address",
            r"misaligned address|CUDA_ERROR_LAUNCH_FAILED|unspecified launch failure|an illegal instruction was encountered",
        ),
        cause=("a kernel read or wrote outside its memory; a collective or a later call only reported it",),
        fix=(
            "CUDA_LAUNCH_BLOCKING=1 names the kernel; compute-sanitizer python train.py names the access",
            "suspect custom kernels first (flash-attn, xformers, apex, triton): update them, or switch them off once",
        ),
        look=(
            "that each rank's device is set before it allocates: torch.cuda.set_device(local_rank)",
            "dmesg | grep Xid for a fault of the GPU itself",
        ),
        weight=58,
    ),
    Rule(
        id="shape-mismatch",
        when=(
            "shapes cannot be multiplied",
            "must match the size of tensor",
            "size of tensor",
            "shape mismatch",
            "cannot be multiplied",
            "size mismatch, m",
            "expected input",
        ),
        patterns=(
            r"mat1 and mat2 shapes cannot be multiplied \((?P<one>\d+x\d+) and (?P<other>\d+x\d+)\)",
            r"The size of tensor a \((?P<one>\d+)\) must match the size of tensor b \((?P<other>\d+)\) at non-singleton dimension (?P<dim>\d+)",
            r"size mismatch, m1: \[(?P<one>[\dx ]{1,30})\], m2: \[(?P<other>[\dx ]{1,30})\]",
            r"expected input\[[^\]\n]{1,60}\] to have (?P<one>\d+) channels, but got (?P<other>\d+) channels",
            r"Sizes of tensors must match except in dimension (?P<dim>[1-9]\d*)",
        ),
        cause=("two tensors do not fit together: {one} and {other}", "two tensors do not fit together"),
        fix=(
            "print the shapes before that line; the layer's in_features or channels must be those of its input",
        ),
        weight=55,
    ),
    Rule(
        id="device-mismatch",
        when=(
            "same device",
            "but got device",
            "input type (",
            "on the same gpu",
            "but found at least",
            "on the expected device",
        ),
        patterns=(
            r"Expected all tensors to be on the same device, but (?:found at least two devices, (?P<one>[\w:]{1,12}) and (?P<other>[\w:]{1,12})|got)",
            r"Input type \(torch\.(?P<one>[\w.]{1,40})\) and weight type \(torch\.(?P<other>[\w.]{1,40})\) should be the same",
            r"module must have its parameters and buffers on device (?P<one>[\w:]{1,12}) \(device_ids\[0\]\) but found one of them on device: (?P<other>[\w:]{1,12})",
            r"Tensor on device (?P<one>[\w:]{1,12}) is not on the expected device (?P<other>[\w:]{1,12})",
            r"arguments are located on different GPUs|Expected object of backend CUDA but got backend CPU|expected device (?P<one>[\w:]{1,12}) but got device (?P<other>[\w:]{1,12})",
        ),
        cause=(
            "tensors of one operation are on different devices: {one} and {other}",
            "tensors of one operation are on different devices",
        ),
        fix=(
            "move inputs to the rank's device: x = x.to(device, non_blocking=True), with device = cuda:LOCAL_RANK",
        ),
        look=(
            "tensors made in forward without device=, and .cuda() without an index before torch.cuda.set_device",
        ),
        weight=60,
        refine="device_or_dtype",
    ),
    Rule(
        id="dtype-mismatch",
        when=("scalar type", "same dtype", "to have the same dtype", "must have the same dtype"),
        patterns=(
            r"expected (?:scalar type|m1 and m2 to have the same dtype, but got:) ?(?P<one>\w+) (?:but found|!=) (?P<other>\w+)",
            r"mat1 and mat2 must have the same dtype, but got (?P<one>\w+) and (?P<other>\w+)",
            r"expected m1 and m2 to have the same dtype, but got: (?P<one>\w+) != (?P<other>\w+)",
        ),
        cause=("an operation got tensors of the types {one} and {other}",),
        fix=("run it under torch.autocast, or bring inputs to the weights' dtype: x.to(weight.dtype)",),
        weight=60,
    ),
)
