"""PyTorch's usual MNIST recipe, over our digits: one process, per-sample transforms, one loader worker."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import VisionDataset

from raytrainer.data.in_memory import MNIST_MEAN, MNIST_STD
from tests.benchmarks.turns import join_turns
from tests.benchmarks.workload import Workload


class Digits(VisionDataset):
    """As torchvision.datasets.MNIST: bytes in memory, each sample a PIL image transformed by itself."""

    def __init__(self, images: torch.Tensor, targets: torch.Tensor, transform: Any):
        super().__init__("", transform=transform)
        self.data, self.targets = images, targets

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(self.data[index].numpy())
        return self.transform(image), int(self.targets[index])


def build_loader(workload: Workload) -> DataLoader:
    source = workload.build_dataset()
    steps = [transforms.ToTensor(), transforms.Normalize((MNIST_MEAN,), (MNIST_STD,))]
    digits = Digits(source.images, source.targets, transforms.Compose(steps))
    return DataLoader(digits, workload.global_batch_size, shuffle=True, num_workers=1, drop_last=True)


def main() -> None:
    workload = Workload.from_environment()
    loader = build_loader(workload)
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    criterion = nn.CrossEntropyLoss()
    turns, step = join_turns(), 0
    while step < workload.num_steps:
        for images, labels in loader:
            turns.step()
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step % workload.every_n_steps == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            if step == workload.num_steps:
                break


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
