"""Scripts as users have them, for `phalanx fit tests/tools/fit/models.py:function`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH = 50_000, 384


class Decoder(nn.Module):
    """Embedding, blocks, output head; the head's weights are the embedding's or its own."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def _entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _tokens() -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 128, dtype=torch.long), torch.zeros(4, 128, dtype=torch.long)


def tied() -> Any:
    return Decoder(True), _tokens(), _entropy


def untied() -> Any:
    return Decoder(False), _tokens(), _entropy


class Numbers(nn.Module):
    """So many parameters, and next to no activations."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(count // 10)) for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum() * x.sum()


def billion() -> Any:
    return Numbers(1_000_000_000), torch.zeros(2, 3), lambda output: output


def seven_billion() -> Any:
    return Numbers(6_700_000_000), torch.zeros(2, 3), lambda output: output


def dict_batch() -> Any:
    class Own(nn.Linear):
        def forward(self, input: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            return {"loss": functional.mse_loss(super().forward(input), labels)}

    return Own(3, 4), {"input": torch.zeros(2, 3), "labels": torch.zeros(2, 4)}, None


def model_loss() -> Any:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square()  # type: ignore[no-any-return]

    return nn.Linear(3, 4), torch.zeros(2, 3), loss


def frozen() -> Any:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10))
    model[0].requires_grad_(False)
    return model, (torch.zeros(8, 100), torch.zeros(8, dtype=torch.long)), functional.cross_entropy


def drop_rates() -> Any:
    """Numbers read from a tensor while the model is built."""
    widths = [int(width) for width in torch.linspace(8, 64, 4).tolist()]
    layers = [nn.Linear(a, b) for a, b in zip([3, *widths], widths, strict=False)]
    return nn.Sequential(*layers), torch.zeros(2, 3), lambda output: output.sum()


def raises() -> Any:
    raise RuntimeError("the data is not here")


def ends() -> Any:
    raise SystemExit(0)


def three() -> Any:
    return 3


def nothing_to_train() -> Any:
    return nn.Linear(3, 4), torch.zeros(2, 3), lambda output: torch.zeros(())


def asks_for_values() -> Any:
    return (
        nn.Linear(3, 1),
        torch.zeros(2, 3),
        lambda output: output.sum() if output.sum().item() > 0 else -output.sum(),
    )


def wrong_shapes() -> Any:
    return nn.Linear(3, 4), (torch.zeros(2, 5), torch.zeros(2, 4)), nn.MSELoss()
