"""MSE, PSNR and SSIM: how far the edited image is from the source, pixel by pixel or window by window.

They know nothing of the instruction: an edit that changes nothing scores best. That is why the paper's Table 3 lists
    them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lmm4edit.errors import LMM4EditError
from lmm4edit.records import SCORE, EditSample, Prediction
from lmm4edit.scorers.base import ScorerInfo
from lmm4edit.scorers.pairs import ImagePair, load_pair

PSNR_CAP = 100.0
SSIM_WINDOW = 11

_SIZES = "An edited image of another size is resized to the source's size (Pillow bicubic, antialiased)."


class PixelScorer:
    """A full-reference measure on decoded pixels.

    Args:
        info: what it is.
        measure: pair -> value; raises :class:`ValueError` with a reason where it is not defined.
    """

    def __init__(self, info: ScorerInfo, measure: Callable[[ImagePair], float]) -> None:
        self.info = info
        self.measure = measure

    def score(self, samples: Sequence[EditSample]) -> list[list[Prediction]]:
        """One prediction per sample, target ``score``; an unreadable image gives a failure."""
        return [[self._one(sample)] for sample in samples]

    def _one(self, sample: EditSample) -> Prediction:
        try:
            value = self.measure(load_pair(sample))
        except (LMM4EditError, ValueError) as error:
            return Prediction(sample.sample_id, self.info.name, SCORE, None, failure=str(error))
        return Prediction(sample.sample_id, self.info.name, SCORE, value)


def build_mse() -> PixelScorer:
    """Mean squared error over all pixels and the three channels of 8-bit RGB.

    Range 0 (identical) to 65,025 (black against white); lower is better; symmetric.
    """
    info = ScorerInfo(
        name="mse",
        family="fr_handcrafted",
        needs=frozenset({"source", "edited"}),
        higher_is_better=False,
        low=0.0,
        high=255.0**2,
        implementation="LMM4Edit",
        code_license="Apache-2.0",
        notes=f"8-bit RGB, mean over pixels and channels. {_SIZES}",
    )
    return PixelScorer(info, mean_squared_error)


def build_psnr() -> PixelScorer:
    """Peak signal-to-noise ratio in dB, ``10 log10(255^2 / MSE)``, higher is better; symmetric.

    Identical images have no finite PSNR, so values are capped at 100 dB (an MSE of 6.5e-6, below anything visible):
    range 0 to 100. Infinite values never enter a file or a correlation.
    """
    info = ScorerInfo(
        name="psnr",
        family="fr_handcrafted",
        needs=frozenset({"source", "edited"}),
        low=0.0,
        high=PSNR_CAP,
        implementation="LMM4Edit",
        code_license="Apache-2.0",
        notes=f"Peak 255, MSE over 8-bit RGB, capped at {PSNR_CAP:g} dB (identical images). {_SIZES}",
    )
    return PixelScorer(info, peak_signal_to_noise)


def build_ssim() -> PixelScorer:
    """Structural similarity, -1 to 1, higher is better; symmetric. Identical images give 1.

    Definition of the authors' ``ssim_index``: MATLAB luma rounded to 8 bits, Gaussian window of 11 pixels with sigma
    1.5, population covariance, K1 = 0.01, K2 = 0.03, mean over the interior, no downsampling. Images with a side below
    11 pixels have no value.
    """
    info = ScorerInfo(
        name="ssim",
        family="fr_handcrafted",
        needs=frozenset({"source", "edited"}),
        low=-1.0,
        high=1.0,
        paper="Wang, Bovik, Sheikh, Simoncelli 2004, doi:10.1109/TIP.2003.819861",
        implementation="scikit-image",
        code_license="BSD-3-Clause",
        notes=f"MATLAB luma rounded to 8 bits, Gaussian sigma 1.5, population covariance, no downsampling. {_SIZES}",
    )
    return PixelScorer(info, structural_similarity)


def mean_squared_error(pair: ImagePair) -> float:
    """Mean squared difference of 8-bit RGB values, 0-65,025."""
    difference = pair.source.astype(np.int32) - pair.edited
    return float(np.mean(difference.astype(np.float64) ** 2))


def peak_signal_to_noise(pair: ImagePair) -> float:
    """PSNR in dB, 0 to 100 (capped)."""
    error = mean_squared_error(pair)
    return PSNR_CAP if error == 0 else float(min(PSNR_CAP, 10 * np.log10(255.0**2 / error)))


def structural_similarity(pair: ImagePair) -> float:
    """SSIM of the luma, -1 to 1.

    Raises:
        ValueError: a side is shorter than the window.
    """
    from skimage.metrics import structural_similarity as ssim

    height, width = pair.source.shape[:2]
    if min(height, width) < SSIM_WINDOW:
        raise ValueError(
            f"SSIM needs images of at least {SSIM_WINDOW} x {SSIM_WINDOW} pixels (its window), got {width} x {height}."
        )
    return float(
        ssim(
            luma(pair.source),
            luma(pair.edited),
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
            data_range=255.0,
        )
    )


def luma(rgb: NDArray[np.uint8]) -> NDArray[np.float64]:
    """MATLAB's ``rgb2gray``: the luma of uint8 [H, W, 3], rounded to whole numbers (half up), as float64 [H, W]."""
    weighted = rgb.astype(np.float64) @ np.array([0.298936021293775, 0.587043074451121, 0.114020904255103])
    return np.floor(weighted + 0.5)
