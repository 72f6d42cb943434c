"""MSE, PSNR, SSIM: authors' values, identity, symmetry, range, odd sizes, and failures that name the image."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter
from skimage.data import astronaut, camera

from lmm4edit.records import EditSample
from lmm4edit.scorers.base import build_scorer
from lmm4edit.scorers.pairs import ImagePair, _PixelCache, load_pair
from lmm4edit.scorers.pixel import (
    luma,
    mean_squared_error,
    peak_signal_to_noise,
    structural_similarity,
)

MEASURES = {"mse": mean_squared_error, "psnr": peak_signal_to_noise, "ssim": structural_similarity}
GOLDEN = Path(__file__).parents[3] / "shared" / "data" / "iqa_golden"


def pair(source: np.ndarray, edited: np.ndarray) -> ImagePair:
    return ImagePair(source, edited, False)


def photo(size: int = 96) -> np.ndarray:
    return np.asarray(Image.fromarray(astronaut()).resize((size, size)))


def sample(tmp_path: Path, source: Image.Image, edited: Image.Image, name: str = "a") -> EditSample:
    paths = [tmp_path / f"{name}_source.png", tmp_path / f"{name}_edited.png"]
    for path, image in zip(paths, (source, edited), strict=True):
        image.save(path)
    return EditSample(name, name, str(paths[0]), str(paths[1]), "do it")


def test_ssim_equals_the_authors_code() -> None:
    if not GOLDEN.exists():
        pytest.skip(f"golden values of the original authors' code are not at {GOLDEN}")
    rows = [r for r in csv.DictReader((GOLDEN / "golden.csv").open()) if r["metric"] == "SSIM_index"]
    assert len(rows) == 8
    for row in rows:
        images = [np.asarray(Image.open(GOLDEN / "images" / row[k]).convert("RGB")) for k in ("source_image", "image")]
        # golden.csv holds twelve decimals.
        assert structural_similarity(pair(*images)) == pytest.approx(float(row["value"]), abs=1e-11), row["image"]


def test_values_worked_by_hand() -> None:
    black, white = np.zeros((16, 16, 3), np.uint8), np.full((16, 16, 3), 255, np.uint8)
    assert mean_squared_error(pair(black, white)) == 65025
    assert peak_signal_to_noise(pair(black, white)) == 0
    off_by_one = black.copy()
    off_by_one[..., 0] = 3
    assert mean_squared_error(pair(black, off_by_one)) == pytest.approx(3)
    assert peak_signal_to_noise(pair(black, off_by_one)) == pytest.approx(10 * np.log10(65025 / 3))
    # Two flat images: SSIM is the luminance term alone.
    c1 = (0.01 * 255) ** 2
    expected = (2 * 100 * 120 + c1) / (100**2 + 120**2 + c1)
    flat = [np.full((16, 16, 3), v, np.uint8) for v in (100, 120)]
    assert structural_similarity(pair(*flat)) == pytest.approx(expected, abs=1e-9)


def test_luma_is_matlabs_rgb2gray() -> None:
    primaries = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [7, 7, 7]]], np.uint8)
    assert luma(primaries).tolist() == [[76.0, 150.0, 29.0, 255.0, 7.0]]


@pytest.mark.parametrize(("name", "best"), [("mse", 0.0), ("psnr", 100.0), ("ssim", 1.0)])
def test_identity_symmetry_and_direction(name: str, best: float) -> None:
    measure, info = MEASURES[name], build_scorer(name).info
    image = photo()
    assert measure(pair(image, image)) == pytest.approx(best, abs=1e-12)
    flat = np.full_like(image, 128)
    assert measure(pair(flat, flat)) == pytest.approx(best, abs=1e-12)
    blurred = [np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(r))) for r in (0.5, 1.0, 2.0, 4.0)]
    values = [measure(pair(image, b)) for b in blurred]
    ordered = sorted(values, reverse=info.higher_is_better)
    assert values == ordered and len(set(values)) == 4
    assert all(info.low <= v <= info.high for v in values)
    assert measure(pair(image, blurred[1])) == pytest.approx(measure(pair(blurred[1], image)), abs=1e-12)


def test_psnr_of_nearly_identical_large_images_stays_at_the_cap_and_is_never_infinite() -> None:
    source = np.zeros((1200, 1200, 3), np.uint8)
    edited = source.copy()
    edited[0, 0, 0] = 1
    assert peak_signal_to_noise(pair(source, edited)) == 100.0
    assert mean_squared_error(pair(source, edited)) > 0


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK"])
def test_other_modes_equal_their_rgb(tmp_path: Path, mode: str) -> None:
    rgb = Image.fromarray(photo())
    if mode == "L":
        rgb = Image.fromarray(camera()).resize((96, 96)).convert("RGB")
    other = rgb.convert(mode) if mode != "P" else rgb.quantize(256)
    plain = other.convert("RGB")
    suffix = "tif" if mode == "CMYK" else "png"
    a, b = tmp_path / f"a.{suffix}", tmp_path / "b.png"
    other.save(a)
    plain.save(b)
    edit = EditSample("x", "x", str(a), str(b), "do it")
    assert mean_squared_error(load_pair(edit)) == 0


def test_an_edited_image_of_another_size_is_brought_to_the_sources(tmp_path: Path) -> None:
    source = Image.fromarray(photo(96))
    wide = source.resize((160, 120), Image.Resampling.BICUBIC)
    loaded = load_pair(sample(tmp_path, source, wide))
    assert loaded.resized and loaded.edited.shape == (96, 96, 3)
    assert (loaded.edited == np.asarray(wide.resize((96, 96), Image.Resampling.BICUBIC))).all()
    swapped = load_pair(sample(tmp_path, wide, source, "b"))
    assert swapped.edited.shape == (120, 160, 3)
    assert peak_signal_to_noise(loaded) > 30


def test_an_image_smaller_than_the_window_fails_ssim_alone(tmp_path: Path) -> None:
    small = Image.fromarray(photo(6))
    edit = sample(tmp_path, small, small)
    assert build_scorer("mse").score([edit])[0][0].value == 0
    prediction = build_scorer("ssim").score([edit])[0][0]
    assert prediction.value is None
    assert prediction.failure == "SSIM needs images of at least 11 x 11 pixels (its window), got 6 x 6."
    one = Image.fromarray(photo(1))
    assert build_scorer("psnr").score([sample(tmp_path, one, one, "one")])[0][0].value == 100


def test_a_bad_image_is_a_failure_of_its_row_and_batches_do_not_matter(tmp_path: Path) -> None:
    image = Image.fromarray(photo())
    blurred = image.filter(ImageFilter.GaussianBlur(1))
    good = sample(tmp_path, image, blurred)
    missing = EditSample("gone", "gone", str(tmp_path / "gone.png"), good.edited_image, "do it")
    truncated = tmp_path / "cut.png"
    truncated.write_bytes(Path(good.source_image).read_bytes()[:3000])
    cut = EditSample("cut", "cut", good.source_image, str(truncated), "do it")
    for name in MEASURES:
        scorer = build_scorer(name)
        rows = scorer.score([good, missing, cut, good])
        assert [len(row) for row in rows] == [1, 1, 1, 1]
        first, gone, broken, last = (row[0] for row in rows)
        assert first.value == last.value == scorer.score([good])[0][0].value
        assert gone.value is None and str(tmp_path / "gone.png") in gone.failure
        assert broken.value is None and str(truncated) in broken.failure
        assert (first.predictor, first.target, first.item_id) == (name, "score", "a")


def test_the_cache_notices_a_changed_file_and_keeps_to_its_limit(tmp_path: Path) -> None:
    cache = _PixelCache(limit=2 * 96 * 96 * 3)
    path = tmp_path / "a.png"
    Image.fromarray(photo()).save(path)
    first = cache.get(str(path))
    assert cache.get(str(path)) is first
    Image.fromarray(255 - photo()).save(path)
    assert (cache.get(str(path)) == 255 - first).all()
    for index in range(4):
        other = tmp_path / f"{index}.png"
        Image.fromarray(photo()).save(other)
        cache.get(str(other))
    assert len(cache.images) == 2 and cache.held == 2 * 96 * 96 * 3
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0, 0] = 1
