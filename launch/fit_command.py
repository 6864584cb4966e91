"""`phalanx fit`: the memory that a training step needs, strategy by strategy, without a GPU."""

from __future__ import annotations

import json

import click

from phalanx.tools.usage import UsageMistake

_HELP = """Say what a training step of MODEL takes in GPU memory, on every strategy and number of ranks.

\b
phalanx fit resnet50 --micro-batch-size 64 --optimizer sgd
phalanx fit train.py:make --precision bf16 --world-size 8 --gpu A100

MODEL is a torchvision model by name, or script.py:function, a function without arguments that returns (model, example
batch, loss). The batch is (inputs, target), inputs, or a dict of the model's arguments; the loss takes (output, target),
the output, or (model, batch), or is None where the model returns its own. No GPU is needed and no memory is taken: the
step runs on fake tensors, in a process of its own.

Exit code: 0 fine, 1 the model or its script is broken, 2 usage, 3 phalanx itself could not finish.
"""


@click.command("fit", help=_HELP, short_help="Say what a training step takes in GPU memory, per strategy.")
@click.option(
    "--micro-batch-size",
    envvar="PHALANX_FIT_MICRO_BATCH_SIZE",
    metavar="N",
    help="Samples per rank and forward.  [default: 32, or the example batch's]",
)
@click.option(
    "--optimizer",
    default="adam",
    show_default=True,
    type=click.Choice(["sgd", "adam", "adamw"]),
    envvar="PHALANX_FIT_OPTIMIZER",
    help="SGD has momentum 0.9.",
)
@click.option(
    "--momentum",
    default="0.9",
    show_default=True,
    envvar="PHALANX_FIT_MOMENTUM",
    metavar="X",
    help="SGD's momentum; 0 keeps no state.",
)
@click.option(
    "--precision",
    default="fp32",
    show_default=True,
    type=click.Choice(["fp32", "bf16", "fp16"]),
    envvar="PHALANX_FIT_PRECISION",
    help="As for `parallelize`.",
)
@click.option(
    "--world-size",
    default="2,4,8",
    show_default=True,
    envvar="PHALANX_FIT_WORLD_SIZE",
    metavar="N[,N..]",
    help="Numbers of ranks to compare; a single process is always shown.",
)
@click.option(
    "--gpu",
    envvar="PHALANX_FIT_GPU",
    metavar="NAME|SIZE",
    help="H100, 24GiB, none, ..  [default: the smallest GPU here]",
)
@click.option(
    "--image-size",
    envvar="PHALANX_FIT_IMAGE_SIZE",
    metavar="N",
    help="Side of the pictures.  [default: what the model was published for]",
)
@click.option(
    "--activation-checkpointing",
    is_flag=True,
    envvar="PHALANX_FIT_ACTIVATION_CHECKPOINTING",
    help="Recompute the activations of repeated blocks.",
)
@click.option(
    "--fp32-gradients",
    is_flag=True,
    envvar="PHALANX_FIT_FP32_GRADIENTS",
    help="ZeRO in 16 bits sums gradients in fp32.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    envvar="PHALANX_FIT_JSON",
    help="Print one JSON object and nothing else.",
)
@click.argument("model", required=False)
def fit_command(
    model: str | None,
    micro_batch_size: str | None,
    optimizer: str,
    momentum: str,
    precision: str,
    world_size: str,
    gpu: str | None,
    image_size: str | None,
    activation_checkpointing: bool,
    fp32_gradients: bool,
    as_json: bool,
) -> int:
    """What `_HELP` says."""
    from phalanx.tools.fit.asking import BadTarget
    from phalanx.tools.fit.fitting import Question, fit, fit_json
    from phalanx.tools.fit.gpu_memory import find_gpu
    from phalanx.tools.fit.reports import fit_text

    if model is None:
        raise UsageMistake(
            "MODEL is missing: a torchvision model, or script.py:function.", fix="phalanx fit resnet50"
        )
    question = Question(
        target=model,
        micro_batch_size=_whole("--micro-batch-size", micro_batch_size, 1_000_000),
        optimizer=optimizer,
        momentum=_momentum(momentum),
        precision=precision,
        world_sizes=_world_sizes(world_size),
        image_size=_whole("--image-size", image_size, 16_384),
        activation_checkpointing=activation_checkpointing,
        fp32_gradients=fp32_gradients,
    )
    try:
        found = fit(question, find_gpu(gpu))
    except BadTarget as error:
        if as_json:
            click.echo(json.dumps({"schema": 1, "error": str(error)}))
        else:
            click.echo(f"phalanx fit: {error}", err=True)
        return 1
    click.echo(json.dumps(fit_json(found)) if as_json else "\n".join(fit_text(found)))
    return 0


def _whole(name: str, text: str | None, most: int) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 9 and 1 <= int(text) <= most):
        raise UsageMistake(f"{name} {text}: a whole number from 1 to {most:,}.", fix=f"{name} 64")
    return int(text)


def _world_sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 7 and int(part) > 0 for part in parts):
        raise UsageMistake(
            f"--world-size {text}: numbers of ranks, 1 or more each.", fix="--world-size 2,4,8"
        )
    return tuple(sorted({int(part) for part in parts}))


def _momentum(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageMistake(f"--momentum {text}: from 0 to less than 1.", fix="--momentum 0.9")
    return value
