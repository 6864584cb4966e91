"""Heat maps from a checkpoint alone: they lie where the class is seen."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from phalanx.recipes import class_maps, gradcam
from phalanx.recipes.settings import SettingsError
from tests.ranks import RankRunner
from tests.recipes.test_cifar import write_cifar


def _train(rank: int, world_size: int, folder: str) -> None:
    os.chdir(folder)
    from phalanx.recipes import cifar, mnist

    cifar.train(
        cifar.CifarSettings(
            data_dir="data", epochs=1, global_batch_size=16, width=4, checkpoint_every_steps=2
        )
    )
    mnist.train(mnist.MnistSettings(data="digits", epochs=1, augment="none"))


@pytest.fixture
def runs(run_ranks: RankRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_cifar(tmp_path / "data")
    run_ranks(_train, str(tmp_path), world_size=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_picture_from_a_checkpoint_of_either_recipe(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    Image.new("RGB", (200, 100), (200, 30, 30)).save(runs / "red.jpg")
    for words in (
        ["--checkpoint", "runs/cifar", "--index", "3"],
        ["--checkpoint", "runs/cifar/checkpoints", "--image", "red.jpg", "--label", "7"],
        ["--checkpoint", "runs/cifar/checkpoints/step-2", "--image", "red.jpg", "--layer", "features.2"],
        ["--checkpoint", "runs/mnist", "--index", "0"],
        ["--checkpoint", "runs/mnist", "--image", "red.jpg"],
    ):
        gradcam.main([*words, "--output", "map.png"])
        out = capsys.readouterr().out
        assert "map.png" in out
        assert ("class 7: map.png" in out) == ("--label" in words)
        with Image.open(runs / "map.png") as picture:
            assert picture.format == "PNG"
            assert picture.convert("RGB").getcolors(50) is None  # more than 50 colours
        (runs / "map.png").unlink()

    for words, told in (
        (["--checkpoint", "none", "--index", "0"], "there is no whole checkpoint"),
        (["--checkpoint", "runs/cifar", "--index", "10"], "the test set has the images 0 to 9"),
        (["--checkpoint", "runs/cifar", "--index", "0", "--label", "10"], "the classes 0 to 9"),
        (
            ["--checkpoint", "runs/cifar", "--index", "0", "--layer", "nothing"],
            "--layer nothing: the network has",
        ),
        (["--checkpoint", "runs/cifar", "--index", "0", "--layer", "classify"], "gives no maps"),
        (["--checkpoint", "runs/cifar", "--image", "data"], "cannot be read as an image"),
        (["--checkpoint", "runs/cifar", "--index", "0", "--output", "none/map.png"], "cannot be written"),
    ):
        with pytest.raises(SystemExit) as caught:
            gradcam.main(words)
        assert caught.value.code == 2
        err = capsys.readouterr().err
        assert told in err
        assert "Traceback" not in err


class _Corner(torch.nn.Module):
    """Speaks for class 1 by the light in its maps' upper left quarter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = torch.nn.Conv2d(1, 1, 1, bias=False)
        torch.nn.init.ones_(self.maps.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        light = torch.nn.functional.relu(self.maps(images), inplace=True).sum((1, 2, 3))
        return torch.stack([-light, light], 1)


def test_the_heat_lies_where_the_light_is(tmp_path: Path) -> None:
    trained = class_maps.Trained(_Corner(), "cifar", "fake", 16, (0.0,), (1.0,), ("dark", "light"), tmp_path)
    image = torch.zeros(1, 16, 16, dtype=torch.uint8)
    image[:, :6, :6] = 255
    found = class_maps.class_map(trained, image)
    assert (found.label, found.layer) == (1, "maps")
    assert found.heat[:6, :6].min() == 1
    assert found.heat[7:].max() == 0
    assert class_maps.class_map(trained, image, label=0).heat.max() == 0  # nothing speaks for the dark


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"values": {}}))
    with pytest.raises(SettingsError, match="does not say what its images are like"):
        class_maps.load(tmp_path)
