"""The decoder: every mode and orientation, everything that must be refused, and bytes that are nothing at all."""

from __future__ import annotations

import base64
import errno
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from lmm4edit.data import images
from lmm4edit.data.images import decode_image, fit_for_patches, pixel_hash
from lmm4edit.errors import ImageError

PHOTOS = Path(__file__).parents[2].parent / "shared" / "data" / "photos"


def gradient(width: int = 40, height: int = 30) -> Image.Image:
    """A picture without symmetry: no turn or flip of it equals another."""
    y, x = np.mgrid[0:height, 0:width]
    channels = np.stack([x * 255 // width, y * 255 // height, (x + 2 * y) * 80 // (width + height)], axis=2)
    return Image.fromarray(channels.astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image)


def message_of(source: object, **options: object) -> str:
    with pytest.raises(ImageError) as caught:
        decode_image(source, **options)  # type: ignore[arg-type]
    return str(caught.value)


def png_header_only(width: int, height: int) -> bytes:
    """A PNG file that claims a size and holds next to nothing."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


# --- what comes out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM"])
def test_every_format_decodes_to_rgb_of_its_size(kind: str) -> None:
    decoded = decode_image(encoded(gradient(), kind))
    assert (decoded.mode, decoded.size) == ("RGB", (40, 30))
    error = np.abs(pixels(decoded).astype(int) - pixels(gradient()).astype(int)).mean()
    assert error < (12 if kind in ("JPEG", "WEBP", "GIF", "AVIF", "JPEG2000") else 1e-9)


ORIENTED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_equals_the_picture_turned_by_hand(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = gradient(640, 480)
    options = {"lossless": True} if kind == "WEBP" else {}
    turned = decode_image(encoded(stored, kind, exif=exif, **options))
    plain = decode_image(encoded(stored, kind, **options))
    np.testing.assert_array_equal(pixels(turned), ORIENTED[orientation](pixels(plain)))
    assert turned.size == ((480, 640) if orientation >= 5 else (640, 480))


def test_orientation_counts_for_pillow_images_and_once_only() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    opened = Image.open(io.BytesIO(encoded(gradient(), "PNG", exif=exif)))
    upright = decode_image(opened)
    assert upright.size == (30, 40)
    assert opened.size == (40, 30)
    assert decode_image(upright).size == (30, 40)


def test_decoding_twice_changes_nothing() -> None:
    data = encoded(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG", transparency=(255, 255, 255))
    once = decode_image(data)
    assert once.info == {}
    assert pixels(decode_image(once)).tolist() == [[[1, 2, 3]]]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("broken", [b"Exif\0\0MM", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0garbage"])
def test_unreadable_exif_data_does_not_lose_the_picture(broken: bytes) -> None:
    with_exif = decode_image(encoded(gradient(), "JPEG", exif=broken))
    np.testing.assert_array_equal(pixels(with_exif), pixels(decode_image(encoded(gradient(), "JPEG"))))


def test_an_orientation_that_does_not_exist_turns_nothing() -> None:
    exif = Image.Exif()
    exif[0x0112] = 77
    np.testing.assert_array_equal(pixels(decode_image(encoded(gradient(), "PNG", exif=exif))), pixels(gradient()))


def test_hidden_colour_under_full_transparency_becomes_white() -> None:
    image = Image.new("RGBA", (4, 3), (255, 0, 0, 0))
    image.putpixel((1, 1), (10, 20, 30, 255))
    image.putpixel((2, 1), (0, 0, 0, 128))
    decoded = pixels(decode_image(encoded(image, "PNG")))
    assert decoded[0, 0].tolist() == [255, 255, 255]
    assert decoded[1, 1].tolist() == [10, 20, 30]
    assert decoded[1, 2].tolist() == [127, 127, 127]


def test_an_rgba_edit_and_an_rgb_source_give_the_same_shape() -> None:
    edited = decode_image(encoded(gradient().convert("RGBA"), "PNG"))
    np.testing.assert_array_equal(pixels(edited), pixels(decode_image(encoded(gradient(), "PNG"))))


def test_palette_with_a_transparent_entry() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    data = encoded(image, "PNG", transparency=0)
    assert Image.open(io.BytesIO(data)).mode == "P"
    assert pixels(decode_image(data)).tolist() == [[[255, 255, 255], [0, 0, 255]]]


def test_palette_with_partly_transparent_entries() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    data = encoded(image, "PNG", transparency=bytes([128, 255]))
    assert pixels(decode_image(data)).tolist() == [[[127, 127, 127], [0, 0, 255]]]


@pytest.mark.parametrize(
    ("mode", "value", "transparent", "expected"),
    [("L", 7, 7, [255, 255, 255]), ("L", 7, 8, [7, 7, 7]), ("RGB", (1, 2, 3), (1, 2, 3), [255, 255, 255])],
)
def test_a_colour_declared_transparent(mode: str, value: object, transparent: object, expected: list[int]) -> None:
    data = encoded(Image.new(mode, (1, 1), value), "PNG", transparency=transparent)
    assert pixels(decode_image(data)).tolist() == [[expected]]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("L", (1, 1), 99), [99, 99, 99]),
        (Image.new("1", (1, 1), 1), [255, 255, 255]),
        (Image.new("LA", (1, 1), (0, 128)), [127, 127, 127]),
        (Image.new("PA", (1, 1)), [255, 255, 255]),
        (Image.new("RGBa", (1, 1), (0, 0, 0, 0)), [255, 255, 255]),
        (Image.new("La", (1, 1), (0, 0)), [255, 255, 255]),
        (Image.new("CMYK", (1, 1), (0, 255, 255, 0)), [255, 0, 0]),
        (Image.new("YCbCr", (1, 1), (255, 128, 128)), [255, 255, 255]),
        (Image.new("HSV", (1, 1), (0, 0, 255)), [255, 255, 255]),
        (Image.new("LAB", (1, 1), (255, 128, 128)), None),
        (Image.new("RGBX", (1, 1), (1, 2, 3, 4)), [1, 2, 3]),
        (Image.new("I;16", (1, 1), 65535), [255, 255, 255]),
        (Image.new("I", (1, 1), 256), [1, 1, 1]),
    ],
    ids=lambda case: case.mode if isinstance(case, Image.Image) else "",
)
def test_every_pixel_mode(image: Image.Image, expected: list[int] | None) -> None:
    decoded = decode_image(image)
    assert decoded.mode == "RGB"
    assert expected is None or pixels(decoded)[0, 0].tolist() == expected


def test_every_pixel_mode_of_pillow_is_decoded_or_refused_by_name() -> None:
    from PIL import ImageMode

    modes = ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "RGBX", "RGBa", "La"]
    for mode in [*modes, "I;16", "I;16L", "I;16B", "I;16N"]:
        ImageMode.getmode(mode)
        try:
            assert decode_image(Image.new(mode, (2, 2))).mode == "RGB"
        except ImageError as error:
            assert mode == "F", f"{mode}: {error}"


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_files(kind: str) -> None:
    decoded = pixels(decode_image(encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), kind)))
    np.testing.assert_allclose(decoded[8, 8], [255, 0, 0], atol=3)


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    values = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    for kind in ("PNG", "TIFF"):
        decoded = pixels(decode_image(encoded(Image.fromarray(values), kind)))
        assert decoded[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    assert pixels(decode_image(b"P5 5 1 65535\n" + values.astype(">u2").tobytes()))[0, :, 0].tolist() == [
        0,
        0,
        1,
        128,
        255,
    ]


def test_sixteen_bit_grey_and_colour_agree() -> None:
    values = np.arange(0, 65536, 13, dtype=np.uint16)[None]
    grey = pixels(decode_image(encoded(Image.fromarray(values), "PNG")))
    colour = np.repeat(values[:, :, None], 3, axis=2)
    ppm = b"P6 %d 1 65535\n" % values.shape[1] + colour.astype(">u2").tobytes()
    difference = np.abs(grey.astype(int) - pixels(decode_image(ppm)))
    assert difference.max() <= 1
    np.testing.assert_array_equal(grey, pixels(decode_image(colour)))


def test_sixteen_bit_grey_with_a_transparent_value() -> None:
    data = encoded(Image.fromarray(np.array([[5, 30000]], dtype=np.uint16)), "PNG", transparency=5)
    assert Image.open(io.BytesIO(data)).info.get("transparency") == 5
    assert pixels(decode_image(data))[0, :, 0].tolist() == [255, 117]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_the_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.new("RGB", (20, 20), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    np.testing.assert_allclose(pixels(decode_image(data))[10, 10], [255, 0, 0], atol=2)


# --- what may come in ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["источник.png", "编辑后.png", "صورة.png", "été à l'eau.png", "a b#c%20.png", "🖼️.png"])
def test_paths_in_any_alphabet(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    gradient().save(path)
    np.testing.assert_array_equal(pixels(decode_image(path)), pixels(gradient()))
    np.testing.assert_array_equal(pixels(decode_image(str(path))), pixels(gradient()))


def test_all_kinds_of_source_give_the_same_pixels(tmp_path: Path) -> None:
    data = encoded(gradient(), "PNG")
    path = tmp_path / "a.png"
    path.write_bytes(data)
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    sources = [path, data, uri, Image.open(path), gradient(), np.asarray(gradient())]
    hashes = {pixel_hash(decode_image(source)) for source in sources}
    assert len(hashes) == 1


def test_the_suffix_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "really_a_png.jpg"
    path.write_bytes(encoded(gradient(), "PNG"))
    np.testing.assert_array_equal(pixels(decode_image(path)), pixels(gradient()))


def test_arrays_of_every_accepted_kind() -> None:
    eight = np.array([[0, 128, 255]], dtype=np.uint8)
    for array in (eight, eight[:, :, None], np.repeat(eight[:, :, None], 3, axis=2), eight / 255.0):
        assert pixels(decode_image(array))[0, :, 1].tolist() == [0, 128, 255]
    assert pixels(decode_image(eight.astype(np.uint16) * 257))[0, :, 1].tolist() == [0, 128, 255]
    assert pixels(decode_image(np.asfortranarray(np.asarray(gradient())))).shape == (30, 40, 3)
    transparent = np.zeros((1, 1, 4), dtype=np.uint8)
    assert pixels(decode_image(transparent)).tolist() == [[[255, 255, 255]]]


def test_the_result_is_never_the_source_itself() -> None:
    image = gradient()
    decoded = decode_image(image)
    decoded.putpixel((0, 0), (9, 9, 9))
    assert image.getpixel((0, 0)) == (0, 0, 0)


# --- what is refused, with its whole message --------------------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "gone.png"
    assert message_of(path) == (
        f"{path}: expected an image file, got nothing there. Check the path and the image root."
    )


def test_folder_pipe_and_device(tmp_path: Path) -> None:
    assert message_of(tmp_path) == f"{tmp_path}: expected an image file, got a folder. Give the path of a file."
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert message_of(path) == f"{path}: expected an image file, got a pipe or device. Give the path of a file."


def test_names_that_no_file_can_have() -> None:
    assert message_of("a\0b.png") == (
        "a\0b.png: expected an image file, got one that cannot be opened: embedded null byte. "
        "Check the path and its permissions."
    )
    long = "x" * 5000
    assert message_of(long) == (
        f"{long}: expected an image file, got one that cannot be opened: File name too long. "
        "Check the path and its permissions."
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected an image file, got an empty file. Copy or download it again."),
        (
            b"version https://git-lfs.github.com/spec/v1\noid",
            "expected an image file, got a Git LFS pointer. Run `git lfs pull`.",
        ),
        (b"\n<!DOCTYPE html><html>", "expected an image file, got a web page. The download failed: repeat it."),
        (
            b"just words",
            "expected PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000 or PPM, got a file that is none of them, or "
            "damaged at its beginning. Convert it, or copy it again.",
        ),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
            "expected PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000 or PPM, got a file that is none of them, or "
            "damaged at its beginning. Convert it, or copy it again.",
        ),
    ],
    ids=["empty", "lfs", "html", "text", "eps"],
)
def test_files_that_are_no_image(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    assert message_of(path) == f"{path}: {message}"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM"])
@pytest.mark.parametrize("share", [0.6, 0.95])
def test_truncated_files_are_refused_by_name(tmp_path: Path, kind: str, share: float) -> None:
    path = tmp_path / "cut"
    rng = np.random.default_rng(0)
    data = encoded(Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)), kind)
    path.write_bytes(data[: int(len(data) * share)])
    message = message_of(path)
    assert message.startswith(f"{path}: expected ")
    assert message.endswith(("Copy or download it again.", "Convert it, or copy it again."))


def test_a_jpeg_cut_to_sixty_percent(tmp_path: Path) -> None:
    path = tmp_path / "cut.jpg"
    data = encoded(gradient(300, 200), "JPEG")
    path.write_bytes(data[: len(data) * 6 // 10])
    assert message_of(path) == (
        f"{path}: expected a whole image file, got one that is cut off before its end. Copy or download it again."
    )
    assert message_of(path, name="row 5") == (
        "row 5: expected a whole image file, got one that is cut off before its end. Copy or download it again."
    )
    assert message_of(Image.open(path)).startswith(f"{path}: expected a whole image file")


def test_truncation_is_refused_where_another_library_told_pillow_to_accept_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    data = encoded(gradient(300, 200), "JPEG")
    assert "cut off before its end" in message_of(data[: len(data) * 6 // 10])
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True
    assert decode_image(data).size == (300, 200)


def test_a_damaged_png_says_so() -> None:
    data = bytearray(encoded(gradient(), "PNG"))
    at = data.index(b"IDAT") + 6
    data[at] ^= 0xFF
    message = message_of(bytes(data), name="bad.png")
    assert message.startswith("bad.png: expected a whole image file, got one that is ")
    assert message.endswith(". Copy or download it again.")


def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header_only(20000, 20000))
    assert message_of(path) == (
        f"{path}: expected at most 178,956,970 pixels, got 400,000,000. "
        "Shrink it, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust where it comes from."
    )


def test_what_pillow_only_warns_of_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "small file, many pixels.png"
    path.write_bytes(png_header_only(13000, 13000))
    assert message_of(path) == (
        f"{path}: expected at most 89,478,485 pixels, got 13000 x 13000 = 169,000,000. "
        "Shrink it, or raise max_pixels if you trust where it comes from."
    )


def test_a_file_whose_reading_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class BadDisk(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(images, "_open", lambda path, name: BadDisk())
    assert message_of("x.png") == (
        "x.png: expected an image file, got one that cannot be read: Input/output error. "
        "Look at the disk, then try again."
    )


def test_the_limit_of_pixels_can_be_lowered() -> None:
    assert message_of(gradient(), max_pixels=1199) == (
        "image in memory: expected at most 1,199 pixels, got 40 x 30 = 1,200. "
        "Shrink it, or raise max_pixels if you trust where it comes from."
    )
    assert decode_image(gradient(), max_pixels=1200).size == (40, 30)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            None,
            "image: expected a path, a data: URI, bytes, a Pillow image or an array, got NoneType. "
            "Convert it to one of them.",
        ),
        (
            np.zeros((3, 8, 8), np.uint8),
            "array: expected an array of shape (height, width) or (height, width, 1, 3 or 4), got (3, 8, 8). "
            "Move the channels last.",
        ),
        (
            np.zeros((2, 8, 8, 3), np.uint8),
            "array: expected an array of shape (height, width) or (height, width, 1, 3 or 4), got (2, 8, 8, 3). "
            "Pass one image at a time.",
        ),
        (
            np.zeros((0, 5), np.uint8),
            "array: expected an array of shape (height, width) or (height, width, 1, 3 or 4), got (0, 5). "
            "Pass one image at a time.",
        ),
        (np.full((2, 2), 3.5), "array: expected floats from 0 to 1, got 3.5 to 3.5. Scale and clip them first."),
        (np.full((2, 2), np.nan), "array: expected floats from 0 to 1, got nan to nan. Scale and clip them first."),
        (
            np.zeros((2, 2), np.int64),
            "array: expected uint8, uint16, or floats from 0 to 1, got int64. Convert the array first.",
        ),
        (Image.new("RGB", (0, 4)), "image in memory: expected at least one pixel, got 0 x 4. Leave it out."),
        (
            Image.new("F", (2, 2)),
            "image in memory: expected whole-number pixels, got floating-point ones, whose range the file does not "
            "state. Save it with 8 or 16 bits.",
        ),
        (
            Image.new("I", (2, 2), 70000),
            "image in memory: expected pixels from 0 to 65535, got 70000 to 70000. Save it with 8 or 16 bits.",
        ),
        (
            "data:image/png,abc",
            "data: URI: expected data:<type>;base64,<content>, got 'data:image/png'. Encode the file again.",
        ),
        (
            "data:image/png;base64,@@@@",
            "data: URI: expected data:<type>;base64,<content>, got content that is no base64: "
            "Only base64 data is allowed. Encode the file again.",
        ),
    ],
)
def test_other_things_refused(source: object, message: str) -> None:
    assert message_of(source) == message


_SEEDS = [encoded(gradient(12, 9), kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.sampled_from(_SEEDS),
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6),
    keep=st.floats(0, 1),
)
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_give_a_picture_or_our_error(data: bytes, changes: list[tuple[int, int]], keep: float) -> None:
    damaged = bytearray(data[: int(len(data) * keep) + 1])
    for position, byte in changes:
        damaged[position % len(damaged)] = byte
    try:
        assert decode_image(bytes(damaged), max_pixels=1_000_000).mode == "RGB"
    except ImageError as error:
        assert error.expected and error.got and error.remedy


# --- hashes and sizes ----------------------------------------------------------------------------------------------


def test_equal_pixels_have_equal_hashes_and_different_ones_do_not() -> None:
    image = gradient()
    other = image.copy()
    other.putpixel((3, 3), (1, 2, 4))
    assert pixel_hash(decode_image(encoded(image, "PNG"))) == pixel_hash(decode_image(encoded(image, "BMP")))
    assert pixel_hash(image) != pixel_hash(other)
    assert pixel_hash(Image.new("RGB", (2, 6))) != pixel_hash(Image.new("RGB", (6, 2)))


@pytest.mark.parametrize(
    ("size", "fitted"),
    [
        ((332, 27), (344, 28)),
        ((26, 28), (28, 30)),
        ((1, 1), (28, 28)),
        ((1, 200), (28, 5600)),
        ((28, 28), (28, 28)),
        ((690, 15420), (690, 15420)),
    ],
)
def test_images_smaller_than_a_patch_are_enlarged(size: tuple[int, int], fitted: tuple[int, int]) -> None:
    image = Image.new("RGB", size)
    result = fit_for_patches(image, 28)
    assert result.size == fitted
    assert (result is image) == (size == fitted)


@pytest.mark.parametrize(
    ("size", "ratio"), [((4096, 18), "227.6"), ((18, 4096), "227.6"), ((1, 201), "201.0")], ids=str
)
def test_extreme_shapes_are_refused(size: tuple[int, int], ratio: str) -> None:
    with pytest.raises(ImageError) as caught:
        fit_for_patches(Image.new("RGB", size), 28, name="wide.png")
    assert str(caught.value) == (
        f"wide.png: expected a ratio of at most 200 between the sides, got {size[0]} x {size[1]} px, "
        f"a ratio of {ratio}. Crop it, or leave it out."
    )


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 400), height=st.integers(1, 400), factor=st.integers(1, 56))
def test_fitted_images_have_room_for_a_patch_and_keep_their_shape(width: int, height: int, factor: int) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    fitted = fit_for_patches(Image.new("L", (width, height)), factor)
    assert min(fitted.size) >= factor
    assert max(fitted.size) <= 200 * min(fitted.size)
    if min(width, height) < factor:
        assert min(fitted.size) == factor
        assert abs(fitted.width * height - fitted.height * width) <= 2 * max(width, height)


# --- real photographs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"), [("example_source.jpg", (512, 512)), ("example_edited.jpg", (512, 512)), ("mint0.png", None)]
)
def test_real_photographs(name: str, size: tuple[int, int] | None) -> None:
    path = PHOTOS / name
    if not path.exists():
        pytest.skip(
            f"NOT TESTED: the real photograph {name} is not in the folder shared/data/photos beside the repository"
        )
    decoded = decode_image(path)
    assert decoded.mode == "RGB"
    assert size is None or decoded.size == size
    assert 5 < pixels(decoded).std() < 128
    assert pixel_hash(decoded) == pixel_hash(decode_image(path.read_bytes()))
