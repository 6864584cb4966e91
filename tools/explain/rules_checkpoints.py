"""Rules: checkpoints and state dicts."""

from __future__ import annotations

from phalanx.tools.explain.rule import Rule

RULES = (
    Rule(
        id="checkpoint-corrupted",
        when=(
            "central directory",
            "zip archive",
            "unexpected eof",
            "ran out of input",
            "eoferror",
            "invalid load key",
            "truncated",
            "safetensor",
            "headertoo",
            "magic number",
            "not a zip",
            "incomplete metadata",
            "pytorchstreamreader",
            "storage has wrong",
            "corrupt",
            "invalid hash",
        ),
        patterns=(
            r"PytorchStreamReader failed (?:reading zip archive|reading file|locating file|finding)[^\n]{0,120}",
            r"failed finding central directory|invalid header or archive is corrupted|not a ZIP archive|File is not a zip file|BadZipFile",
            r"unexpected EOF, expected (?P<missing>\d+) more bytes|unexpected EOF|The file might be corrupted",
            r"Ran out of input|pickle data was truncated",
            r"^(?P<bare>EOFError)$",
            r"invalid load key, '(?P<key>[^'\n]{1,8})'",
            r"InvalidHeader(?:Deserialization|Length|Start)?|HeaderTooLarge|HeaderTooSmall|header too (?:large|small)|MetadataIncompleteBuffer|incomplete metadata, file not fully covered|Error while deserializing",
            r"Invalid magic number; corrupt file|storage has wrong (?:byte )?size|unexpected pos[^\n]{0,40}corrupt",
            r"invalid hash value \(expected",
            r"Corrupted? (?:checkpoint|file)|checkpoint (?:file )?(?:is|seems|appears to be) (?:corrupt(?:ed)?|damaged|truncated|incomplete)",
        ),
        unless=(r"PIL|image file is truncated|Weights only load failed|Truncated File Read|libpng|JPEG",),
        cause=(
            "the file is cut short ({missing} bytes are missing), or another process was still writing it",
            "the file that is loaded is no whole checkpoint: it starts with {key!r}",
            "the checkpoint file is cut or damaged",
        ),
        fix=(
            "use the checkpoint before it, or download it again; phalanx ckpt verify FILE tells a whole one",
            "starts with 'v' or 'version https://git-lfs': only a pointer was fetched, so git lfs pull; starts with '<': a web page was saved",
            "write to a temporary name and rename, by one rank only (CheckpointManager does)",
        ),
        look=(
            "whether all ranks wrote the same file at once, and whether the disk was full when it was written",
        ),
        refine="damaged",
        weight=68,
    ),
    Rule(
        id="torch-load-weights-only",
        when=(
            "weights only load failed",
            "weights_only",
            "weightsunpickler",
            "not an allowed global",
            "unsupported global",
        ),
        patterns=(
            r"(?:Unsupported global|WeightsUnpickler error): GLOBAL (?P<name>[\w.]{1,120}) was not an allowed global",
            r"Weights only load failed|WeightsUnpickler error|was not an allowed global by default",
            r"changed the default value of the `?weights_only`? argument",
            r"Cannot use `{0,2}weights_only=True`{0,2} with (?:TorchScript|files saved in the legacy)",
        ),
        cause=(
            "torch.load refuses {name} in the checkpoint: since torch 2.6 it takes tensors and plain values only",
            "torch.load refuses an object in the checkpoint: since torch 2.6 it takes tensors and plain values only",
        ),
        fix=(
            "a file you trust: torch.load(path, weights_only=False), or torch.serialization.add_safe_globals([{name}])",
            "a file you trust: torch.load(path, weights_only=False), or torch.serialization.add_safe_globals([..])",
            "better: save model.state_dict() alone, which loads as it is (phalanx ckpt convert)",
        ),
        look=(
            "a library that loads for you (Lightning, ultralytics, TTS): a newer release of it knows torch 2.6",
        ),
        refine="weights_only",
        weight=80,
        beats=("checkpoint-corrupted",),
    ),
    Rule(
        id="checkpoint-map-location",
        when=("attempting to deserialize object on",),
        patterns=(
            r"Attempting to deserialize object on CUDA device (?P<device>\d+) but torch\.cuda\.device_count\(\) is (?P<count>\d+)",
            r"Attempting to deserialize object on a CUDA device but torch\.cuda\.is_available\(\) is False",
        ),
        cause=(
            "the checkpoint was saved from GPU {device}, and this process sees {count}",
            "the checkpoint was saved from a GPU, and this process sees none",
        ),
        fix=("torch.load(path, map_location='cpu'), then load_state_dict",),
        weight=75,
    ),
    Rule(
        id="state-dict-module-prefix",
        when=("missing key", "unexpected key", "in state_dict"),
        patterns=(
            r"Missing key\(s\) in state_dict: ?(?P<missing>[^\n]{1,4000}?)(?:\.? ?Unexpected key\(s\) in state_dict: ?(?P<unexpected>[^\n]{1,4000}))?$",
            r"Unexpected key\(s\) in state_dict: ?(?P<unexpected>[^\n]{1,4000})",
            r"unexpected key [\"'](?P<unexpected>[\w.]{1,200})[\"'] in state_dict",
            r"missing keys in state_dict: [\"']?\{(?P<missing>[^\n]{1,2000})",
        ),
        cause=(
            "the checkpoint's keys differ from the model's by the prefix {prefix}",
            "the checkpoint's keys differ from the model's by a wrapper's prefix",
        ),
        fix=(
            "phalanx.dist.load_state_dict(model, source) matches keys across wrappers; phalanx ckpt fix FILE writes them without",
            "or save model.module.state_dict(), and strip once: {{k.removeprefix('{prefix}'): v for k, v in state.items()}}",
        ),
        refine="state_dict_keys",
        weight=64,
    ),
    Rule(
        id="state-dict-size-mismatch",
        when=("size mismatch for", "while copying the parameter named"),
        patterns=(
            r"size mismatch for (?P<key>[\w.]{1,200}): copying a param with shape (?:torch\.Size\()?(?P<theirs>\[[\d, ]{0,60}\])\)? from checkpoint, the shape in current model is (?:torch\.Size\()?(?P<ours>\[[\d, ]{0,60}\])",
            r"size mismatch for (?P<key>[\w.]{1,200}): copying a param of (?:torch\.Size\()?(?P<theirs>\[[\d, ]{0,60}\])\)? from checkpoint, where the shape is (?:torch\.Size\()?(?P<ours>\[[\d, ]{0,60}\])",
            r"[Ww]hile copying the parameter named [\"']?(?P<key>[\w.]{1,200})[\"']?,? whose dimensions in the model are (?:torch\.Size\()?(?P<ours>[\[(][\d, ]{0,60}[\])])\)? and whose dimensions in the checkpoint are (?:torch\.Size\()?(?P<theirs>[\[(][\d, ]{0,60}[\])])",
            r"size mismatch for (?P<key>[\w.]{1,200})",
        ),
        cause=(
            "{key} is {theirs} in the checkpoint and {ours} in the model",
            "{key} has another shape in the checkpoint than in the model",
        ),
        fix=(
            "build the model with the checkpoint's settings (classes, vocabulary, width)",
            "fine-tuning with another head: leave that layer out, or ignore_mismatched_sizes=True in from_pretrained",
        ),
        look=("a shape of [0] comes from ZeRO-3 or FSDP shards: gather the weights before saving",),
        weight=70,
        beats=("state-dict-keys", "state-dict-module-prefix"),
    ),
    Rule(
        id="checkpoint-of-a-newer-torch",
        when=("maximum supported version for reading", "unsupported pickle protocol"),
        patterns=(
            r"Attempted to read a PyTorch file with version (?P<theirs>\d+), but the maximum supported version for reading is (?P<ours>\d+)",
            r"unsupported pickle protocol: (?P<theirs>\d+)",
        ),
        cause=(
            "the checkpoint is of file format {theirs}, and this torch reads up to {ours}: a newer torch wrote it",
            "the checkpoint was written by a newer Python or torch",
        ),
        fix=(
            "a newer torch here, or save it there with _use_new_zipfile_serialization=False or as safetensors",
        ),
        weight=75,
        beats=("checkpoint-corrupted",),
    ),
    Rule(
        id="optimizer-state-mismatch",
        when=(
            "optimizer's group",
            "parameter group that doesn't match",
            "different number of parameter groups",
        ),
        patterns=(
            r"loaded state dict (?:contains a parameter group that doesn't match the size of optimizer's group|has a different number of parameter groups)",
        ),
        cause=("the checkpoint's optimizer has other parameters than this one",),
        fix=(
            "build the optimizer over the same parameters in the same order as when it was saved, or start it anew",
        ),
        weight=65,
    ),
)
