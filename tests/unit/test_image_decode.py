"""Decoding: Pillow's own pixels, less work for large JPEGs, and a reason for everything refused."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image, ImageFile

from fleetx.data.images.augment import evaluation_box
from fleetx.data.images.decode import open_image, scaled, whole
from fleetx.errors import DataError
from tests.helpers.bad_images import REFUSED, WHOLE_JPEG, WHOLE_PNG, animated, encoded, photo

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
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)
    for data, _ in REFUSED.values():
        with pytest.raises(DataError):
            whole(open_image(data))
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)) == before
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
