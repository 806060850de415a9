"What a sample certifies: bounds against scipy and by enumeration, coverage by simulation, the planner, and what is refused"
import itertools, math, numpy as np, pytest, torch
from scipy.stats import binom, binomtest
from ncdo.gains import InputError
from ncdo.samples import (certified_recall, chance_to_certify, expected_reading, hits_needed, images_needed, jth_worst, lower_bounds, mean_of_worst,
    recall_intervals, recall_needed, tenth_of)

TOO_OFTEN = .065 # 5 % and three standard errors of 2,000 samples


def counts(hits, totals):
    "Confusion matrices in images, (..., m, m), every miss taken for the next class"
    hits, totals = torch.broadcast_tensors(torch.as_tensor(hits), torch.as_tensor(totals))
    C, i = torch.diag_embed(hits), torch.arange(hits.shape[-1])
    C[..., i, (i + 1) % len(i)] += totals - hits
    return C


# one class

@pytest.mark.parametrize('delta', [.001, .05, .5, .9])
@pytest.mark.parametrize('n', [1, 2, 10, 500])
def test_bounds_and_intervals_are_scipys(n, delta):
    for h in {0, 1, n // 2, n - 1, n}:
        one_sided = binomtest(h, n, alternative='greater').proportion_ci(1 - delta, 'exact').low
        assert lower_bounds(h, n, delta).item() == pytest.approx(one_sided, abs=1e-9)
        two_sided = binomtest(h, n).proportion_ci(1 - delta, 'exact')
        assert recall_intervals(h, n, delta).tolist() == pytest.approx(list(two_sided), abs=1e-9)


def test_no_hits_prove_nothing_and_all_hits_not_everything():
    low, high = recall_intervals([0, 50, 0], [50, 50, 0])
    assert low[0] == 0 and high[1] == 1 and low[1] == pytest.approx(.025 ** .02) and high[0] == pytest.approx(1 - .025 ** .02)
    assert low[2].isnan() and high[2].isnan() and lower_bounds(50, 50).item() == pytest.approx(.05 ** .02)


@pytest.mark.parametrize('n', [1, 7, 40])
def test_a_bound_is_too_high_in_no_more_than_delta_of_all_samples(n):
    bounds, chances = lower_bounds(torch.arange(n + 1), n).numpy(), np.linspace(.001, .999, 400)[:, None]
    wrong = (binom.pmf(np.arange(n + 1), n, chances) * (bounds > chances)).sum(1)
    assert wrong.max() <= .05 + 1e-9


@pytest.mark.parametrize('form', [list, tuple, np.array, torch.tensor, lambda v: torch.tensor(v, dtype=torch.float32)])
def test_any_container_of_hits(form): assert lower_bounds(form([8, 3]), form([10, 10])).tolist() == lower_bounds([8, 3], 10).tolist()


# several classes

def test_the_worst_by_enumeration():
    "Three classes of two images: the sum over all 27 outcomes"
    for j in (1, 2, 3):
        expected = np.zeros(3)
        for hits in itertools.product(range(3), repeat=3): expected[sorted(hits)[j - 1]] += np.prod(binom.pmf(hits, 2, .7))
        assert jth_worst(j, 3, 2, .7).numpy() == pytest.approx(expected)
    assert jth_worst(1, 1, 9, .3).numpy() == pytest.approx(binom.pmf(np.arange(10), 9, .3))


@pytest.mark.parametrize('m,n,r,mean,error', [(10, 500, .79, .762, .011), (100, 50, .45, .277, .029)])
def test_equally_good_classes_read_as_a_bad_one(m, n, r, mean, error):
    "Both exactly and by simulation"
    p, x = jth_worst(1, m, n, r).numpy(), np.arange(n + 1) / n
    drawn = np.random.default_rng(0).binomial(n, r, (20_000, m)).min(1) / n
    for found in (((p * x).sum(), math.sqrt((p * x ** 2).sum() - (p * x).sum() ** 2)), (drawn.mean(), drawn.std())):
        assert found == pytest.approx((mean, error), abs=6e-4)
    assert expected_reading(m, n, r) == pytest.approx((p * x).sum()) and expected_reading(m, n, r, m) == pytest.approx(r)


def test_the_mean_of_the_worst():
    r = torch.tensor([[.9, .2, math.nan, .4], [math.nan] * 4]).double()
    assert mean_of_worst(r, 2).tolist() == pytest.approx([.3, math.nan], nan_ok=True) and mean_of_worst(r, 9)[0] == pytest.approx(.5)
    assert [tenth_of(m) for m in (2, 10, 29, 30, 100)] == [2, 2, 2, 3, 10]


CASES = dict( # chkstyle: ignore-node
    one_bad_class=([.6, .9, .95, .95], 40, dict(), .6), equal_classes=([.7] * 10, 40, dict(), .7), one_class=([.7, .1], [40, 0], dict(), .7),
    uneven_sizes=([.6, .7, .9], [10, 40, 300], dict(), .6), absent_class=([.6, .7, .9], [40, 40, 0], dict(), .6),
    worst_two=([.1, .9] + [.95] * 8, 30, dict(k=2), .5), worst_two_uneven=([.5, .5] + [.95] * 8, [10, 100] * 5, dict(k=2), .5),
    all_classes=([.2, .5, .8], 30, dict(k=3), .5),
    groups=([.2, .8, .9, .9], 30, dict(groups=[0, 0, 1, 1]), .5), groups_uneven=([.2, .8, .9, .9], [20, 80, 10, 50], dict(groups=[0, 0, 1, 1]), .5),
    extremes=([0., 1.] * 4, 20, dict(k=8), .5), nearly_never=([.002] * 5, 20, dict(k=5), .002))


@pytest.mark.parametrize('name', CASES)
def test_a_certificate_is_too_high_in_no_more_than_delta_of_the_samples(name):
    recalls, totals, how, truth = CASES[name]
    totals = np.broadcast_to(totals, len(recalls))
    hits = np.random.default_rng(0).binomial(totals, recalls, (2000, len(recalls)))
    found = np.array([certified_recall(C, **how) for C in counts(hits, totals.copy())])
    assert (found > truth).mean() <= TOO_OFTEN and (found <= 1).all() and (found >= 0).all()


def test_one_bad_class_uses_up_the_promise():
    "So that no larger bound holds"
    hits = np.random.default_rng(1).binomial(500, [.79, .95, .95], (2000, 3))
    assert .035 < np.mean([certified_recall(C) > .79 for C in counts(hits, 500)]) <= TOO_OFTEN


def test_the_certificate_is_the_smallest_bound():
    C = counts([9, 60, 0], torch.tensor([10, 100, 0]))
    assert certified_recall(C) == pytest.approx(min(lower_bounds(9, 10), lower_bounds(60, 100)).item())
    assert certified_recall(counts([8, 0], torch.tensor([10, 0]))) == pytest.approx(lower_bounds(8, 10).item())
    assert certified_recall(counts([8, 4, 9], 10), 2) == pytest.approx(lower_bounds(12, 20).item())
    assert certified_recall(counts([8, 4, 9], 10), groups=['b', 'a', 'b']) == pytest.approx(lower_bounds(4, 10).item())
    uneven = counts([150, 150, 9, 9], torch.tensor([300, 300, 10, 10])) # The worst two are not the smallest
    assert certified_recall(uneven, 2) == pytest.approx(.5 - math.sqrt(math.log(20) / 2 * (1 / 10 + 1 / 10)) / 2)
    assert math.isnan(certified_recall(torch.zeros(3, 3))) and math.isnan(certified_recall(torch.zeros(3, 3), 2))


# the planner

@pytest.mark.parametrize('delta,needed', [(.05, 392), (.005, 400)])
def test_hits_that_certify_three_quarters(delta, needed):
    "Of 500; the second is the bound for ten classes at once"
    assert hits_needed(.75, 500, delta) == needed and lower_bounds(needed, 500, delta) >= .75 > lower_bounds(needed - 1, 500, delta)


def test_needed_hits_are_those_of_the_definition():
    for n, target, delta in itertools.product((5, 17, 60), (.1, .5, .75), (.05, .3)):
        fits = [k for k in range(n + 1) if binom.sf(k - 1, n, target) <= delta]
        if fits: assert hits_needed(target, n, delta) == fits[0]
        else:
            with pytest.raises(InputError, match=f'give at least {next(i for i in range(1, 999) if target ** i <= delta)} of each class'): hits_needed(target, n, delta)


def test_chances_by_simulation():
    hits = np.random.default_rng(2).binomial(200, .85, (20_000, 10))
    certified = (lower_bounds(hits, 200).amin(1) >= .75).double().mean().item()
    assert chance_to_certify(.75, 200, 10, .85) == pytest.approx(certified, abs=.01)
    r = recall_needed(.75, 200, 10)
    assert chance_to_certify(.75, 200, 10, r) == pytest.approx(.9) and r > .85


@pytest.mark.parametrize('classes', [1, 10, 100])
def test_needed_images_are_the_first_that_do(classes):
    n = images_needed(.75, classes, .85)
    assert chance_to_certify(.75, n, classes, .85) >= .9 > max(chance_to_certify(.75, i, classes, .85) for i in range(1, n))
    read = images_needed(.75, classes, .85, chance=None)
    assert lower_bounds(math.floor(.85 * read), read) >= .75 and read == images_needed(.75, 1, .85, chance=None) < n


def test_a_certain_recall_needs_what_all_hits_prove(): assert images_needed(.75, 5, 1.) == 11 == images_needed(.75, 5, 1., chance=None)


@pytest.mark.parametrize('call,match', [ # chkstyle: ignore-node
    (lambda: lower_bounds(1, 2, 0), 'delta is 0; it must lie between 0 and 1'), (lambda: recall_intervals(1, 2, 1.), 'delta is 1'),
    (lambda: certified_recall([[1]], delta=-.1), 'delta is -0.1'), (lambda: hits_needed(.5, 10, 2), 'delta is 2; it must lie between 1e-15 and 1'),
    (lambda: images_needed(.5, 2, .9, delta=0), 'delta is 0'), (lambda: lower_bounds(1, 2, '.05'), "delta is '.05'"), (lambda: lower_bounds(1, 2, math.nan), 'delta is nan'),
    (lambda: lower_bounds([3, 5], [4, 4]), '5 hits of 4 images'), (lambda: lower_bounds(-1, 4), '-1 hits'), (lambda: lower_bounds(.5, 4), '0.5 hits'),
    (lambda: lower_bounds(math.nan, 4), 'nan hits'), (lambda: lower_bounds('many', 4), 'hits is a str'),
    (lambda: certified_recall(torch.eye(2) / 2), 'counts holds 0.5; give whole numbers of images, not shares'), (lambda: certified_recall([[1, 2]]), r'counts has shape \(1, 2\)'),
    (lambda: certified_recall([[math.inf]]), 'counts holds inf'), (lambda: certified_recall([[-1]]), '-1 hits'), (lambda: certified_recall([[1]], 0), 'k is 0; it must be a whole number from 1 to 1'),
    (lambda: certified_recall([[1]], groups=[0, 1]), 'groups has 2 entries'), (lambda: hits_needed(1., 10), 'target is 1.0; it must lie between 0 and 1'), (lambda: hits_needed(.5, 0), 'images is 0'),
    (lambda: hits_needed(.5, 4), '4 images cannot certify a recall of 0.5; give at least 5 of each class'), (lambda: images_needed(.8, 10, .8), 'a recall of 0.8 is not above the target 0.8'),
    (lambda: images_needed(.8, 10, 1.2), 'true_recall is 1.2'), (lambda: images_needed(.8, 10, .8001), 'more than a million images'),
    (lambda: hits_needed(.5, 100, 1e-17), 'delta is 1e-17; it must lie between 1e-15 and 1'), (lambda: hits_needed(1 - 1e-13, 500), 'a recall of 0.9999999999999; ask for less'),
    (lambda: recall_intervals([3], [math.inf]), '3 hits of inf images'), (lambda: recall_intervals([3, 1], [3, 4, 5]), r'hits has shape \(2,\), totals \(3,\); they must agree'),
    (lambda: certified_recall(torch.eye(3), 7), 'k is 7; it must be a whole number from 1 to 3'), (lambda: certified_recall(torch.eye(2), 2, [0, 1]), 'k is 2, but groups are given'),
    (lambda: certified_recall(torch.zeros(0, 0)), r'counts has shape \(0, 0\)'), (lambda: expected_reading(3, 10, .5, 10 ** 30), 'k is 10+; it must be a whole number from 1 to 3'),
    (lambda: expected_reading(3, 10, .5, 0), 'k is 0'), (lambda: jth_worst(4, 3, 10, .5), 'j is 4; it must be a whole number from 1 to 3'), (lambda: mean_of_worst(torch.ones(3), 1.5), 'k is 1.5')])
def test_refused_in_one_line(call, match):
    with pytest.raises(InputError, match=match) as error: call()
    assert '\n' not in str(error.value)


USES = { # chkstyle: ignore-node
    'jth_worst': (jth_worst, dict(j=1, classes=3, images=40, true_recall=.75)), 'expected_reading': (expected_reading, dict(classes=3, images=40, true_recall=.75, k=2)),
    'lower_bounds': (lower_bounds, dict(hits=3, totals=4, delta=.25)), 'recall_intervals': (recall_intervals, dict(hits=3, totals=4, delta=.25)),
    'certified_recall': (certified_recall, dict(counts=[[3, 1], [0, 4]], k=2, delta=.25)), 'hits_needed': (hits_needed, dict(target=.5, images=40, delta=.25)),
    'chance_to_certify': (chance_to_certify, dict(target=.5, images=40, classes=3, true_recall=.75, delta=.25)),
    'recall_needed': (recall_needed, dict(target=.5, images=40, classes=3, delta=.25, chance=.5)),
    'images_needed': (images_needed, dict(target=.5, classes=3, true_recall=.75, delta=.25, chance=.5)), 'mean_of_worst': (mean_of_worst, dict(recalls=[.5, .25, 1.], k=2))}
NUMBERS = [(name, argument) for name, (_, given) in USES.items() for argument, value in given.items() if not isinstance(value, list)]


@pytest.mark.parametrize('name,argument', NUMBERS)
def test_numbers_of_any_library_mean_the_same(name, argument):
    use, given = USES[name]
    value = given[argument]
    same = [np.float32(value), torch.tensor(value), np.array(value), *[f(value) for f in (float, np.uint8, np.int64) if isinstance(value, int)]]
    for other in same: assert np.array_equal(use(**given | {argument: other}), use(**given)), other


@pytest.mark.parametrize('name,argument', NUMBERS)
@pytest.mark.parametrize('value', [-1, 2 ** 70, math.nan, math.inf, '1', None, True, [1, 2, 3]], ids=str)
def test_what_is_no_such_number_is_refused_by_its_name(name, argument, value):
    use, given = USES[name]
    if argument in ('hits', 'totals') or argument == 'chance' and value is None: return
    if name == 'mean_of_worst' and value == 2 ** 70: value = 0
    with pytest.raises(InputError, match=f'^{argument} is ') as error: use(**given | {argument: value})
    assert '\n' not in str(error.value)


def test_a_tiny_delta_is_counted_out():
    "Against sums of exact fractions, as far down as it may be"
    from fractions import Fraction
    for n, target, delta in itertools.product((60, 100), (.25, .5), (1e-9, 1e-14)):
        t, left, k = Fraction(target), Fraction(delta), n + 1
        while left >= (term := math.comb(n, k - 1) * t ** (k - 1) * (1 - t) ** (n - k + 1)): left, k = left - term, k - 1
        assert hits_needed(target, n, delta) == k
