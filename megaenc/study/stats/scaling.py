"""Fits of scaling laws: loss by model size and training tokens.

`fit_scaling_law` fits L(N, D) = E + A / N^alpha + B / D^beta to all runs of an objective (approach
3 of Hoffmann et al., 2203.15556), `fit_isoflop` a parabola to each budget (approach 2). Both return
an estimate and its bootstrap resamples: an object of the same class, whose arrays have the
resamples as last dimension. `percentile_interval` gives the interval of any statistic of them:

    law, resamples = fit_scaling_law(points)
    low, high = percentile_interval(resamples.optimal_parameters(1e19))

Losses of two objectives can be compared only if they measure the same, such as the loss of one
downstream task.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter

import numpy as np
from scipy.optimize import leastsq
from scipy.special import huber

from megaenc.errors import InputError
from megaenc.study.stats.inference import LEVEL, t_quantile

DELTA = 1e-3
"""Residual of a log loss above which the Huber loss is linear, as in Hoffmann et al."""
_SAME_BUDGET = 1.1  # ratio of FLOPs; whole steps make runs of one budget differ by a few percent
_CROSSING_STEPS = 1000  # searched FLOPs; between two of them the loss is linear in log FLOPs
_FEWEST_SIZES = 3  # fewer have no parabola, and resampled points hardly differ


@dataclass(frozen=True)
class ScalingPoint:
    """Final loss of one pretraining run, with its size and cost.

    Whether `parameters` has those of embeddings is the caller's choice, the same for all points.
    """

    objective: str
    parameters: float
    tokens: float
    flops: float
    """training FLOPs of the run"""
    loss: float
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("parameters", "tokens", "flops", "loss"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(
                    f"{name} {value} of a {self.objective} run, seed {self.seed}: a fit of scaling "
                    "laws expects a finite number above 0; leave the run out"
                )


@dataclass(frozen=True)
class ScalingLaw:
    """Loss of an objective, L(N, D) = E + A / N^alpha + B / D^beta.

    Each parameter is a number, or float[K] for K resamples; so is each result.
    """

    E: float | np.ndarray
    A: float | np.ndarray
    B: float | np.ndarray
    alpha: float | np.ndarray
    beta: float | np.ndarray
    flops_factor: float
    """FLOPs / (N * D), the geometric mean over the runs; about 6 for Transformers"""
    flops_range: tuple[float, float]
    """lowest and highest FLOPs of the runs; results are extrapolated outside"""

    @property
    def parameters_exponent(self) -> float | np.ndarray:
        """Return a of optimal N ~ FLOPs^a: beta / (alpha + beta)."""
        return self.beta / (self.alpha + self.beta)

    @property
    def tokens_exponent(self) -> float | np.ndarray:
        """Return b of optimal D ~ FLOPs^b: alpha / (alpha + beta)."""
        return self.alpha / (self.alpha + self.beta)

    def loss(
        self, parameters: float | np.ndarray, tokens: float | np.ndarray
    ) -> float | np.ndarray:
        """Return the loss of models with so many parameters after so many tokens."""
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    def optimal_parameters(self, flops: float) -> float | np.ndarray:
        """Return the model size with the lowest loss at a budget of FLOPs."""
        balance = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        return balance * (flops / self.flops_factor) ** self.parameters_exponent

    def optimal_tokens(self, flops: float) -> float | np.ndarray:
        """Return the number of tokens with the lowest loss at a budget of FLOPs."""
        return flops / self.flops_factor / self.optimal_parameters(flops)

    def optimal_loss(self, flops: float) -> float | np.ndarray:
        """Return the lowest loss at a budget of FLOPs, the envelope of the objective."""
        return self.loss(self.optimal_parameters(flops), self.optimal_tokens(flops))


@dataclass(frozen=True)
class IsoFlopOptima:
    """Minimum and curvature of each budget's parabola.

    Each field but `flops` is float[M] for M budgets, or float[M, K] for K resamples, with NaN if a
    resample has no minimum. Exponents are NaN with fewer than two budgets.
    """

    flops: np.ndarray
    """geometric means over the runs of each budget, float[M], ascending"""
    parameters: np.ndarray
    tokens: np.ndarray
    losses: np.ndarray
    curvatures: np.ndarray
    """rise of the loss above the minimum over the squared distance in log size"""

    @property
    def parameters_exponent(self) -> float | np.ndarray:
        """Return a of optimal N ~ FLOPs^a, the slope over the budgets."""
        return _log_slope(self.flops, self.parameters)

    @property
    def tokens_exponent(self) -> float | np.ndarray:
        """Return b of optimal D ~ FLOPs^b, the slope over the budgets."""
        return _log_slope(self.flops, self.tokens)


def fit_scaling_law(
    points: Sequence[ScalingPoint], resamples: int = 1000, seed: int = 0, delta: float = DELTA
) -> tuple[ScalingLaw, ScalingLaw]:
    """Fit L(N, D) to the runs of one objective, with bootstrap resamples.

    The sum of Huber losses of log losses is minimised from several starts.

    A resample draws the points of each budget with replacement. A point is all runs (seeds) of one
    size and number of tokens. Runs whose FLOPs differ by less than 10 % have one budget. Points of
    budgets with one or two of them are drawn from all of these together.

    Args:
        points: Runs of one objective, at least six points of at least three sizes and three
            numbers of tokens.
        resamples: Number K of bootstrap resamples, each fitted from the estimate.
        seed: Seed of the resampling; objectives with the same points are resampled alike.
        delta: Residual of a log loss above which the Huber loss is linear.

    Returns:
        The estimate, and its resamples with fields of float[K].

    Raises:
        InputError: There are too few points, or losses do not fall with size and tokens.
    """
    sizes = np.array([point.parameters for point in points])
    tokens = np.array([point.tokens for point in points])
    flops = np.array([point.flops for point in points])
    losses = np.array([point.loss for point in points])
    counts = [len(set(values)) for values in (zip(sizes, tokens, strict=True), sizes, tokens)]
    if counts[0] < 6 or min(counts) < 3:
        raise InputError(
            f"{counts[0]} points of {counts[1]} sizes and {counts[2]} numbers of tokens: a scaling "
            "law needs at least six points of three sizes and three numbers of tokens; add runs"
        )
    # centred, so that A and B are not tied to their exponents
    size_origin = np.log(sizes).mean()
    token_origin = np.log(tokens).mean()
    coordinates = np.stack([np.log(sizes) - size_origin, np.log(tokens) - token_origin])
    best = _fit_from_starts(coordinates, losses, delta)
    groups = _group_points(points, budget_indices(flops))
    random = np.random.default_rng(seed)
    solutions = np.empty((5, resamples))
    for index in range(resamples):
        runs = _draw_runs(groups, random)
        solutions[:, index], _ = _minimise_huber(
            best, coordinates[:, runs], np.log(losses[runs]), delta
        )
    flops_factor = float(np.exp(np.mean(np.log(flops / sizes / tokens))))
    laws = []
    for log_e, log_a, log_b, alpha, beta in (best, solutions):
        with np.errstate(over="ignore"):  # resamples whose exponent is not determined
            laws.append(
                ScalingLaw(
                    np.exp(log_e),
                    np.exp(log_a + alpha * size_origin),
                    np.exp(log_b + beta * token_origin),
                    alpha,
                    beta,
                    flops_factor,
                    (float(flops.min()), float(flops.max())),
                )
            )
    return laws[0], laws[1]


def _fit_from_starts(coordinates: np.ndarray, losses: np.ndarray, delta: float) -> np.ndarray:
    """Return the best solution of `_minimise_huber` from several starts.

    Raises:
        InputError: An exponent is not positive.
    """
    lowest = losses.min()
    candidates = []
    for part, exponent in product((0.3, 0.6, 0.9), (0.2, 0.7)):
        rest = (1 - part) * lowest / 2
        start = [*np.log([part * lowest, rest, rest]), exponent, exponent]
        candidates.append(_minimise_huber(start, coordinates, np.log(losses), delta))
    best, _ = min(candidates, key=itemgetter(1))
    if min(best[3:]) <= 0:
        raise InputError(
            f"the fit has alpha {best[3]:.3g} and beta {best[4]:.3g}, expected above 0: losses do "
            "not fall with size and tokens; add runs of other sizes or budgets"
        )
    return best


def _minimise_huber(
    start: Sequence[float], coordinates: np.ndarray, log_losses: np.ndarray, delta: float
) -> tuple[np.ndarray, float]:
    """Return (log E, log A, log B, alpha, beta) with the lowest Huber loss.

    Args:
        start: Solution from which the search for a minimum starts.
        coordinates: Centred log sizes and log tokens, float[2, n].

    Returns:
        The solution, and its sum of Huber losses.
    """

    def terms(solution: np.ndarray) -> np.ndarray:
        logs = np.empty((3, len(log_losses)))
        logs[0] = solution[0]
        logs[1:] = solution[1:3, None] - solution[3:, None] * coordinates
        return logs

    # squares of these residuals are twice the Huber loss
    def residuals(solution: np.ndarray) -> np.ndarray:
        difference = np.logaddexp.reduce(terms(solution)) - log_losses
        return np.sign(difference) * np.sqrt(2 * huber(delta, difference))

    def jacobian(solution: np.ndarray) -> np.ndarray:
        logs = terms(solution)
        total = np.logaddexp.reduce(logs)
        parts = np.exp(logs - total)
        difference = total - log_losses
        parts *= delta / np.maximum(np.sqrt(2 * huber(delta, difference)), delta)
        return np.concatenate([parts, -parts[1:] * coordinates])

    with np.errstate(over="ignore", invalid="ignore"):  # too long steps, which leastsq rejects
        solution, _, state, _, _ = leastsq(
            residuals,
            start,
            Dfun=jacobian,
            col_deriv=True,
            full_output=True,
            ftol=1e-12,
            xtol=1e-10,
        )
    return solution, float(state["fvec"] @ state["fvec"]) / 2


def budget_indices(flops: np.ndarray) -> np.ndarray:
    """Return the index of each run's budget, int[n]; budgets ascend."""
    order = np.argsort(flops)
    is_first = flops[order[1:]] > _SAME_BUDGET * flops[order[:-1]]
    indices = np.zeros(len(flops), dtype=int)
    indices[order[1:]] = np.cumsum(is_first)
    return indices


def _group_points(points: Sequence[ScalingPoint], budgets: np.ndarray) -> list[list[list[int]]]:
    """Return the indices of runs by budget and point; small budgets are joined."""
    by_budget = defaultdict(lambda: defaultdict(list))
    for run, point in enumerate(points):
        by_budget[budgets[run]][point.parameters, point.tokens].append(run)
    groups = []
    joined = []
    for by_point in by_budget.values():
        if len(by_point) < _FEWEST_SIZES:
            joined += by_point.values()
        else:
            groups.append(list(by_point.values()))
    return [group for group in (*groups, joined) if group]


def _draw_runs(groups: list[list[list[int]]], random: np.random.Generator) -> list[int]:
    """Draw points of each group with replacement; return indices of their runs."""
    runs = []
    for group in groups:
        for index in random.integers(len(group), size=len(group)):
            runs += group[index]
    return runs


def fit_isoflop(
    points: Sequence[ScalingPoint], resamples: int = 1000, seed: int = 0
) -> tuple[IsoFlopOptima, IsoFlopOptima]:
    """Fit a parabola over log size to each budget of one objective, with resamples.

    The minimum is the optimum of the budget. Budgets with fewer than three sizes, or whose minimum
    is not within their sizes, are left out. Runs whose FLOPs differ by less than 10 % have one
    budget. A curve of losses is a parabola only near its minimum: sizes far from it, on one side
    more than on the other, bias the exponents, and the interval does not cover that.

    A resample draws residuals of all runs with replacement. Drawing points, as in
    `fit_scaling_law`, leaves few sizes to a budget, and often no minimum. Intervals from so few
    residuals are too narrow; so residuals are multiplied by sqrt(n / df) and by the ratio of the
    quantiles of Student's t and the normal distribution, with df = n - 3 M for n runs of M budgets.

    Args:
        points: Runs of one objective.
        resamples: Number K of bootstrap resamples.
        seed: Seed of the resampling; objectives with the same points are resampled alike.

    Returns:
        The estimate, and its resamples, which are NaN if no budget has more than three runs.

    Raises:
        InputError: No budget has a minimum within its sizes.
    """
    sizes = np.log([point.parameters for point in points])
    tokens = np.log([point.tokens for point in points])
    flops = np.array([point.flops for point in points])
    losses = np.array([point.loss for point in points])
    indices = budget_indices(flops)
    budgets = []
    optima = []
    residuals = []
    for index in range(indices.max() + 1):
        runs = np.flatnonzero(indices == index)
        if len(set(sizes[runs])) < _FEWEST_SIZES:
            continue
        optimum, fitted = _fit_parabola(sizes[runs], tokens[runs], losses[runs])
        if np.exp(sizes[runs].min()) <= optimum[0] <= np.exp(sizes[runs].max()):
            budgets.append((runs, fitted))
            optima.append(optimum)
            residuals.append(losses[runs] - fitted)
    if not budgets:
        raise InputError(
            f"{indices.max() + 1} budgets: no parabola over at least three sizes has its minimum "
            "within them; add smaller and larger sizes"
        )
    pool = np.concatenate(residuals)
    df = len(pool) - 3 * len(budgets)
    widening = math.nan
    if df:
        widening = math.sqrt(len(pool) / df) * t_quantile(df) / t_quantile(math.inf)
    random = np.random.default_rng(seed)
    resampled = []
    for runs, fitted in budgets:
        noise = widening * random.choice(pool, (len(runs), resamples))
        optimum, _ = _fit_parabola(sizes[runs], tokens[runs], fitted[:, None] + noise)
        resampled.append(optimum)
    budget_flops = np.array([np.exp(np.log(flops[runs]).mean()) for runs, _ in budgets])
    return (
        IsoFlopOptima(budget_flops, *np.stack(optima, axis=1)),
        IsoFlopOptima(budget_flops, *np.stack(resampled, axis=1)),
    )


def _fit_parabola(
    sizes: np.ndarray, tokens: np.ndarray, losses: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the minimum of the parabola of one budget, and the fitted losses.

    Args:
        sizes: Log sizes, float[n].
        tokens: Log tokens, float[n], linear in log sizes.
        losses: float[n], or float[n, K] for K resamples.

    Returns:
        Parameters, tokens and loss at the minimum, and the curvature, float[4] or float[4, K], NaN
        without a minimum; and the fitted losses.
    """
    origin = sizes.mean()
    design = np.vander(sizes - origin, 3)
    square, slope, constant = np.polyfit(sizes - origin, losses, 2)
    square = np.where(square > 0, square, math.nan)
    place = -slope / (2 * square)
    token_slope, token_origin = np.polyfit(sizes - origin, tokens, 1)
    with np.errstate(over="ignore"):  # the minimum of an almost straight line
        optimum = np.stack(
            [
                np.exp(origin + place),
                np.exp(token_origin + token_slope * place),
                constant + slope * place / 2,
                square,
            ]
        )
    return optimum, design @ np.stack([square, slope, constant])


def _log_slope(flops: np.ndarray, values: np.ndarray) -> float | np.ndarray:
    """Return the slope over log FLOPs, float[M], of log values, float[M(, K)]."""
    offsets = np.log(flops) - np.log(flops).mean()
    with np.errstate(invalid="ignore"):  # one budget has no slope: 0 / 0
        return offsets @ np.log(values) / (offsets @ offsets)


def percentile_interval(values: np.ndarray) -> tuple[float, float]:
    """Return (low, high), the 95 % interval of a statistic of resamples, float[K].

    Resamples without the statistic, NaN, are left out; with 5 % or more of them both ends are NaN.
    """
    known = values[np.isfinite(values)]
    if len(known) <= (1 - LEVEL) * len(values):
        return math.nan, math.nan
    low, high = np.percentile(known, (100 * LEVEL / 2, 100 - 100 * LEVEL / 2))
    return float(low), float(high)


def find_crossing(first: ScalingLaw, second: ScalingLaw) -> float | np.ndarray:
    """Return the FLOPs at which the lowest losses of two objectives are equal.

    Only FLOPs within the runs of both objectives are searched. Of two crossings the one with fewer
    FLOPs is returned; NaN without any.

    Args:
        first: Law of one objective, or its resamples.
        second: Law of another objective, or as many resamples.

    Returns:
        A number, or float[K] for K resamples.
    """
    low = max(first.flops_range[0], second.flops_range[0])
    high = min(first.flops_range[1], second.flops_range[1])
    if low >= high:
        return np.full(np.shape(first.E), math.nan)[()]
    logs = np.linspace(math.log(low), math.log(high), _CROSSING_STEPS)
    logs = logs.reshape(-1, *np.ones(np.ndim(first.E), dtype=int))
    flops = np.exp(logs)
    gaps = first.optimal_loss(flops) - second.optimal_loss(flops)
    is_crossing = (gaps[:-1] > 0) != (gaps[1:] > 0)
    with np.errstate(invalid="ignore", divide="ignore"):  # of equal laws: 0 / 0
        places = logs[:-1] + (logs[1] - logs[0]) * gaps[:-1] / (gaps[:-1] - gaps[1:])
    crossing = np.where(is_crossing, places, math.inf).min(axis=0)
    return np.exp(np.where(np.isfinite(crossing), crossing, math.nan))[()]
