"""The monotone and the Sheikh logistic, fitted by least squares, which map a scorer's values to the opinion scale.

* 4 parameters (VQEG): ``low + (high - low) * s((x - centre) * slope)``, s the standard logistic; monotone.
* 5 parameters (Sheikh, Sabir, Bovik 2006): ``b1 * (1/2 - 1/(1 + exp(b2 (x - b3)))) + b4 x + b5``; need not be monotone.

Both are linear but for a centre and a slope. So the search is a grid over those two with the rest solved exactly, then
Levenberg-Marquardt over all parameters from the grid's best: no starting values to tune, the same result in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

Floats = NDArray[np.float64]

MAX_STEPS = 100
MAX_DAMPING = 1e10

_CENTRES = np.linspace(-2.0, 2.0, 9)
_SLOPES = np.array([0.3, 0.7, 1.5, 3.0, 6.0, 12.0])


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
    best = _refine(_grid_search(standard, y, n_parameters), standard, y)
    fitted = _curve(best, standard)
    if not np.all(np.isfinite(best)) or not np.all(np.isfinite(fitted)):
        return None
    increasing = float(np.sum(standard * (fitted - fitted.mean()))) >= 0
    return LogisticFit(tuple(float(p) for p in best), shift, scale, increasing)


def _curve(p: Floats, x: Floats) -> Floats:
    if len(p) == 4:
        return p[0] + p[1] * expit((x - p[2]) * p[3])
    return p[0] * (expit(p[1] * (x - p[2])) - 0.5) + p[3] * x + p[4]


def _refine(p: Floats, x: Floats, y: Floats) -> Floats:
    """Levenberg-Marquardt from a start; never worse than it.

    Written out because SciPy's wrapper of MINPACK gives other last bits from call to call (they depend on memory),
    which a curve that is hardly determined, such as a step, turns into visible differences between two runs.
    """
    residual = _curve(p, x) - y
    cost, damping = float(np.sum(residual**2)), 1e-3
    for _ in range(MAX_STEPS):
        jacobian = _jacobian(p, x)
        # Plain loops in einsum: a BLAS product depends on where arrays lie in memory.
        normal = np.einsum("ni,nj->ij", jacobian, jacobian)
        gradient = np.einsum("ni,n->i", jacobian, residual)
        scale = np.diag(np.maximum(normal.diagonal(), 1e-9 * normal.diagonal().max() + 1e-300))
        while damping < MAX_DAMPING:
            step = np.linalg.solve(normal + damping * scale, -gradient)
            moved = _curve(p + step, x) - y
            new_cost = float(np.sum(moved**2))
            if new_cost < cost:
                break
            damping *= 10
        else:
            return p
        gain = cost - new_cost
        p, residual, cost, damping = p + step, moved, new_cost, max(damping / 10, 1e-9)
        if gain <= 1e-10 * cost:
            return p
    return p


def _jacobian(p: Floats, x: Floats) -> Floats:
    if len(p) == 4:
        s = expit((x - p[2]) * p[3])
        slope = p[1] * s * (1 - s)
        return np.stack([np.ones_like(x), s, -slope * p[3], slope * (x - p[2])], axis=1)
    s = expit(p[1] * (x - p[2]))
    slope = p[0] * s * (1 - s)
    return np.stack([s - 0.5, slope * (x - p[2]), -slope * p[1], x, np.ones_like(x)], axis=1)


def _grid_search(x: Floats, y: Floats, n_parameters: int) -> Floats:
    """Best parameters over a grid of centres and slopes, the linear ones solved for each by least squares."""
    centre, slope = (v.ravel() for v in np.meshgrid(_CENTRES, _SLOPES, indexing="ij"))
    s = expit((x[None, :] - centre[:, None]) * slope[:, None])
    mean_s, mean_y = s.mean(axis=1), y.mean()
    ds, dy = s - mean_s[:, None], y - mean_y
    # Plain sums: a BLAS product depends on where arrays lie in memory, and the curve on its last bits.
    ss, sy, total = np.sum(ds * ds, axis=1), np.sum(ds * dy, axis=1), float(np.sum(dy * dy))
    if n_parameters == 4:
        height = np.divide(sy, ss, out=np.zeros_like(ss), where=ss > 0)
        best = int(np.argmin(_coarse(total - height * sy, total)))
        return np.array([mean_y - height[best] * mean_s[best], height[best], centre[best], slope[best]])
    # Two regressors, s and x (which is standardised): solve the 2 x 2 normal equations of every grid point.
    xx, xs, xy = float(np.sum(x * x)), np.sum(ds * x, axis=1), float(np.sum(x * dy))
    determinant = ss * xx - xs**2
    usable = determinant > 1e-9 * ss * xx
    safe = np.where(usable, determinant, 1.0)
    height = np.where(usable, (sy * xx - xy * xs) / safe, 0.0)
    line = np.where(usable, (xy * ss - sy * xs) / safe, xy / xx)
    # A height of 0 is a straight line, which stands among the candidates: no fit may be worse than it.
    height, line = np.append(height, 0.0), np.append(line, xy / xx)
    costs = total - height * np.append(sy, 0.0) - line * xy
    best = int(np.argmin(_coarse(costs, total)))
    if best == len(centre):
        return np.array([0.0, 1.0, 0.0, line[best], mean_y])
    offset = mean_y - height[best] * mean_s[best] + 0.5 * height[best]
    return np.array([height[best], slope[best], centre[best], line[best], offset])


def _coarse(costs: Floats, total: float) -> Floats:
    # Close calls go to the first in the grid, so that rounding does not choose the curve.
    return np.round(costs / max(total, 1e-300), 9)
