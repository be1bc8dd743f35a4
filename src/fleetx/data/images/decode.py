"""Decode the bytes of an image file into RGB pixels, with Pillow: by its content, never by its name.

JPEG, PNG, WebP, BMP and GIF of one frame. Grey and palette images become RGB; alpha is dropped. A rotation noted in EXIF is not
applied: labels and boxes of the usual datasets refer to the pixels as stored. Each error is a `DataError` with the reason
alone; the caller knows the name of the file.
"""

from __future__ import annotations

import warnings
from io import BytesIO

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from ...errors import DataError
from .augment import Box, Pixels
from .image_list import quoted

MAX_PIXELS = 64_000_000
MAX_SCANS = 100  # a usual progressive JPEG has about ten, and a preview in its header one or two
OTHER_FORMATS = ("PNG", "WEBP", "BMP", "GIF")
_PLAIN_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX"})
_PNG_MAGIC, _PNG_DEPTH_AT = b"\x89PNG\r\n\x1a\n", 24


def open_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open an image and check its header. A JPEG is not decoded yet, so that `scaled` may decode it at lower resolution."""
    try:
        if data.startswith(b"\xff\xd8\xff"):
            # The class itself, not Image.open: no warning about many pixels before they can be refused, and a fifth less time.
            image: Image.Image = _Jpeg(BytesIO(data))
            _require_plain(image, max_pixels)
            _require_few_scans(data)
            return image
        return _open_other(data, max_pixels)
    except (DataError, MemoryError):
        raise
    except Exception as error:
        raise DataError(_reason(data, error)) from None


def scaled(image: Image.Image, box: Box, size: int, *, drafts: bool, mirrored: bool = False) -> Pixels:
    """Scale the box to size x size. `drafts`: a JPEG of at least twice the pixels needed is decoded at 1/2, 1/4 or 1/8."""
    try:
        if drafts and isinstance(image, JpegImageFile):
            box = _draft(image, box, size)
        if image.mode != "RGB":
            image = image.convert("RGB")
        return _pixels(image.resize((size, size), Image.Resampling.BILINEAR, box, reducing_gap=2.0), mirrored)
    except MemoryError:
        raise
    except Exception as error:
        raise DataError(_undecodable(error)) from None


def whole(image: Image.Image, *, mirrored: bool = False) -> Pixels:
    """Return all pixels, unscaled."""
    try:
        return _pixels(image if image.mode == "RGB" else image.convert("RGB"), mirrored)
    except MemoryError:
        raise
    except Exception as error:
        raise DataError(_undecodable(error)) from None


def _pixels(image: Image.Image, mirrored: bool) -> Pixels:
    # Mirrored by Pillow, which keeps four bytes to a pixel: ten times faster than NumPy on three.
    return np.asarray(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else image)


def _require_few_scans(data: bytes) -> None:
    """Refuse a progressive JPEG with many scans: each goes over all pixels, so thousands keep a decoder busy for hours."""
    scans = data.count(b"\xff\xda")  # inside the pixels' own bytes 0xff is never followed by 0xda
    if scans > MAX_SCANS:
        raise DataError(f"the JPEG has {scans} scans; allowed are {MAX_SCANS}")


class _Jpeg(JpegImageFile):
    def _read_dpi_from_exif(self) -> None:
        """Skip reading the print resolution: it is not used, and Pillow warns about damaged EXIF data while reading it."""


def _open_other(data: bytes, max_pixels: int) -> Image.Image:
    # Pillow only warns about sizes, transparency and odd chunks; those that matter are errors here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image: Image.Image = Image.open(BytesIO(data), formats=OTHER_FORMATS)
        _require_plain(image, max_pixels)
        if data.startswith(_PNG_MAGIC) and data[_PNG_DEPTH_AT] > 8:
            raise DataError(_sixteen_bit(f"a PNG of {data[_PNG_DEPTH_AT]} bits per channel"))
        if getattr(image, "is_animated", False):
            raise DataError(f"animated {image.format}; allowed is one frame: keep the first with `magick 'in[0]' out.png`")
        return image.convert("RGB")


def _require_plain(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise DataError(f"{width} x {height} are {width * height} pixels, more than the {max_pixels} allowed; scale it down")
    if image.mode in _PLAIN_MODES:
        return
    if image.mode == "CMYK":
        raise DataError("CMYK colours, which have no one meaning in RGB; convert with `magick in -colorspace sRGB out.jpg`")
    raise DataError(_sixteen_bit(f"pixels of mode {image.mode}"))


def _sixteen_bit(what: str) -> str:
    return f"{what}; allowed are 8 bits per channel: convert with `magick in -depth 8 out.png`"


def _reason(data: bytes, error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"not an image of a known format (JPEG, {', '.join(OTHER_FORMATS)}); it begins with {quoted(data[:8])}"
    if isinstance(error, Image.DecompressionBombError):
        return f"more pixels than allowed: {str(error).rstrip('.')}"
    return _undecodable(error)


def _undecodable(error: Exception) -> str:
    return f"cannot be decoded: {error}" if str(error) else f"cannot be decoded: {type(error).__name__}"


def _draft(image: JpegImageFile, box: Box, size: int) -> Box:
    """Request the coarsest decoding that still has `size` pixels across the box; return the box in its pixels."""
    times = min(box[2] - box[0], box[3] - box[1]) / size
    divisor = next((divisor for divisor in (8, 4, 2) if divisor <= times), 1)
    width, height = image.size
    if divisor == 1 or image.draft(None, (width // divisor, height // divisor)) is None:
        return box
    return box[0] / divisor, box[1] / divisor, box[2] / divisor, box[3] / divisor
