"""Better, or luck? Verdicts on paired losses, valid however often one looks.

Differences are losses of one configuration minus those of another on the same seeds: below 0 is
better. Nothing here knows of a run.
"""

import math
from statistics import mean, stdev

SHARE = 0.05  # of comparisons without a difference that may be called better or worse
PRIOR = 4.0  # variance of the standardized difference that is expected


def interval(differences: list[float]) -> tuple[float, float]:
    """The 95% interval of the mean difference, which holds over all looks together.

    It has the means m for which E, the evidence against "the mean is m", is below 1 / 0.05. E
    is a Bayes factor of the t statistic, whose unknown deviation has the right Haar measure as its
    prior, and whose difference in deviations is N(0, PRIOR) (Wang & Ramdas 2023,
    "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance"). With
    v = n - 1 and k = 1 + n * PRIOR:  E = k ** -1/2 * ((1 + t*t/v) / (1 + t*t/(v*k))) ** (n/2)."""
    n = len(differences)
    k = 1 + n * PRIOR
    ratio = (math.sqrt(k) / SHARE) ** (2 / n)  # of the two terms, at the bounds
    if n < 2 or ratio >= k:
        return -math.inf, math.inf  # no t is enough
    t = math.sqrt((n - 1) * (ratio - 1) / (1 - ratio / k))
    half = t * stdev(differences) / math.sqrt(n)
    middle = mean(differences)
    return middle - half, middle + half


def verdict_on(differences: list[float]) -> str:
    """better | worse | not shown | identical."""
    low, high = interval(differences)
    if not any(differences):
        return "identical"
    if high < 0:
        return "better"
    return "worse" if low > 0 else "not shown"
