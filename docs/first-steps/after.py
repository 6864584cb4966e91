"""Train a small network on MNIST or Fashion-MNIST; run it again to go on where it stopped."""

import argparse

import torch
from torch import nn
from torch.utils.data import random_split
from torchvision import datasets, transforms

from phalanx.dist import CheckpointManager, ShardLoader, all_reduce_sum, init_world, parallelize, rank_zero_first


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2),
            nn.BatchNorm2d(16),
            nn.SELU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2),
            nn.BatchNorm2d(32),
            nn.SELU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.AlphaDropout(0.1),
            nn.Linear(32 * 8 * 8, 128),
            nn.SELU(),
            nn.AlphaDropout(0.1),
            nn.Linear(128, 10),
        )

    def forward(self, images):
        return self.classifier(self.features(images))


@torch.no_grad()
def accuracy(model, dataset, device):
    model.eval()
    correct = total = 0
    for images, labels in ShardLoader(dataset, global_batch_size=500, num_workers=2):
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(dim=1) == labels).sum().item()
        total += len(labels)
    correct, total = all_reduce_sum(correct, total)
    return correct / total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="MNIST", choices=["MNIST", "FashionMNIST"])
    parser.add_argument("--data", default="data", help="folder of the data sets, downloaded if missing")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    world = init_world()
    device = world.device
    transform = transforms.Compose([transforms.Resize(32), transforms.ToTensor()])
    dataset = getattr(datasets, args.dataset)
    with rank_zero_first():
        dataset(args.data, download=True)
    train_set = dataset(args.data, train=True, transform=transform)
    test_set = dataset(args.data, train=False, transform=transform)
    train_set, validation_set = random_split(train_set, [0.9, 0.1], torch.Generator().manual_seed(0))
    train_loader = ShardLoader(train_set, global_batch_size=50, shuffle=True, num_workers=2)

    model = Network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, weight_decay=1e-4)
    loss_function = nn.CrossEntropyLoss()
    model, optimizer, engine = parallelize(model, optimizer, loader=train_loader)
    checkpoints = CheckpointManager("checkpoints", model=model, optimizer=optimizer, loader=train_loader)

    for epoch in range(checkpoints.restore(else_from="checkpoint.pt").epoch, args.epochs):
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = loss_function(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        validation, test = accuracy(model, validation_set, device), accuracy(model, test_set, device)
        if world.is_rank_zero:
            print(f"epoch {epoch + 1}: validation accuracy {validation:.2%}, test accuracy {test:.2%}")
        checkpoints.save()


if __name__ == "__main__":
    main()
