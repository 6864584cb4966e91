"""What may be fitted: torchvision's models and what scripts return, whole and broken; traced in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 (an optimizer's first step would import it, and it sets a variable of the environment)

from phalanx.tools.fit.child import answer
from phalanx.tools.fit.targets import TargetProblem
from tests.conftest import ROOT

MODELS = str(ROOT / "tests" / "tools" / "fit" / "models.py")


def ask(target: str, **options: Any) -> dict[str, Any]:
    request = {
        "target": target, "micro_batch_size": None, "image_size": None, "precision": "fp32", "optimizer": "adam", "momentum": 0.9,
        "activation_checkpointing": False, "device": "gpu", **options,
    }  # fmt: skip
    return answer(request)


def most(found: dict[str, Any]) -> int:
    """Activations of the first traced step."""
    return max(others + casts for _, casts, others in found["steps"][0]["moments"])


def test_tied_weights_are_counted_once() -> None:
    tied, untied = ask(f"{MODELS}:tied"), ask(f"{MODELS}:untied")
    assert untied["parameters"] - tied["parameters"] == 50_000 * 384
    assert (tied["shared"], untied["shared"]) == ({"head.weight": "table.weight"}, {})
    assert tied["steps"][0]["batch_size"] == 4
    assert len(tied["blocks_bytes"]) == 4


def test_precision_and_checkpointing_take_less() -> None:
    plain, half, again = (
        most(ask(f"{MODELS}:tied", micro_batch_size=32, **more))
        for more in ({}, {"precision": "bf16"}, {"activation_checkpointing": True})
    )
    assert half < plain
    assert again < plain


@pytest.mark.parametrize("name", ["dict_batch", "model_loss", "drop_rates"])
def test_batches_and_losses_of_every_kind(name: str) -> None:
    found = ask(f"{MODELS}:{name}", micro_batch_size=6)
    assert [step["batch_size"] for step in found["steps"]] == [6, 12]
    assert most(found) > 0
    if name == "drop_rates":
        widths = [3, 8, 26, 45, 64]
        assert found["parameters"] == sum(widths[n] * widths[n + 1] + widths[n + 1] for n in range(4))


def test_frozen_weights_have_no_gradients() -> None:
    found = ask(f"{MODELS}:frozen", optimizer="sgd")
    assert found["trainable_bytes"] == found["optimizer"]["state_bytes"] == 4 * (100 * 10 + 10)
    assert found["parameters_bytes"] == 4 * (100 * 100 + 100 + 100 * 10 + 10)
    assert ask(f"{MODELS}:frozen", optimizer="sgd", momentum=0.0)["optimizer"]["state_bytes"] == 0


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # what torchvision publishes; the heads of inception and the widths of regnet are made of numbers read from tensors
        ("regnet_y_400mf", 4_344_144),
        ("inception_v3", 27_161_264),
        ("r3d_18", 33_371_472),
    ],
)
def test_models_of_torchvision(name: str, parameters: int) -> None:
    found = ask(name, micro_batch_size=2)
    assert found["parameters"] == parameters
    assert most(found) > 10 << 20


@pytest.mark.parametrize(
    ("target", "message", "typed"),
    [
        (f"{MODELS}:raises", "RuntimeError: the data is not here", False),
        (f"{MODELS}:ends", "SystemExit: 0", False),
        (f"{MODELS}:three", "returned int", False),
        (f"{MODELS}:nothing_to_train", "does not depend on any parameter", False),
        (f"{MODELS}:asks_for_values", "depends on the values", False),
        (f"{MODELS}:wrong_shapes", "The training step failed", False),
        (f"{MODELS}:none", "no function 'none'", True),
        ("resnet51", "resnet50", True),
        ("fasterrcnn_resnet50_fpn", "what is in the pictures", True),
        ("quantized_resnet50", "not trained", True),
    ],
)
def test_what_cannot_be_fitted(target: str, message: str, typed: bool) -> None:
    with pytest.raises(TargetProblem, match=message) as caught:
        ask(target)
    assert str(caught.value).count("\nFix: ") == 1
    assert caught.value.typed == typed


def test_a_side_that_the_model_cannot_take() -> None:
    with pytest.raises(TargetProblem, match="--image-size"):
        ask("vit_b_16", image_size=100)


@pytest.mark.parametrize("content", ["import no_such_module", "raise SystemExit", "x = = 1"])
def test_scripts_that_cannot_be_imported(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken_script.py").write_text(content)
    with pytest.raises(TargetProblem, match="cannot be imported"):
        ask(f"{tmp_path / 'broken_script.py'}:make")
    sys.modules.pop("broken_script", None)
