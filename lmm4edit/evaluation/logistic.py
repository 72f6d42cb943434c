"""The monotone and the Sheikh logistic, fitted by least squares, which map a scorer's values to the opinion scale.

* 4 parameters (VQEG): ``low + (high - low) * s((x - centre) * slope)``, s the standard logistic; monotone.
* 5 parameters (Sheikh, Sabir, Bovik 2006): ``b1 * (1/2 - 1/(1 + exp(b2 (x - b3)))) + b4 x + b5``; need not be monotone.

Both are linear but for a centre and a slope, so only those two are searched for (variable projection; Golub and Pereyra
1973): a grid, then Levenberg-Marquardt, with the linear parameters solved exactly each time. No starting values to
tune, and the same curve from the same data, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

Floats = NDArray[np.float64]

MAX_STEPS = 60
MAX_DAMPING = 1e8
MAX_CENTRE = 50.0
MAX_LOG_SLOPE = 6.0

_CENTRES = np.linspace(-2.0, 2.0, 9)
_LOG_SLOPES = np.log([0.3, 0.7, 1.5, 3.0, 6.0, 12.0])


@dataclass(frozen=True)
class LogisticFit:
    """A fitted curve.

    Attributes:
        parameters: over the standardised input ``(x - shift) / scale``: (low, high - low, centre, slope) for four,
            (b1, b2, b3, b4, b5) for five.
        shift, scale: mean and SD of the input it was fitted on.
        increasing: whether the curve rises with the input over the fitted points (by the sign of their correlation).
    """

    parameters: tuple[float, ...]
    shift: float
    scale: float
    increasing: bool

    def __call__(self, x: ArrayLike) -> Floats:
        """Map values of any shape to the opinion scale."""
        standard = (np.asarray(x, dtype=np.float64) - self.shift) / self.scale
        return _curve(np.array(self.parameters), standard)


def fit_logistic(x: ArrayLike, y: ArrayLike, n_parameters: int) -> LogisticFit | None:
    """Least-squares logistic from predictions to opinions.

    Args:
        x: [N] predictions, not constant.
        y: [N] opinions.
        n_parameters: 4 or 5.

    Returns:
        The fit, or ``None`` where the optimiser finds no finite one.

    Raises:
        ValueError: ``n_parameters`` is neither 4 nor 5, or there are fewer points than parameters.
    """
    if n_parameters not in (4, 5):
        raise ValueError(f"Expected 4 or 5 logistic parameters, got {n_parameters}.")
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(x) < n_parameters:
        raise ValueError(f"Expected at least {n_parameters} points for {n_parameters} parameters, got {len(x)}.")
    shift, scale = float(x.mean()), float(x.std())
    if not scale > 0:
        raise ValueError("Expected predictions that differ, got a constant: there is no curve to fit.")
    standard = (x - shift) / scale
    parameters = _Search(standard, y, with_line=n_parameters == 5).run()
    fitted = _curve(parameters, standard)
    if not np.all(np.isfinite(parameters)) or not np.all(np.isfinite(fitted)):
        return None
    increasing = float(np.sum(standard * (fitted - fitted.mean()))) >= 0
    return LogisticFit(tuple(float(p) for p in parameters), shift, scale, increasing)


def _curve(p: Floats, x: Floats) -> Floats:
    if len(p) == 4:
        return p[0] + p[1] * expit((x - p[2]) * p[3])
    return p[0] * (expit(p[1] * (x - p[2])) - 0.5) + p[3] * x + p[4]


def _dot(a: Floats, b: Floats) -> float:
    return float(np.add.reduce(a * b))


class _Search:
    """Centre and slope of the logistic ``s`` in ``offset + height * s [+ line * x]``; least squares gives the rest.

    Sums are written out, never as matrix products: those depend on where arrays lie in memory, and a curve that is
    hardly determined (a step) would make their last bits visible.

    Args:
        x: [N] standardised predictions.
        y: [N] opinions.
        with_line: whether there is a linear term (five parameters).
    """

    def __init__(self, x: Floats, y: Floats, with_line: bool) -> None:
        self.x, self.y, self.with_line = x, y, with_line
        self.xx = _dot(x, x)
        self.rest = self._free(y)

    def run(self) -> Floats:
        """Parameters in the order of :func:`_curve`."""
        centre, log_slope = self._refine(*self._best_of_grid())
        s, slope = self._logistic(centre, log_slope), float(np.exp(log_slope))
        _, height, _ = self._project(s)
        left = self.y - height * s
        line = _dot(left, self.x) / self.xx if self.with_line else 0.0
        offset = float(np.mean(left))
        if self.with_line:
            return np.array([height, slope, centre, line, offset + 0.5 * height])
        return np.array([offset, height, centre, slope])

    def _logistic(self, centre: float, log_slope: float) -> Floats:
        return expit((self.x - centre) * np.exp(log_slope))

    def _free(self, values: Floats) -> Floats:
        """What of [N] values a constant (and a line) cannot explain."""
        values = values - values.mean()
        return values - self.x * (_dot(values, self.x) / self.xx) if self.with_line else values

    def _project(self, s: Floats) -> tuple[Floats, float, Floats]:
        """The free part of a logistic, its best height, and the residual."""
        free = self._free(s)
        square = _dot(free, free)
        # Beyond this the logistic is flat (or straight) over the data, and its height would be noise.
        height = _dot(free, self.rest) / square if square > 1e-12 * len(s) else 0.0
        return free, height, height * free - self.rest

    def _best_of_grid(self) -> tuple[float, float]:
        centre, log_slope = (v.ravel() for v in np.meshgrid(_CENTRES, _LOG_SLOPES, indexing="ij"))
        s = expit((self.x[None, :] - centre[:, None]) * np.exp(log_slope)[:, None])
        free = s - s.mean(axis=1, keepdims=True)
        if self.with_line:
            free -= self.x[None, :] * (np.add.reduce(free * self.x, axis=1, keepdims=True) / self.xx)
        square, product = np.add.reduce(free * free, axis=1), np.add.reduce(free * self.rest, axis=1)
        explained = np.divide(product**2, square, out=np.zeros_like(square), where=square > 1e-12 * len(self.x))
        # Close calls go to the first in the grid, so that rounding does not choose the curve.
        best = int(np.argmax(np.round(explained / max(_dot(self.rest, self.rest), 1e-300), 9)))
        return float(centre[best]), float(log_slope[best])

    def _refine(self, centre: float, log_slope: float) -> tuple[float, float]:
        free, height, residual = self._project(self._logistic(centre, log_slope))
        cost, damping = _dot(residual, residual), 1e-3
        for _ in range(MAX_STEPS):
            move = self._directions(centre, log_slope, free, height)
            while damping < MAX_DAMPING:
                step_c, step_t = _damped_step(*move, residual, damping)
                new_c = float(np.clip(centre + step_c, -MAX_CENTRE, MAX_CENTRE))
                new_t = float(np.clip(log_slope + step_t, -MAX_LOG_SLOPE, MAX_LOG_SLOPE))
                new_free, new_height, new_residual = self._project(self._logistic(new_c, new_t))
                new_cost = _dot(new_residual, new_residual)
                if new_cost < cost:
                    break
                damping *= 8
            else:
                return centre, log_slope
            gain, cost = cost - new_cost, new_cost
            centre, log_slope, free, height, residual = new_c, new_t, new_free, new_height, new_residual
            damping = max(damping / 8, 1e-9)
            if gain <= 1e-9 * cost:
                break
        return centre, log_slope

    def _directions(self, centre: float, log_slope: float, free: Floats, height: float) -> tuple[Floats, Floats]:
        """[N] derivatives of the residual by centre and by log slope, at the best height (Kaufman 1975)."""
        slope = float(np.exp(log_slope))
        s = self._logistic(centre, log_slope)
        bell = height * s * (1 - s) * slope
        square = _dot(free, free)
        found = []
        for derivative in (-bell, bell * (self.x - centre)):
            direction = self._free(derivative)
            share = _dot(direction, free) / square if square > 0 else 0.0
            found.append(direction - share * free)
        return found[0], found[1]


def _damped_step(a: Floats, b: Floats, residual: Floats, damping: float) -> tuple[float, float]:
    aa, bb, ab = _dot(a, a), _dot(b, b), _dot(a, b)
    ga, gb = _dot(a, residual), _dot(b, residual)
    floor = 1e-9 * max(aa, bb) + 1e-300
    aa, bb = aa + damping * max(aa, floor), bb + damping * max(bb, floor)
    determinant = aa * bb - ab * ab
    if not determinant > 0:
        return 0.0, 0.0
    return (-ga * bb + gb * ab) / determinant, (-gb * aa + ga * ab) / determinant
