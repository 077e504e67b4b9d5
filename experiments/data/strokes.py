"""Change thickness and strokes of bright figures on a dark background: Morpho-MNIST's four perturbations, as feature shifts.

Each image is enlarged four times, made black and white at the middle of its range, changed, and averaged back
to its size.

Morpho-MNIST: Quantitative Assessment and Diagnostics for Representation Learning, Castro et al., JMLR 2019.
The amounts are those of the authors' published example. FedBN (Li et al., ICLR 2021, appendix G) has the data as
two unseen clients: global (plain, thin, thick) and local (plain, swelling, fracture). Two things differ from
Morpho-MNIST. The centre line is where the distance to the background has a local maximum, and not a thinned
skeleton. Fractures may lie near the ends and forks of a stroke.

Legend: N images, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

SCALE = 4  # enlargement at which images are changed
THINNING, THICKENING = 0.7, 1.0  # by how much the stroke changes on each side, as shares of half the mean thickness
STRENGTH, RADIUS = 3.0, 7.0  # of a swelling: exponent; diameter in pixels / root of the mean thickness
FRACTURES, WIDTH, EXTENSION = 3, 1.5, 0.5  # number per image; width, and length beyond each side of the stroke, in pixels
WINDOW = 2  # pixels around a point whose centre line gives the direction of the stroke

Mask = NDArray[np.bool_]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """Hold one enlarged image.

    Attributes:
        inside: whether each pixel is bright (H, W).
        depth: the distance of each pixel to the background, in pixels (H, W).
        centre: whether each pixel is on the centre line, where ``depth`` has local maxima (H, W).
    """

    inside: Mask
    depth: Array
    centre: Mask

    @classmethod
    def of(cls, inside: Mask) -> Figure:
        """Make the figure whose bright pixels are ``inside`` (H, W)."""
        from scipy import ndimage  # type: ignore[import-untyped]  # imported here because only these shifts need it

        depth = ndimage.distance_transform_edt(inside)
        return cls(inside, depth, inside & (depth == ndimage.maximum_filter(depth, size=3)))

    @property
    def thickness(self) -> float:
        """Return the mean thickness of the strokes, in pixels of the enlarged image."""
        return 2.0 * float(self.depth[self.centre].mean())

    def place(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return a random point of the centre line: its row and column."""
        points = np.argwhere(self.centre)
        return np.asarray(points[rng.integers(len(points))])


def thin(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Reduce the thickness of strokes in uint8 images (N, C, H, W) by 0.7 of their mean thickness."""
    return _changed(x, rng, lambda figure, rng: figure.depth > int(THINNING * figure.thickness / 2))


def thick(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Increase the thickness of strokes in uint8 images (N, C, H, W) by their mean thickness."""

    def grow(figure: Figure, rng: np.random.Generator) -> Mask:
        return np.asarray(Figure.of(~figure.inside).depth <= int(THICKENING * figure.thickness / 2))

    return _changed(x, rng, grow)


def swelling(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Enlarge the stroke in each of the uint8 images (N, C, H, W) around a random point of its centre line.

    Each pixel near the point gets the value of a pixel that is nearer to the point.
    """

    def swell(figure: Figure, rng: np.random.Generator) -> Mask:
        centre = figure.place(rng)
        radius = RADIUS * np.sqrt(figure.thickness / SCALE) / 2 * SCALE
        offset = np.moveaxis(np.indices(figure.inside.shape), 0, -1) - centre
        share = np.minimum(np.hypot(offset[..., 0], offset[..., 1]) / radius, 1.0) ** (STRENGTH - 1)
        read = np.rint(centre + share[..., None] * offset).astype(np.int64)
        return np.asarray(figure.inside[read[..., 0], read[..., 1]])

    return _changed(x, rng, swell)


def fracture(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Cut strokes in uint8 images (N, C, H, W): in three places of each image, at random points of the centre line."""

    def cut(figure: Figure, rng: np.random.Generator) -> Mask:
        rows, columns = np.indices(figure.inside.shape)
        broken = figure.inside.copy()
        for _ in range(FRACTURES):
            row, column = figure.place(rng)
            angle = _direction(figure.centre, row, column) + np.pi / 2
            length = figure.depth[row, column] + EXTENSION * SCALE
            along = (rows - row) * np.sin(angle) + (columns - column) * np.cos(angle)
            across = (rows - row) * np.cos(angle) - (columns - column) * np.sin(angle)
            beyond = np.maximum(np.abs(along) - length, 0.0)
            broken &= np.hypot(beyond, across) > WIDTH * SCALE / 2
        return broken

    return _changed(x, rng, cut)


def _direction(centre: Mask, row: int, column: int) -> float:
    """Return the direction of the centre line near a point, as an angle to the horizontal axis, in radians.

    The direction is the longer axis of the second moments of the line's points.
    """
    reach = WINDOW * SCALE
    top, left = max(row - reach, 0), max(column - reach, 0)
    points = np.argwhere(centre[top : row + reach + 1, left : column + reach + 1]).astype(np.float64)
    y, x = (points - points.mean(0)).T
    return float(0.5 * np.arctan2(2 * (x * y).sum(), (x * x).sum() - (y * y).sum()))


def _changed(x: Tensor, rng: np.random.Generator, change: Callable[[Figure, np.random.Generator], Mask]) -> Tensor:
    """Apply ``change`` to the enlarged figure of each uint8 image in ``x`` (N, C, H, W), and return images of the same shape.

    All channels of a changed image are equal. An image of one brightness is not changed.
    """
    if len(x) == 0:
        return x
    grey = x.double().mean(1, keepdim=True)
    large = functional.interpolate(grey, scale_factor=SCALE, mode="bicubic", align_corners=False)
    made = []
    for image, one in zip(x, large[:, 0].numpy(), strict=True):
        inside = one >= (one.min() + one.max()) / 2
        if inside.all():
            made.append(image)
            continue
        changed = torch.from_numpy(change(Figure.of(inside), rng)).double()
        small = functional.avg_pool2d(changed[None, None], SCALE)[0]
        made.append((255 * small).round().to(torch.uint8).expand(x.shape[1], -1, -1))
    return torch.stack(made)
