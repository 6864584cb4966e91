"""Words that several symptoms look for, as patterns."""

from __future__ import annotations

HANG = r"hang|hung|deadlock|dead-lock|stuck|freez|stall|never (?:returns|finishes)|blocks? forever"
CONTAINER = r"docker|container|podman|kubernetes|\bpod\b|singularity|apptainer|enroot"
NO_HELP = r"p2p[^\n]{0,60}(?:(?:did|does|do) ?n[o\u2019']?t (?:help|change|fix|solve|make)|no (?:effect|difference|change)|same)"
NO_GPU = r"(?:has|have|with|is|there is) no (?:nvidia )?gpu|without (?:a |an )(?:nvidia )?gpu|(?:don.t|doesn.t|not) have (?:a |an )?(?:nvidia )?gpu|on purpose|cpu-only (?:machine|laptop|server)"
EXTENSION = (
    r"flash[_-]?attn|flash[_ -]attention|\bapex\b|amp_c|xformers|mmcv|detectron2|torch[_-](?:scatter|sparse|cluster|"
    r"spline)|pytorch3d|\bdgl\b|causal[_-]conv1d|mamba[_-]ssm|selective[_-]scan|natten|spconv|transformer[_-]engine|"
    r"bitsandbytes|vllm|deformable|pointnet|minkowski|kaolin|nvdiffrast|auto_gptq|autoawq|awq_ext|exllama|"
    r"torchtext|torchdata|warpctc|k2\b|dcnv|correlation_cuda|sageattention|gsplat|diff_gaussian|tiny-?cuda-?nn|tinycudann"
)
