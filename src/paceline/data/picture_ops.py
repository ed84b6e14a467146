"""Operations on a batch of pictures, with parameters per sample.

Pictures are uint8 tensors [B, C, H, W], and stay uint8 between operations. A sample's pixels depend only on the
sample and its parameters: everything is elementwise or a gather, so the batch, the rank and the number of threads
change no bit. Nothing reads a value back from the device, so a whole pipeline can be recorded as a CUDA graph.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

_GRAY = (0.2989, 0.587, 0.114)  # ITU-R 601-2, with the rounding that torchvision uses
_LEVELS = 256
_VALUES_AT_ONCE = 2**17

# --- Geometry ---------------------------------------------------------------------------------------------------------


def resize_boxes(samples: Tensor, boxes: Tensor, size: tuple[int, int], interpolation: str = "bilinear") -> Tensor:
    """Cut one box out of each picture and resize it, with antialiasing. `boxes` is [B, 4]: top, left, height, width.

    Boxes are whole pixels inside the picture. Pixels outside a box do not contribute to its result.
    """
    top, left, height, width = boxes.unbind(1)
    rows = _resample_rows(samples, top, height, size[0], interpolation)
    columns = _resample_rows(rows.transpose(2, 3), left, width, size[1], interpolation)
    return to_bytes(columns.transpose(2, 3))


def _resample_rows(samples: Tensor, start: Tensor, extent: Tensor, size: int, interpolation: str) -> Tensor:
    """Resample axis 2 from `extent` rows at `start` to `size` rows: a weighted sum of a few rows per output row."""
    batch, channels, height, width = samples.shape
    index, weight = _taps(start, extent, height, size, interpolation)
    flat = samples.reshape(batch * channels * height, width)
    first = torch.arange(batch * channels, device=samples.device).view(batch, channels, 1) * height
    total: Tensor | None = None
    for tap in range(index.shape[2]):
        rows = flat.index_select(0, (first + index[:, None, :, tap]).reshape(-1)).view(batch, channels, size, width)
        part = rows.float().mul_(weight[:, None, :, tap, None])
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _taps(start: Tensor, extent: Tensor, height: int, size: int, interpolation: str) -> tuple[Tensor, Tensor]:
    """Rows and their weights for each output row, as torch's antialiased interpolation chooses them."""
    radius = {"bilinear": 1.0, "bicubic": 2.0}[interpolation]
    count = math.ceil(2 * radius * max(1.0, height / size)) + 1  # no box is taller than the picture
    start, extent = start.double()[:, None, None], extent.double()[:, None, None]
    scale = extent / size
    stretch = scale.clamp(min=1.0)
    centre = (torch.arange(size, device=start.device).double()[None, :, None] + 0.5) * scale
    # torch truncates to an integer and then limits to the picture; floor gives the same rows after the limit.
    first = torch.floor(centre - radius * stretch + 0.5)
    last = torch.floor(centre + radius * stretch + 0.5)
    rows = first + torch.arange(count, device=start.device).double()
    inside = (rows >= 0) & (rows < extent) & (rows < last)
    distance = ((rows - centre + 0.5) / stretch).abs()
    weight = (1 - distance).clamp(min=0.0) if interpolation == "bilinear" else _cubic(distance)
    weight = weight * inside
    weight = weight / weight.sum(2, keepdim=True)
    index = start + torch.minimum(rows.clamp(min=0.0), extent - 1)
    return index.long(), weight.float()


def _cubic(distance: Tensor, a: float = -0.5) -> Tensor:
    """Keys' cubic filter, with the coefficient that Pillow and torch's antialiased bicubic use."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))


def mirror_borders(samples: Tensor, rows: int, columns: int) -> Tensor:
    """Add borders that mirror the picture. torch's reflection padding does not support uint8."""
    for axis, border in ((2, rows), (3, columns)):
        size = samples.shape[axis]
        places = torch.arange(-border, size + border, device=samples.device).abs()
        samples = samples.index_select(axis, torch.minimum(places, 2 * (size - 1) - places))
    return samples


def flip(samples: Tensor, is_flipped: Tensor, axis: int) -> Tensor:
    """Mirror the chosen samples along an axis."""
    return torch.where(is_flipped[:, None, None, None], samples.flip(axis), samples)


def affine(samples: Tensor, matrices: Tensor, fill: int = 0) -> Tensor:
    """Move pixels by a matrix per sample, [B, 2, 3], that maps output to input coordinates around the centre.

    The nearest input pixel is taken. Places outside the picture get `fill`.
    """
    batch, channels, height, width = samples.shape
    device = samples.device
    rows = torch.arange(height, device=device).float() - (height - 1) / 2
    columns = torch.arange(width, device=device).float() - (width - 1) / 2
    matrices = matrices.float()[:, :, :, None, None]
    x = matrices[:, 0, 0] * columns + matrices[:, 0, 1] * rows[:, None] + matrices[:, 0, 2] + (width - 1) / 2
    y = matrices[:, 1, 0] * columns + matrices[:, 1, 1] * rows[:, None] + matrices[:, 1, 2] + (height - 1) / 2
    x, y = x.round(), y.round()
    is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    index = y.clamp(0, height - 1).mul_(width).add_(x.clamp(0, width - 1)).long().view(batch, 1, -1)
    moved = samples.reshape(batch, channels, -1).gather(2, index.expand(-1, channels, -1))
    return moved.masked_fill_(~is_inside.view(batch, 1, -1), fill).view(samples.shape)


# --- Tones: every value of a channel is replaced by a table -----------------------------------------------------------


def apply_tables(samples: Tensor, tables: Tensor) -> Tensor:
    """Replace every value by its entry in the table of its sample and channel, uint8 [B, C, 256]."""
    batch, channels = samples.shape[:2]
    values = samples.reshape(batch, channels, -1)
    return tables.gather(2, values.long()).view(samples.shape)


def ramp(device: torch.device) -> Tensor:
    """All values of a byte, as float32 [1, 1, 256]."""
    return torch.arange(_LEVELS, device=device).float().view(1, 1, -1)


def brightness_tables(factor: Tensor) -> Tensor:
    return _to_tables(ramp(factor.device) * factor.float()[:, None, None])


def contrast_tables(factor: Tensor, samples: Tensor) -> Tensor:
    """Away from, or towards, the mean grey value of the picture."""
    # The sum of whole numbers is exact in float64, in any order.
    mean = gray(samples).double().mean((1, 2, 3)).float()[:, None, None]
    factor = factor.float()[:, None, None]
    return _to_tables(ramp(samples.device) * factor + mean * (1 - factor))


def posterize_tables(bits: Tensor) -> Tensor:
    """Keep the highest bits."""
    step = 2 ** (8 - bits.float())[:, None, None]
    return _to_tables(torch.floor(ramp(bits.device) / step) * step)


def solarize_tables(threshold: Tensor) -> Tensor:
    """Invert the values from the threshold on."""
    values = ramp(threshold.device)
    return _to_tables(torch.where(values >= threshold.float()[:, None, None], 255 - values, values))


def stretch_tables(samples: Tensor) -> Tensor:
    """Autocontrast: stretch each channel to the full range. A channel with one value stays."""
    values = samples.flatten(2)
    low, high = values.amin(2, keepdim=True).float(), values.amax(2, keepdim=True).float()
    is_flat = low == high
    scale = torch.where(is_flat, torch.ones_like(low), 255 / (high - low))
    return _to_tables((ramp(samples.device) - torch.where(is_flat, torch.zeros_like(low), low)) * scale)


def equalize_tables(samples: Tensor) -> Tensor:
    """Equalize the histogram of each channel, by Pillow's rule."""
    batch, channels = samples.shape[:2]
    values = samples.reshape(batch * channels, -1).long()
    histogram = torch.zeros(batch * channels, _LEVELS, dtype=torch.int64, device=samples.device)
    histogram.scatter_add_(1, values, torch.ones_like(values))
    last = torch.where(histogram > 0, torch.arange(_LEVELS, device=samples.device), -1).amax(1, keepdim=True)
    step = (values.shape[1] - histogram.gather(1, last)) // 255
    sums = histogram.cumsum(1) - histogram  # of all lower values
    table = ((sums + step // 2) // step.clamp(min=1)).clamp(max=255)
    identity = torch.arange(_LEVELS, device=samples.device).expand_as(table)
    return torch.where(step > 0, table, identity).to(torch.uint8).view(batch, channels, _LEVELS)


def _to_tables(values: Tensor) -> Tensor:
    return values.clamp(0, 255).to(torch.uint8)  # truncates, as conversions of uint8 pictures do elsewhere


# --- Colour and neighbourhood -----------------------------------------------------------------------------------------


def gray(samples: Tensor) -> Tensor:
    """The grey value of each pixel, uint8 [B, 1, H, W]. A picture with one channel is grey already."""
    if samples.shape[1] != 3:
        return samples[:, :1]
    red, green, blue = samples.float().unbind(1)
    total = (red * _GRAY[0]).add_(green * _GRAY[1]).add_(blue * _GRAY[2])
    return total.unsqueeze(1).to(torch.uint8)


def blend(samples: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """`factor` times the pictures plus the rest of `other`; a factor above 1 moves away from `other`."""
    factor = factor.float()[:, None, None, None]
    return (samples.float() * factor).add_(other.float() * (1 - factor)).clamp_(0, 255).to(torch.uint8)


def saturate(samples: Tensor, factor: Tensor) -> Tensor:
    """Towards grey (0) or more colourful (above 1)."""
    return samples if samples.shape[1] != 3 else blend(samples, gray(samples), factor)


def sharpen(samples: Tensor, factor: Tensor) -> Tensor:
    """Towards a smoothed picture (0), or away from it (above 1). Border pixels stay."""
    height, width = samples.shape[2:]
    if height <= 2 or width <= 2:
        return samples
    values = samples.float()
    total = values[:, :, 1:-1, 1:-1] * 4
    for row in range(3):
        for column in range(3):
            total = total.add_(values[:, :, row : row + height - 2, column : column + width - 2])
    smooth = samples.clone()
    smooth[:, :, 1:-1, 1:-1] = total.div_(13).round_().to(torch.uint8)  # weights 1, and 5 in the middle
    return blend(samples, smooth, factor)


def rotate_hue(samples: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue by a part of the colour circle, from -0.5 to 0.5."""
    if samples.shape[1] != 3:
        return samples
    red, green, blue = (channel.double() / 255 for channel in samples.unbind(1))
    high = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    chroma = high - low
    safe = torch.where(chroma > 0, chroma, torch.ones_like(chroma))
    hue = torch.where(
        high == red,
        (green - blue) / safe,
        torch.where(high == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    hue = (hue / 6 + turn.double()[:, None, None]).remainder(1.0) * 6
    channels = []
    for offset in (5.0, 3.0, 1.0):
        place = (hue + offset).remainder(6.0)
        share = torch.minimum(place, 4 - place).clamp(0, 1)
        channels.append(high - chroma * share)
    return to_bytes(torch.stack(channels, 1).float() * 255)


def blur(samples: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Gaussian blur with a deviation per sample, over `2 * radius + 1` pixels. Borders are mirrored."""
    places = torch.arange(-radius, radius + 1, device=samples.device).double()
    weights = torch.exp(-0.5 * (places / sigma.double().clamp(min=1e-3)[:, None]).square())
    weights = (weights / weights.sum(1, keepdim=True)).float()
    values = samples.float()
    for axis in (2, 3):
        size = values.shape[axis]
        if size == 1:  # its mirrored borders are the pixel itself
            continue
        padding = (radius, radius, 0, 0) if axis == 3 else (0, 0, radius, radius)
        padded = F.pad(values, padding, mode="reflect")
        values = torch.zeros_like(values)
        for tap in range(2 * radius + 1):
            values.add_(padded.narrow(axis, tap, size) * weights[:, tap, None, None, None])
    return to_bytes(values)


def choose(is_chosen: Tensor, changed: Tensor, samples: Tensor) -> Tensor:
    """The changed picture for the chosen samples, the picture itself for the others."""
    return torch.where(is_chosen[:, None, None, None], changed, samples)


def to_bytes(values: Tensor) -> Tensor:
    return values.round().clamp_(0, 255).to(torch.uint8)


# --- Model inputs -----------------------------------------------------------------------------------------------------


def normalise(samples: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Samples of 0 to 255 as float32 in channels-last memory; `mean` and `std` per channel, in [0, 1]."""
    if samples.dtype == torch.uint8 and samples.device.type == "cpu":
        return _normalise_bytes(samples, mean, std)
    # Change the memory layout while the values are still bytes. The arithmetic is then done in place.
    inputs = samples.contiguous(memory_format=torch.channels_last).float()
    centre, scale = (_per_channel(values, samples.device) for values in (mean, std))
    return (inputs.sub_(centre) if inputs is not samples else inputs - centre).div_(scale)


def _normalise_bytes(samples: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """The same numbers on a CPU: a few samples at a time, which stay in its cache."""
    inputs = torch.empty(samples.shape, memory_format=torch.channels_last)
    values = samples[0].numel()
    # Whole pictures of mean and deviation: vector code does not apply to a period of three channels.
    centre, scale = (_per_value(numbers, *samples.shape[2:]) for numbers in (mean, std))
    at_once = max(1, _VALUES_AT_ONCE // values)
    for part, place in zip(samples.split(at_once), inputs.split(at_once), strict=True):
        place.copy_(part.contiguous(memory_format=torch.channels_last)).sub_(centre).div_(scale)
    return inputs


@lru_cache(maxsize=16)
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Cached: copying to the GPU for every batch would synchronise with it."""
    return torch.tensor(values, device=device).view(1, -1, 1, 1) * 255


@lru_cache(maxsize=16)
def _per_value(values: tuple[float, ...], height: int, width: int) -> Tensor:
    one = _per_channel(values, torch.device("cpu"))
    return one.expand(1, -1, height, width).contiguous(memory_format=torch.channels_last)
