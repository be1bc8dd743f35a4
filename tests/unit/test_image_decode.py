"""Decoding: Pillow's own pixels, less work for large JPEGs, and a reason for everything refused."""

import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from fleetx.data.augment import evaluation_box
from fleetx.data.decode import open_image, scaled, whole
from fleetx.errors import DataError


def photo(width=80, height=60, mode="RGB"):
    """Smooth, so that JPEG and scaling change little."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 120 * np.sin(x / (20 + 7 * c) + c) * np.cos(y / (23 + 5 * c)) for c in range(3)]
    return Image.fromarray(np.stack(waves, axis=2).astype(np.uint8)).convert(mode)


def encoded(image, format, **options):
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


MODES = {"JPEG": ["RGB", "L"], "PNG": ["RGB", "L", "LA", "P", "1", "RGBA"], "WEBP": ["RGB"], "BMP": ["RGB"], "GIF": ["P"]}


@pytest.mark.parametrize("format,mode", [(format, mode) for format, modes in MODES.items() for mode in modes])
def test_pixels_are_those_of_pillow_converted_to_rgb(format, mode):
    data = encoded(photo(mode=mode), format)
    np.testing.assert_array_equal(whole(open_image(data)), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_a_palette_with_transparency_is_decoded_without_a_warning():
    image = photo(mode="P")
    data = encoded(image, "PNG", transparency=bytes(range(256)))
    np.testing.assert_array_equal(whole(open_image(data)), np.asarray(image.convert("RGB")))


def test_a_mirrored_image_is_the_same_from_right_to_left():
    data = encoded(photo(), "JPEG")
    np.testing.assert_array_equal(whole(open_image(data), mirrored=True), whole(open_image(data))[:, ::-1])


def test_a_scaled_box_is_a_crop_and_a_resize():
    image = photo(200, 100)
    crop = image.crop((10, 20, 90, 70)).resize((64, 64), Image.Resampling.BILINEAR)
    ours = scaled(open_image(encoded(image, "PNG")), (10, 20, 90, 70), 64, drafts=True)
    # Resampling a box looks beyond its edge by a pixel; a crop cannot.
    np.testing.assert_array_equal(ours[2:-2, 2:-2], np.asarray(crop)[2:-2, 2:-2])
    np.testing.assert_allclose(ours.astype(int), np.asarray(crop).astype(int), rtol=0, atol=6)


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (300, 300), (640, 231), (100, 80)])
def test_evaluation_sees_what_resize_and_centre_crop_see(size):
    image = photo(*size)
    short, long = 256, int(256 * max(size) / min(size))
    resized = image.resize((short, long) if size[0] <= size[1] else (long, short), Image.Resampling.BILINEAR)
    left, top = round((resized.width - 224) / 2), round((resized.height - 224) / 2)
    reference = np.asarray(resized.crop((left, top, left + 224, top + 224))).astype(int)
    ours = scaled(open_image(encoded(image, "PNG")), evaluation_box(*size, 224), 224, drafts=False)
    np.testing.assert_allclose(ours.astype(int), reference, rtol=0, atol=1)


@pytest.mark.parametrize("times,divisor", [(1.9, 1), (2.0, 2), (3.9, 2), (4.0, 4), (9.0, 8)])
def test_a_large_jpeg_is_decoded_at_the_coarsest_scale_that_still_has_the_pixels(times, divisor):
    data = encoded(photo(1003, 1001), "JPEG", quality=95)
    image, box = open_image(data), (1.0, 2.0, 1.0 + 100 * times, 2.0 + 100 * times)
    ours = scaled(image, box, 100, drafts=True)
    assert image.size == (-(-1003 // divisor), -(-1001 // divisor))
    exact = scaled(open_image(data), box, 100, drafts=False)
    assert np.abs(ours.astype(int) - exact.astype(int)).mean() < 1.5


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
    "JPEG bomb": (jpeg_header(65_000, 65_000), "65000 x 65000 are 4225000000 pixels"),
}


@pytest.mark.parametrize("data,reason", REFUSED.values(), ids=REFUSED)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(data, reason):
    with pytest.raises(DataError, match=reason):
        whole(open_image(data))
    with pytest.raises(DataError, match=reason):
        scaled(open_image(data), (0, 0, 4, 4), 4, drafts=True)


def test_the_limit_of_pixels_can_be_set():
    with pytest.raises(DataError, match="80 x 60 are 4800 pixels, more than the 4799 allowed"):
        open_image(WHOLE_JPEG, max_pixels=4799)
    assert open_image(WHOLE_JPEG, max_pixels=4800).size == (80, 60)


def test_damaged_exif_is_nobodys_concern_and_rotation_is_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = encoded(photo(), "JPEG", exif=exif)
    np.testing.assert_array_equal(whole(open_image(turned)), whole(open_image(WHOLE_JPEG)))
    damaged = encoded(
        photo(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x1a\x01\x05\0\xff\xff\xff\xff\xff\xff\xff\xff" * 3
    )
    np.testing.assert_array_equal(whole(open_image(damaged)), whole(open_image(WHOLE_JPEG)))


def test_random_damage_ends_in_pixels_or_in_a_data_error():
    generator = np.random.default_rng(0)
    for data in (WHOLE_JPEG, WHOLE_PNG, animated("GIF"), encoded(photo(), "WEBP"), encoded(photo(), "BMP")):
        for _ in range(60):
            damaged = np.frombuffer(data, np.uint8).copy()
            damaged[generator.integers(0, len(damaged), 4)] = generator.integers(0, 256, 4)
            try:
                assert whole(open_image(damaged.tobytes(), max_pixels=10**6)).dtype == np.uint8
            except DataError:
                pass


def test_pillows_global_settings_stay_as_they_are():
    script = """
from PIL import Image, ImageFile
before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
import warnings; filters = list(warnings.filters)
import fleetx.data.images
assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES) and before[1] is False
"""
    subprocess.run([sys.executable, "-c", script], check=True)
