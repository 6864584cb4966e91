"""What `phalanx fit` says against what real training steps take, measured at torch's allocator on the CPU.

    python benchmarks/fit.py                       ten models, SGD with momentum and Adam, and the time it takes
    python benchmarks/fit.py --models resnet18,vit_b_16 --micro-batch-size 4 --json

Each measurement is a process of its own: a model, an optimizer, three steps of forward, backward, update and
`zero_grad`, every allocation and release reported by torch's profiler. The peak is that of the last step, when the
optimizer's state is there. `fit` is asked as a user would ask it, with `--gpu none`: no context, no allocator slack. The last
line is the step that `accelerate estimate-memory` puts at 390 MiB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from conditions import arguments, conditions, in_words, told_as_json

MODELS = (
    "resnet18", "resnet50", "vgg11", "mobilenet_v3_large", "efficientnet_b0", "densenet121", "regnet_y_800mf",
    "vit_b_16", "swin_t", "convnext_tiny",
)  # fmt: skip
MIB = 1 << 20
MARK = 1237  # elements of a tensor of a size that no model has
TRACED_PEAK_MIB = 5458  # ResNet-50, SGD with momentum, batch 64, fp32, 224 px
TOLERANCE, TIME_LIMIT_S = 0.10, 15.0


def measure(name: str, optimizer: str, batch_size: int) -> int:
    """Peak bytes of a third step in this process, as torch's CPU allocator reports them."""
    import torch
    from torch.autograd.profiler import profile
    from torchvision import models

    torch.set_num_threads(1)
    totals: list[tuple[int, int]] = []
    with profile(use_kineto=True, profile_memory=True) as profiler:
        model = models.get_model(name)
        parameters = list(model.parameters())
        made: Any = (
            torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
            if optimizer == "sgd"
            else torch.optim.Adam(parameters)
        )
        images, labels = torch.zeros(batch_size, 3, 224, 224), torch.zeros(batch_size, dtype=torch.long)
        for _ in range(3):
            mark = torch.zeros(MARK)  # tells where a step begins
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            made.step()
            made.zero_grad()
            del mark, loss
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            totals.append((event.start_ns(), event.nbytes()))
    totals.sort()
    now, begins, history = 0, [], []
    for number, (_, size) in enumerate(totals):
        now += size
        history.append(now)
        if size == 4 * MARK:
            begins.append(number)
    return max(history[begins[-1] :])


def ask(name: str, optimizer: str, batch_size: int, gpu: str = "none") -> tuple[int, float]:
    """What `phalanx fit` says of a single process's peak, and how long it took."""
    words = [
        sys.executable,
        "-m",
        "phalanx",
        "fit",
        name,
        "--json",
        "--optimizer",
        optimizer,
        "--image-size",
        "224",
    ]
    words += ["--micro-batch-size", str(batch_size), "--gpu", gpu]
    start = time.perf_counter()
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    elapsed_s = time.perf_counter() - start
    single = next(row for row in json.loads(done.stdout)["strategies"] if row["name"] == "single")
    return single["peak_bytes"], elapsed_s


def measured(name: str, optimizer: str, batch_size: int) -> int:
    """`measure` in a process of its own."""
    words = [
        sys.executable,
        __file__,
        "--measure",
        f"{name},{optimizer}",
        "--micro-batch-size",
        str(batch_size),
    ]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    parser = arguments(__doc__, whole=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(measure(*options.measure.split(","), options.micro_batch_size))
        return
    rows = []
    for name in options.models.split(","):
        for optimizer in ("sgd", "adam"):
            real = measured(name, optimizer, options.micro_batch_size)
            said, elapsed_s = ask(name, optimizer, options.micro_batch_size)
            rows.append({"model": name, "optimizer": optimizer, "measured_mib": real / MIB, "fit_mib": said / MIB,
                         "ratio": said / real, "fit_s": elapsed_s})  # fmt: skip
            if not options.json:
                print("  {model:20} {optimizer:5} measured {measured_mib:8.1f} MiB  fit {fit_mib:8.1f} MiB  ratio {ratio:.3f}"
                      "  in {fit_s:.1f} s".format(**rows[-1]), flush=True)  # fmt: skip
    said, elapsed_s = ask("resnet50", "sgd", 64, gpu="A100")
    result = {
        "runs": rows,
        "within": sum(abs(row["ratio"] - 1) <= TOLERANCE for row in rows),
        "resnet50_64_mib": said / MIB,
        "resnet50_64_ratio": said / MIB / TRACED_PEAK_MIB,
        "slowest_s": max([elapsed_s, *(row["fit_s"] for row in rows)]),
        "micro_batch_size": options.micro_batch_size,
        **conditions("python", "cpus"),
    }
    if told_as_json(result, options):
        return
    ratios = [row["ratio"] for row in rows]
    print(f"{result['within']} of {len(rows)} within {TOLERANCE:.0%}; ratios {min(ratios):.3f} to {max(ratios):.3f}, median "
          f"{statistics.median(ratios):.3f}; 1 run each, {in_words(result)}")  # fmt: skip
    print(f"resnet50, SGD with momentum, batch 64: {said / MIB:.0f} MiB, {result['resnet50_64_ratio']:.3f} x the traced peak of "
          f"{TRACED_PEAK_MIB} MiB")  # fmt: skip
    print(f"slowest answer {result['slowest_s']:.1f} s (at most {TIME_LIMIT_S:.0f})")


if __name__ == "__main__":
    main()
