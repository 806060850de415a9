"The comparison of chapter 22: its tables, its scores against other formulas, and what it says of them"
import numpy as np, pandas as pd, pytest
from ncdo.compare import SCORES, TABLES, compare, geometric_mean_recall, halves, leads, macro_f1, rivals, verdicts

for needed in ('imblearn', 'statsmodels'): pytest.importorskip(needed)


@pytest.mark.parametrize('name', TABLES)
def test_halves_share_no_row_and_miss_no_class(name):
    X, y, X_test, y_test = halves(name, 3)
    assert np.isfinite(X).all() and set(y) == set(y_test) and X.shape[1] == X_test.shape[1]
    assert np.unique(y, return_counts=True)[1].min() >= 5


def test_macro_f1_at_another_class_mix_is_that_of_repeated_rows():
    from sklearn.metrics import f1_score
    y, predicted = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 0])
    times = np.array([3, 3, 1, 1])
    assert macro_f1(y, predicted, np.array([6, 2])) == pytest.approx(f1_score(y.repeat(times), predicted.repeat(times), average='macro'))


def test_geometric_mean_is_imbalanced_learns():
    from imblearn.metrics import geometric_mean_score
    y, predicted = np.random.default_rng(0).integers(0, 3, (2, 60))
    assert geometric_mean_recall(y, predicted) == pytest.approx(geometric_mean_score(y, predicted))


def test_one_split_of_a_table():
    results = compare(['breast cancer'], splits=1)
    assert results.score.tolist() == list(SCORES) and set(rivals(True, 'G-mean')) < set(results)
    assert results[list(rivals(True, 'G-mean'))].map(lambda v: 0 <= v <= 1).all(axis=None)


def test_verdicts_say_ahead_level_and_behind():
    rows = [dict(table='t', score=score, split=i, goal=goal + .01 * i, rival=.5 + .011 * i)
        for score, goal in (('better', .9), ('level', .501), ('worse', .1)) for i in range(3)]
    first, second = verdicts(pd.DataFrame(rows))
    assert first == 'rival: ahead in 1 of 3, level in 1, behind in 1' and second == '    behind by 0.401 ± 0.001 on t, worse'
    assert leads(pd.DataFrame(rows))[0].rival['t', 'better'] == pytest.approx(.399)


def test_the_error_of_a_lead_is_corrected_for_halves_that_overlap():
    "Nadeau & Bengio's variance, written out, for halves of one size"
    ahead = np.random.default_rng(0).normal(size=20)
    results = pd.DataFrame(dict(table='t', score='s', split=range(20), goal=ahead, rival=0.))
    corrected = np.sqrt((1 / 20 + 50 / 50) * np.var(ahead, ddof=1))
    assert leads(results)[1].rival['t', 's'] == pytest.approx(corrected) == 21 ** .5 * ahead.std(ddof=1) / 20 ** .5
