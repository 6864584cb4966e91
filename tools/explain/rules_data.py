"""Rules: data on its way into the loop: batches, loader workers, empty sets."""

from __future__ import annotations

from phalanx.tools.explain.rule import Rule

RULES = (
    Rule(
        id="collate-size-mismatch",
        when=("equal size", "sizes of tensors must match", "not resizable", "inconsistent tensor"),
        patterns=(
            r"stack expects each tensor to be equal size, but got (?P<one>\[[\d, ]{0,60}\]) at entry (?P<entry_one>\d+) and (?P<other>\[[\d, ]{0,60}\]) at entry (?P<entry_other>\d+)",
            r"stack expects each tensor to be equal size",
            r"each element in list of batch should be of equal size",
            r"invalid argument 0: Sizes of tensors must match except in dimension 0\. Got (?P<one>\d+) and (?P<other>\d+)",
            r"Trying to resize storage that is not resizable|resize storage that is not resizable",
        ),
        cause=(
            "samples of different sizes cannot be stacked into a batch: {one} (sample {entry_one}) and {other} (sample {entry_other})",
            "samples of different sizes cannot be stacked into a batch: {one} and {other}",
            "samples of different sizes cannot be stacked into a batch",
        ),
        fix=(
            "bring all samples to one size in the dataset (Resize takes both sides: (224, 224)), or pad in a collate_fn of your own",
        ),
        look=("images with one or four channels among those with three: .convert('RGB')",),
        weight=72,
    ),
    Rule(
        id="collate-unsupported-type",
        when=("batch must contain tensors",),
        patterns=(
            r"batch must contain tensors, numpy arrays, numbers, dicts or lists; found (?P<type><?[^\n]{1,80})",
            r"batch must contain tensors",
        ),
        cause=(
            "the dataset returned a {type}, which cannot be put into a batch",
            "the dataset returned what cannot be put into a batch",
        ),
        fix=(
            "return tensors or numbers: add ToTensor() to the transform, leave None samples out in a collate_fn",
        ),
        weight=70,
    ),
    Rule(
        id="cuda-in-forked-worker",
        when=("forked subprocess", "initialization error"),
        patterns=(
            r"Cannot re-initialize (?:CUDA|XPU|HPU|NPU) in forked subprocess",
            r"CUDA error: initialization error|CUDA error \(3\): initialization error|cuda runtime error \(3\) ?: ?initialization error",
        ),
        cause=(
            "CUDA was used in a forked process (a loader worker, or multiprocessing with the fork method) after the parent had used it",
        ),
        fix=(
            "keep CUDA out of Dataset and collate_fn: return CPU tensors and move them in the loop",
            "or start processes by spawn: DataLoader(multiprocessing_context='spawn'), torch.multiprocessing.set_start_method('spawn')",
        ),
        look=(
            "tensors on the GPU held by the dataset; generator=torch.Generator('cuda'); torch.set_default_device('cuda')",
        ),
        weight=72,
    ),
    Rule(
        id="worker-segfault",
        when=("dataloader worker", "encountered in worker"),
        patterns=(
            r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]{1,80})\) is killed by signal: (?P<signal>Segmentation fault|Aborted|Illegal instruction|Floating point exception)",
            r"Unexpected (?P<signal>segmentation fault|floating-point exception|illegal instruction) encountered in worker",
        ),
        cause=("a loader worker crashed in native code ({signal})", "a loader worker crashed in native code"),
        fix=(
            "num_workers=0 shows the sample; PYTHONFAULTHANDLER=1 shows the Python line",
            "usual sources: cv2 (cv2.setNumThreads(0)), h5py or lmdb handles opened before the fork, damaged files",
        ),
        weight=75,
        beats=("segfault", "worker-killed"),
    ),
    Rule(
        id="worker-killed",
        when=("dataloader worker",),
        patterns=(
            r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]{1,80})\) is killed by signal: (?P<signal>\w+)",
            r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\d, ]{1,80})\) exited unexpectedly",
        ),
        unless=(r"signal: (?:Killed|Bus error|Segmentation fault|Aborted)",),
        cause=("the loader worker {pid} ended unexpectedly", "a loader worker ended unexpectedly"),
        fix=(
            "num_workers=0 shows the worker's own exception; then look at memory (dmesg) and /dev/shm (df -h /dev/shm)",
        ),
        kind="symptom",
        weight=45,
    ),
    Rule(
        id="dataloader-timeout",
        when=("dataloader timed out",),
        patterns=(r"DataLoader timed out after (?P<seconds>[\d.]+) seconds",),
        cause=("no loader worker delivered a batch within {seconds} s",),
        fix=(
            "num_workers=0 shows where it stands; a lock held at the fork (OpenMP, cv2, logging) or slow storage are usual",
            "a larger timeout= where the data is just slow",
        ),
        weight=60,
    ),
    Rule(
        id="main-guard-missing",
        when=("bootstrapping phase", "freeze_support"),
        patterns=(
            r"current process has finished its bootstrapping phase|An attempt has been made to start a new process before",
        ),
        cause=(
            "processes were started while the script was being imported: spawn runs the script's top level again in each of them",
        ),
        fix=("put what runs under: if __name__ == '__main__':",),
        weight=85,
        beats=("worker-killed", "broken-pipe", "segfault"),
    ),
    Rule(
        id="unpicklable-worker-object",
        when=("pickle", "get local object"),
        patterns=(
            r"Can'?t (?:get local|pickle) (?:local )?object[: ]{1,2}(?P<what>[^\n]{1,120})|cannot pickle (?P<what2>[^\n]{1,80})",
        ),
        cause=(
            "{what} cannot be sent to a process that is started by spawn",
            "an object cannot be sent to a process that is started by spawn",
        ),
        fix=(
            "define functions and classes at the top level of a module instead of lambdas and nested functions, open files inside the worker",
        ),
        weight=60,
    ),
    Rule(
        id="empty-dataset",
        when=(
            "num_samples should be a positive",
            "num_samples=",
        ),
        patterns=(r"num_samples should be a positive integer value, but got num_samples=0",),
        cause=("the dataset is empty",),
        fix=("check the data folder and the file pattern on that node",),
        weight=70,
    ),
)
