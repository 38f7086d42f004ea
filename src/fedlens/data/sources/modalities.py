"""One data set seen through several eyes: each image in other modalities, a coloured background among them."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.errors import BadInput, nearest
from ...core.fields import Count, NonNegative, Positive
from ...core.rng import key, numpy_generator
from ..images import Decoded, Found, Images
from ..partition.counts import Generator
from ..paths import candidates
from ..pictures import picture
from ..source import DataSource
from .listing import images_in
from .photos import TinyImagenet, parquet
from .small import Cifar10, FashionMnist


# ---- views: one image in another modality ----------------------------------------------------------------------------
@dataclass(frozen=True)
class View:
    """A function of bytes [N, C, H, W] to bytes [N, 1 or 3, H, W]; all that is random comes from `draw`."""

    name: ClassVar[str]

    def __call__(self, x: np.ndarray, draw: Generator) -> np.ndarray:
        raise NotImplementedError(f"{type(self).__name__} does not say what an image looks like")


def grey(x: np.ndarray) -> np.ndarray:
    """Luminance of Rec. 601, [N, 1, H, W]."""
    if x.shape[1] == 1:
        return x
    return np.round(np.einsum("nchw,c->nhw", x, np.array([0.299, 0.587, 0.114], np.float32)))[:, None].astype(np.uint8)


@dataclass(frozen=True)
class AsItIs(View):
    name = "original"

    def __call__(self, x, draw):
        return x


@dataclass(frozen=True)
class Gray(View):
    name = "gray"

    def __call__(self, x, draw):
        return grey(x)


@dataclass(frozen=True)
class Colour(View):
    """On a random piece of a natural photograph, as MNIST-M (Ganin et al., 2016) does with BSDS500."""

    mix: Literal["difference", "sum"] = "difference"
    name = "colour"

    def __call__(self, x, draw):
        behind, before = patches(len(x), x.shape[2:], draw).astype(np.int16), grey(x).astype(np.int16)
        mixed = np.abs(behind - before) if self.mix == "difference" else np.minimum(behind + before, 255)
        return mixed.astype(np.uint8)


@dataclass(frozen=True)
class Added(Colour):
    """The same with the sum of both, cut off at white: what PSE's text says."""

    mix: Literal["difference", "sum"] = "sum"
    name = "added"


@dataclass(frozen=True)
class Edge(View):
    """Canny's edges (1986), white on black."""

    low: Positive = 100.0  # thresholds of the gradient's size |dx| + |dy| on bytes
    high: Positive = 200.0
    name = "edge"

    def __call__(self, x, draw):
        parts = np.array_split(grey(x), max(1, len(x) // 2048))
        return np.concatenate([canny(torch.from_numpy(part), self.low, self.high).numpy() for part in parts])


@dataclass(frozen=True)
class Inverted(View):
    name = "inverted"

    def __call__(self, x, draw):
        return 255 - x


@dataclass(frozen=True)
class Rotated(View):
    quarters: Count = 1  # turns of 90 degrees, against the clock
    name = "rotated"

    def __call__(self, x, draw):
        return np.ascontiguousarray(np.rot90(x, self.quarters, (2, 3)))


@dataclass(frozen=True)
class Noisy(View):
    sigma: NonNegative = 25.0  # of Gaussian noise, in grey levels of 255
    name = "noisy"

    def __call__(self, x, draw):
        noise = draw.standard_normal(x.shape, np.float32) * self.sigma
        return np.clip(np.round(x + noise), 0, 255).astype(np.uint8)


_ALL = AsItIs, Gray, Colour, Added, Edge, Inverted, Rotated, Noisy
VIEWS: dict[str, type[View]] = {view.name: view for view in _ALL}


def canny(x: Tensor, low: float, high: float) -> Tensor:
    """Edges of grey bytes [N, 1, H, W] as 0 and 255: Sobel, thinning across the edge, hysteresis."""
    smooth, slope = torch.tensor([1.0, 2.0, 1.0]), torch.tensor([-1.0, 0.0, 1.0])
    kernels = torch.stack([torch.outer(smooth, slope), torch.outer(slope, smooth)])[:, None]
    dx, dy = F.conv2d(F.pad(x.float(), (1, 1, 1, 1), mode="replicate"), kernels).split(1, dim=1)
    size = dx.abs() + dy.abs()
    edge = _thinned(size, dx, dy) & (size > low)
    strong = edge & (size > high)
    while True:  # ends: every turn but the last adds a pixel
        grown = edge & (F.max_pool2d(strong.float(), 3, stride=1, padding=1) > 0)
        if torch.equal(grown, strong):
            return strong.to(torch.uint8) * 255
        strong = grown


def _thinned(size: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """Where the gradient is a maximum along its own direction, rounded to one of four."""
    around = F.pad(size, (1, 1, 1, 1))

    def beside(down: int, right: int) -> Tensor:
        return around[:, :, 1 + down : around.shape[2] - 1 + down, 1 + right : around.shape[3] - 1 + right]

    flat, steep = dy.abs() < dx.abs() * (2**0.5 - 1), dy.abs() > dx.abs() * (2**0.5 + 1)  # tan of 22.5 and 67.5 degrees
    # Of two equal neighbours the later one goes; on diagonals both do.
    across = (size > beside(0, -1)) & (size >= beside(0, 1))
    upright = (size > beside(-1, 0)) & (size >= beside(1, 0))
    falling = (size > beside(-1, -1)) & (size > beside(1, 1))
    rising = (size > beside(-1, 1)) & (size > beside(1, -1))
    slanted = torch.where(dx * dy < 0, rising, falling)
    return torch.where(flat, across, torch.where(steep, upright, slanted))


# ---- the data set ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Modalities(DataSource):
    """Another data set in several views, each a domain; deal it with partition=domains (PSE, joint shift)."""

    base: DataSource = FashionMnist()  # the data set that is shown
    views: tuple[str | View, ...] = ("gray", "colour")  # in which it is shown
    images: Literal["all", "own"] = "all"  # every view shows all images, or each image is in one view only
    name = "modalities"
    known = True

    def find(self) -> Found:
        views = self.seen()
        found = self.base.find()
        files, origin = found.files, f"{found.origin}, seen as {', '.join(view.name for view in views)}"
        if any(isinstance(view, Colour) for view in views):
            photographs, words = find_photographs()
            files, origin = (*files, *photographs), f"{origin} (backgrounds: {words})"
        return Found(files, origin, lambda: self._read(self.base.load(), views))

    def seen(self) -> list[View]:
        if len(self.views) < 2:
            raise BadInput(f"data.views has {len(self.views)} views, but modalities need at least two")
        for view in self.views:
            if isinstance(view, str) and view not in VIEWS:
                raise BadInput(f"data.views names {view!r}; {nearest(view, VIEWS)}")
        return [VIEWS[view]() if isinstance(view, str) else view for view in self.views]

    def settings(self) -> dict[str, str]:
        return super().settings() | {"views": repr(self.seen())}

    def _read(self, images: Images, views: list[View]) -> Decoded:
        x, count = images.x.numpy(), len(images)
        if self.images == "all":
            of_view = [np.arange(count)] * len(views)
        else:
            of_view = np.array_split(numpy_generator(key("modalities", "images")).permutation(count), len(views))
            of_view = [np.sort(index) for index in of_view]
        draws = [numpy_generator(key("modalities", number)) for number in range(len(views))]
        shown = [view(x[index], draw) for view, index, draw in zip(views, of_view, draws, strict=True)]
        channels = max(part.shape[1] for part in shown)
        pixels = np.concatenate([np.broadcast_to(part, (len(part), channels, *part.shape[2:])) for part in shown])
        source = np.concatenate(of_view)
        domains = np.repeat(np.arange(len(views)), [len(index) for index in of_view])
        is_train = np.isin(source, images.train.numpy())
        is_test = np.isin(source, images.test.numpy())
        users = None if images.users is None else images.users.numpy()[source]
        y, train, test = images.y.numpy()[source], np.flatnonzero(is_train), np.flatnonzero(is_test)
        names = tuple(view.name for view in views) if users is None else images.owner_names
        return Decoded(pixels, y, train, test, images.classes, users, domains, owner_names=names)


# ---- photographs behind images ---------------------------------------------------------------------------------------
FOLDERS = ("bsds500", "BSDS500", "BSR/BSDS500", "BSR_bsds500/BSR/BSDS500")


def find_photographs() -> tuple[tuple[Path, ...], str]:
    """(files, what they are in words)."""
    for folder in candidates(FOLDERS):
        pack = folder / "images_half.parquet"
        files = (pack,) if pack.is_file() else tuple(images_in(folder))
        if files:
            return files, "BSDS500"
    for source in (TinyImagenet(), Cifar10()):
        if found := _found(source):
            return found.files, f"{source.name}, as BSDS500 is not there"
    raise BadInput(
        "the view colour needs natural photographs: put BSDS500 into a folder bsds500 in one that FEDLENS_DATA names"
    )


def _found(source: TinyImagenet | Cifar10) -> Found | None:
    return next((found for folder in candidates(source.folders) if (found := source.look(folder))), None)


def patches(count: int, size: tuple[int, ...], draw: Generator) -> np.ndarray:
    """Random pieces [count, 3, H, W], each of a random photograph."""
    photographs = [photo for photo in _photographs() if photo.shape[0] >= size[0] and photo.shape[1] >= size[1]]
    if not photographs:
        raise BadInput(f"no photograph for the view colour is as large as the images, {size[1]}x{size[0]}")
    which = draw.integers(len(photographs), size=count)
    corners = draw.random((count, 2))
    cut = np.empty((count, *size, 3), np.uint8)
    for index, photo in enumerate(photographs[number] for number in which):
        top, left = (corners[index] * (np.array(photo.shape[:2]) - size + 1)).astype(int)
        cut[index] = photo[top : top + size[0], left : left + size[1]]
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 2))


def _photographs() -> list[np.ndarray]:
    files, words = find_photographs()
    if words != "BSDS500":
        source = TinyImagenet() if words.startswith(TinyImagenet.name) else Cifar10()
        return list(source.load().x.numpy().transpose(0, 2, 3, 1))
    if files[0].suffix == ".parquet":
        return [picture(io.BytesIO(raw), files[0]) for raw in parquet(files[0])["jpeg"].to_pylist()]
    return [picture(file, file) for file in files]
