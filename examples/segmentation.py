"""Segmentation with a network of your own: discs and squares on noise, seen by three different cameras. Batches are
dicts.
"""

from functools import partial

import numpy as np
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

from fl_bn import Federation, Segmentation, methods

ROUNDS, SIZE = 12, 16


class Shapes(Dataset):
    """Make random images (1, 16, 16) and masks: 0 background, 1 disc, 2 square, 255 unlabelled (the frame)."""

    def __init__(self, n, brightness, contrast, seed):
        rng, (rows, columns) = np.random.default_rng(seed), np.mgrid[:SIZE, :SIZE]
        self.masks = np.zeros((n, SIZE, SIZE), dtype=np.int64)
        for mask in self.masks:
            for kind in (1, 2):
                row, column, radius = rng.integers(4, SIZE - 4, 2).tolist() + [rng.integers(2, 5)]
                far = np.hypot(rows - row, columns - column) if kind == 1 else np.maximum(abs(rows - row), abs(columns - column))
                mask[far <= radius] = kind
        self.images = (self.masks - 0.7 + 0.3 * rng.normal(size=self.masks.shape)) * contrast + brightness
        self.masks[:, 0] = self.masks[:, -1] = 255  # counted neither in the loss nor in the score

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, i):
        return {"image": torch.from_numpy(self.images[i, None]).float(), "mask": torch.from_numpy(self.masks[i])}


class Net(nn.Module):
    """Return a dict, as torchvision's networks for segmentation do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 3, 1),
        )

    def forward(self, image):
        return {"out": self.body(image)}


def main():
    torch.manual_seed(0)
    cameras = [(0.0, 1.0), (0.5, 0.7), (-0.3, 1.3)]  # brightness and contrast
    loaders = [DataLoader(Shapes(64, *camera, seed), batch_size=16, shuffle=True) for seed, camera in enumerate(cameras)]
    test = [batch for seed, camera in enumerate(cameras, 10) for batch in DataLoader(Shapes(32, *camera, seed), batch_size=32)]
    federation = Federation(Net(), methods.fixbn(), loaders, task=Segmentation(), test=test, optimizer=partial(SGD, lr=0.3))
    for record in federation.run(ROUNDS):
        print(f"round {record.round:>2} pixel accuracy {record.evaluation['accuracy']:.3f}  mean IoU {record.evaluation['mean-iou']:.3f}")


if __name__ == "__main__":
    main()
