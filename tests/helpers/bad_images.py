"""Images for tests, and the corpus of files that must be refused: name -> (bytes, pattern of the reason)."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image


def photo(width=80, height=60, mode="RGB"):
    """Smooth, so that JPEG and scaling change little."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 120 * np.sin(x / (20 + 7 * c) + c) * np.cos(y / (23 + 5 * c)) for c in range(3)]
    return Image.fromarray(np.stack(waves, axis=2).astype(np.uint8)).convert(mode)


def encoded(image, format, **options):
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def png_header(width, height, depth=8):
    """A PNG with a true header and no pixels to speak of."""
    data = bytearray(encoded(Image.new("RGB", (1, 1)), "PNG"))
    data[16:26] = struct.pack(">IIBB", width, height, depth, 2)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


def jpeg_header(width, height):
    data = bytearray(encoded(Image.new("RGB", (8, 8)), "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


def animated(format):
    frames = [photo(mode="P"), Image.new("P", (80, 60), 3)]
    return encoded(frames[0], format, save_all=True, append_images=frames[1:])


def repeated_scan(times):
    """A progressive JPEG whose last scan comes again and again: small, and each is a walk over all pixels."""
    data = encoded(photo(), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    others = data.count(b"\xff\xda") - 1
    return data[:last] + data[last:-2] * (times - others) + data[-2:]


SCANS = repeated_scan(2000)
WHOLE_JPEG, WHOLE_PNG = encoded(photo(), "JPEG"), encoded(photo(), "PNG")
REFUSED = {
    "no image": (b"GET / HTTP/1.1", "not an image of a known format .* it begins with 'GET / HT'"),
    "an unlisted format": (encoded(photo(), "TIFF"), "not an image of a known format"),
    "truncated JPEG": (WHOLE_JPEG[:-200], "truncated"),
    "JPEG cut in its header": (WHOLE_JPEG[:300], "cannot be decoded: "),
    "three bytes of a JPEG": (WHOLE_JPEG[:3], "cannot be decoded: "),
    "truncated PNG": (WHOLE_PNG[: len(WHOLE_PNG) // 2], "truncated"),
    "PNG cut in its header": (WHOLE_PNG[:20], "cannot be decoded: |not an image"),
    "damaged PNG": (WHOLE_PNG[:60] + bytes(200) + WHOLE_PNG[260:], "cannot be decoded: "),
    "CMYK": (encoded(photo(mode="CMYK"), "JPEG"), "CMYK colours"),
    "16-bit grey": (encoded(Image.new("I;16", (4, 4)), "PNG"), "allowed are 8 bits per channel"),
    "16-bit colour": (png_header(4, 4, depth=16), "a PNG of 16 bits per channel"),
    "animated GIF": (animated("GIF"), "animated GIF; allowed is one frame"),
    "animated PNG": (animated("PNG"), "animated PNG; allowed is one frame"),
    "animated WebP": (animated("WEBP"), "animated WEBP; allowed is one frame"),
    "PNG bomb": (png_header(9000, 9000), "9000 x 9000 are 81000000 pixels, more than the 64000000 allowed"),
    "PNG bomb that Pillow warns of": (png_header(12_000, 10_000), "120000000 pixels, more than the 64000000"),
    "PNG bomb that Pillow refuses": (png_header(100_000, 100_000), "more pixels than allowed"),
    "JPEG of many scans": (SCANS, "the JPEG has 2000 scans; allowed are 100"),
    "JPEG bomb": (jpeg_header(65_000, 65_000), "65000 x 65000 are 4225000000 pixels"),
}
