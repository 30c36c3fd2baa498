"""Better, or luck? Verdicts on paired losses, valid however often one looks.

Differences are losses of one configuration minus those of another on the same seeds: below 0 is
better. Nothing here knows of a run.
"""

import math
from statistics import mean, stdev

SHARE = 0.05  # of comparisons without a difference that may be called better or worse
PRIOR = 4.0  # variance of the standardized difference that is expected


def interval(differences: list[float], comparisons: int = 1) -> tuple[float, float]:
    """The 95% interval of the mean difference, which holds over all looks together. comparisons:
    how many are made in all (Bonferroni).

    It has the means m for which E, the evidence against "the mean is m", is below comparisons /
    0.05. E is a Bayes factor of the t statistic, whose unknown deviation has the right Haar measure
    as its prior, and whose difference in deviations is N(0, PRIOR) (Wang & Ramdas 2023,
    "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance"). With
    v = n - 1 and k = 1 + n * PRIOR:  E = k ** -1/2 * ((1 + t*t/v) / (1 + t*t/(v*k))) ** (n/2)."""
    n = len(differences)
    k = 1 + n * PRIOR
    ratio = (comparisons / SHARE * math.sqrt(k)) ** (2 / n)  # of the two terms, at the bounds
    if n < 2 or ratio >= k:
        return -math.inf, math.inf  # no t is enough
    t = math.sqrt((n - 1) * (ratio - 1) / (1 - ratio / k))
    half = t * stdev(differences) / math.sqrt(n)
    return mean(differences) - half, mean(differences) + half


def verdict_on(differences: list[float], comparisons: int = 1) -> str:
    """better | worse | not shown | identical."""
    low, high = interval(differences, comparisons)
    if not any(differences):
        return "identical"
    if high < 0:
        return "better"
    return "worse" if low > 0 else "not shown"


def least_pairs(comparisons: int = 1) -> int:
    """The smallest number of pairs that can show a difference, however large it is."""
    n = 2
    while interval([0.0] * n, comparisons) == (-math.inf, math.inf):
        n += 1
    return n
