"""Where in an image a trained network sees its class: a heat map as PNG, from a checkpoint of an image recipe.

phalanx run gradcam --checkpoint runs/cifar --image cat.jpg
phalanx run gradcam --checkpoint runs/mnist --index 7              # the 7th image of the run's test set
python -m phalanx.recipes.gradcam --checkpoint runs/cifar/checkpoints/step-900 --image cat.jpg --label 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.recipes.settings import SettingsError, is_rank_zero

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.recipes.class_maps import Trained


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradcam", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="of a run of mnist, cifar or resnet, or one of its checkpoints",
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument(
        "--image", type=Path, metavar="FILE", help="any image file; its middle square is taken"
    )
    chosen.add_argument(
        "--index", type=int, metavar="N", help="the N-th test image of the run's data, from 0"
    )
    parser.add_argument(
        "--data-dir", default="data", metavar="FOLDER", help="for --index: where the data lie (data)"
    )
    parser.add_argument("--label", type=int, metavar="N", help="the class asked about (the likeliest)")
    parser.add_argument(
        "--layer", metavar="NAME", help="the module whose maps are weighed (the last that has some)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("gradcam.png"), metavar="FILE", help="the picture (gradcam.png)"
    )
    return parser


def _test_image(trained: Trained, data_dir: str, index: int) -> Tensor:
    """Bytes [channels, side, side] of the run's test set."""
    from phalanx.recipes import color_images, datasets

    images: Tensor
    if trained.recipe == "mnist":
        images = datasets.load(trained.data, data_dir, False, 0.0, 0).test.images
    elif trained.recipe == "cifar":
        images = color_images.load(trained.data, data_dir, False, 0.0, 0).test[0]
    else:
        raise SettingsError("--index is for the sets of mnist and cifar.\nFix: --image FILE")
    if not 0 <= index < len(images):
        raise SettingsError(f"--index {index}: the test set has the images 0 to {len(images) - 1}.")
    return images[index]


def show(arguments: argparse.Namespace) -> str:
    """Draw the picture; returns what to tell the user."""
    from phalanx.recipes import class_maps

    trained = class_maps.load(arguments.checkpoint)
    if arguments.image is not None:
        image = class_maps.read_image(arguments.image, trained.side, len(trained.mean))
    else:
        image = _test_image(trained, arguments.data_dir, arguments.index)
    found = class_maps.class_map(trained, image, arguments.label, arguments.layer)
    try:
        class_maps.draw(trained, image, found, arguments.output)
    except ImportError:
        raise SettingsError(
            "matplotlib, which draws the picture, is not installed.\nFix: pip install 'phalanx[recipes]'"
        ) from None
    except OSError as error:
        raise SettingsError(f"--output {arguments.output} cannot be written: {error.strerror}.") from error
    lines = [f"{trained.path} on {arguments.image or f'test image {arguments.index} of {trained.data}'}"]
    for place in found.chances.argsort(descending=True)[:3].tolist():
        lines.append(f"  {float(found.chances[place]):6.1%}  {trained.classes[place]}")
    return "\n".join([*lines, f"what speaks for {trained.classes[found.label]}: {arguments.output}"])


def main(argv: Sequence[str] | None = None) -> None:
    """The recipe's command line."""
    arguments = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        if is_rank_zero():  # one picture, however many ranks were started
            print(show(arguments), flush=True)
        return
    except SettingsError as error:
        problem = str(error)
    print(f"gradcam: {problem}", file=sys.stderr, flush=True)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
