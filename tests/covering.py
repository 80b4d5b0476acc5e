"""A covering array: few cases in which every pair of arguments occurs, as combinatorial testing makes them.

cases = cover(dict(form=("quadratic", "chunked"), p=(2, 4), gates=(None, "learned")), allowed=lambda case: ...)
"""

import random
from itertools import combinations, product

CANDIDATES = 40  # random cases: the one that covers most is taken
ATTEMPTS = 4000  # random cases, after which values that were not allowed together are given up


def cover(factors, allowed=lambda case: True, triples=()):
    """Return cases, dicts {factor: value}, so that any two values of two factors occur in one of them.

    factors: {factor: its values}. allowed(case) is False for values that cannot go together. triples: factors; any
    three values of three of them occur in a case, too. The same arguments give the same cases.
    """
    groups = [*combinations(factors, 2), *combinations(triples, 3)]
    missing = dict.fromkeys((names, values) for names in groups for values in product(*map(factors.get, names)))
    cases, generator = [], random.Random(0)
    while missing:
        names, values = next(iter(missing))
        best, best_covered = None, []
        for case in _random_cases(factors, dict(zip(names, values)), allowed, generator):
            covered = [group for group in _groups_of(case, groups) if group in missing]
            if len(covered) > len(best_covered):
                best, best_covered = case, covered
        if best is None:  # no case may have these values
            del missing[names, values]
            continue
        cases.append(best)
        for group in best_covered:
            del missing[group]
    return cases


def _random_cases(factors, fixed, allowed, generator):
    """Return up to CANDIDATES random cases with the values `fixed` that are allowed."""
    cases = []
    for _ in range(ATTEMPTS):
        case = {name: fixed.get(name, generator.choice(values)) for name, values in factors.items()}
        if allowed(case):
            cases.append(case)
        if len(cases) == CANDIDATES:
            break
    return cases


def _groups_of(case, groups):
    return [(names, tuple(case[name] for name in names)) for names in groups]
