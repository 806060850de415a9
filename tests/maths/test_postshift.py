"Algorithm 3 against the linear program, loops and scikit-learn's own checks; traps 42-44; `ncdo postshift`"
import json, os, joblib, pickle, pytest, warnings, numpy as np, torch
from hypothesis import HealthCheck, given, settings, strategies as st
from scipy.special import softmax
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks
from ncdo.data import toy_distribution
from ncdo.gains import (InputError, Problem, accuracy_goal, average_recall_goal, balanced_coverage_constraint, bayes_rule, confusion_matrix,
    coverage_constraint, head_tail_groups, precision_constraint, recall_constraint, worst_case_recall)
from ncdo.postshift import PostShiftClassifier, post_shift, sample_confusion, shifted_scores
from ncdo.reductions import SaddlePoint, StochasticClassifier
from ncdo.theory import expected_confusion, solve_linear_program

PROBLEMS = {'worst-case recall': worst_case_recall, 'recall': lambda p: recall_constraint(p, .6), 'precision': lambda p: precision_constraint(p, .6),
    'coverage': coverage_constraint, 'balanced coverage': balanced_coverage_constraint}
STEPS = dict(zip(PROBLEMS, (1., 1., 1., .1, .1)))
GROUPED = {'head-tail recall': lambda p: worst_case_recall(p, head_tail_groups(p, .25)), 'head-tail coverage': lambda p: balanced_coverage_constraint(p, groups=head_tail_groups(p, .25))}
MIXED = {'other mix, coverage': lambda p: coverage_constraint(p, target_priors=[.25] * 4), 'other mix, precision': lambda p: precision_constraint(p, .6, target_priors=[.25] * 4)}
EVERY = PROBLEMS | GROUPED | MIXED | {'accuracy': accuracy_goal, 'average recall': average_recall_goal}

@pytest.fixture(scope='module')
def toy(): return toy_distribution(3000)

def as_custom(problem):
    "The same problem as a plain `Problem(A, B, b)`"
    A = problem.gain(torch.zeros(problem.k)) / problem.ratio[:, None]
    B = torch.zeros(problem.k, problem.m, problem.m, dtype=torch.float64)
    for i, e in enumerate(torch.eye(problem.k, dtype=torch.float64)): B[i] = problem.gain(e) / problem.ratio[:, None] - A
    return Problem(A, B, problem.b, problem.priors, problem.target_priors, problem.domain, problem.names)

def rank(problem, C, tolerance=1e-3):
    "Feasible before infeasible, then objective or violation"
    objective, violations = problem.evaluate(C)
    worst = violations.max().item() if problem.domain == 'nonnegative' and problem.k else -1.
    return (1, objective.item()) if worst <= tolerance else (0, -worst)

def random_sample(seed, m, n):
    "Probabilities, every other draw with many ties, and labels that each class is among"
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(n, m, generator=g, dtype=torch.float64).log().neg() ** (1 + seed % 3)
    p = p / p.sum(1, keepdim=True)
    if seed % 2: p = (8 * p).round() + 1e-9
    p = (p / p.sum(1, keepdim=True)).to(torch.float32 if seed % 4 > 1 else torch.float64)
    y = torch.multinomial(p, 1, generator=g)[:, 0]
    y[:m] = torch.arange(m)
    return p, y


@pytest.mark.parametrize('name', PROBLEMS)
def test_with_known_probabilities_the_program_is_reached(toy, name):
    "3,000 points, C the expectation under p; omega is 1 for recall and precision, .1 for the coverage goals"
    p = toy[2]
    problem = PROBLEMS[name](p.mean(0))
    gain, game = post_shift(problem, p, p, step_size=STEPS[name], iterations=1000)
    objective, violations = problem.evaluate(expected_confusion(p, bayes_rule(p, gain)))
    assert abs(objective - solve_linear_program(problem, p)) < 1e-3 and game.feasible
    assert problem.domain == 'simplex' or violations.max() <= 1e-3


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6), st.sampled_from(list(PROBLEMS)), st.integers(2, 5), st.integers(20, 80), st.sampled_from([.1, 1, 10]))
def test_never_below_no_shift_on_the_fitting_sample(seed, name, m, n, step):
    shrinkage = (0, .5, 1)[seed % 3]
    p, y = random_sample(seed, m, n)
    problem = PROBLEMS[name](torch.bincount(y, minlength=m) / n)
    gain, _ = post_shift(problem, p, y, step_size=step, iterations=25, shrinkage=shrinkage)
    before, after = [rank(problem, confusion_matrix(y, h, m)) for h in (p.argmax(1), bayes_rule(p, gain))]
    assert after >= before


@pytest.mark.parametrize('name', EVERY)
def test_structured_scores_are_the_gain_times_the_probabilities(toy, name):
    p = toy[2][:200]
    for problem in (EVERY[name](toy[2].mean(0)), as_custom(EVERY[name](toy[2].mean(0)))):
        multipliers = torch.rand(problem.k, dtype=torch.float64)
        scores = shifted_scores(problem, p.numpy())(multipliers)
        assert np.allclose(scores, (p @ problem.gain(multipliers)).numpy(), rtol=1e-12, atol=1e-12)
        assert shifted_scores(problem, p.float().numpy())(multipliers).dtype == np.float32


def test_algorithm_3_as_printed(toy):
    "A loop over examples and classes, Appendix E.1 word for word, but for 'no shift' as h^0 and among the candidates"
    m, omega, T = 4, 1., 40
    p, y = toy[2][:300].tolist(), toy[1][:300].tolist()
    pi = [.6, .25, .1, .05]
    count = [y.count(i) for i in range(m)]
    lam, h, trail, values = [1 / m] * m, [max(range(m), key=lambda i: row[i]) for row in p], [], []
    for _ in range(T):
        recalls = [sum(1 for a, b in zip(y, h) if a == b == i) / count[i] for i in range(m)]
        trail.append(lam)
        values.append(min(recalls))
        lam = [lam[i] * np.exp(-omega * recalls[i]) for i in range(m)]
        lam = [v / sum(lam) for v in lam]
        h = [max(range(m), key=lambda i: lam[i] / pi[i] * row[i]) for row in p]
    gain, game = post_shift(worst_case_recall(pi), torch.tensor(p), y, step_size=omega, iterations=T - 1)
    assert torch.allclose(torch.stack([g['multipliers'] for g in game.history]), torch.tensor(trail, dtype=torch.float64), atol=1e-9)
    assert np.allclose([g['objective'] for g in game.history], values) and game.best == int(np.argmax(values)) > 0
    best = trail[game.best]
    assert bayes_rule(torch.tensor(p), gain).tolist() == [max(range(m), key=lambda i: best[i] / pi[i] * row[i]) for row in p]


@pytest.mark.parametrize('name', PROBLEMS)
def test_a_plain_problem_gives_what_the_structured_one_does(toy, name):
    _, y, p = [v[:1000] for v in toy]
    problem = PROBLEMS[name](toy[2].mean(0))
    (a, x), (b, z) = [post_shift(q, p, y, step_size=STEPS[name], iterations=100) for q in (problem, as_custom(problem))]
    assert x.best == z.best and torch.allclose(a, b) and torch.allclose(x.multipliers, z.multipliers)


def test_a_cost_matrix_with_nothing_on_the_diagonal(toy):
    "Costs of mistakes as negative gains, and a cap on how often class 0 is predicted; also shrunk"
    _, y, p = toy
    cost = torch.tensor([[0., 1, 1, 1], [2, 0, 1, 1], [5, 1, 0, 1], [9, 1, 1, 0]])
    cap = torch.zeros(1, 4, 4)
    cap[0, :, 0] = -1
    problem = Problem(-cost, cap, [-.3], p.mean(0))
    for shrinkage in (0., .5):
        gain, game = post_shift(problem, p, y, iterations=300, shrinkage=shrinkage)
        C = confusion_matrix(y, bayes_rule(p, gain), 4)
        assert gain.isfinite().all() and rank(problem, C) >= rank(problem, confusion_matrix(y, p.argmax(1), 4))
    assert game.feasible


@pytest.mark.parametrize('name', PROBLEMS)
def test_weights_are_repetitions(name):
    p, y = random_sample(4, 4, 60)
    times = torch.arange(60) % 4 + (torch.arange(60) < 4)
    problem = PROBLEMS[name]([.4, .3, .2, .1])
    repeat = lambda v: v.repeat_interleave(times, 0)
    weighted, repeated = post_shift(problem, p, y, times, iterations=50), post_shift(problem, repeat(p), repeat(y), iterations=50)
    assert torch.allclose(weighted[1].multipliers, repeated[1].multipliers)
    a, b = [rank(problem, confusion_matrix(repeat(y), bayes_rule(repeat(p), gain), 4)) for gain, _ in (weighted, repeated)]
    assert a == pytest.approx(b)


@pytest.mark.parametrize('name', PROBLEMS)
def test_one_hot_targets_are_labels(name):
    p, y = random_sample(8, 4, 60)
    problem, hot = PROBLEMS[name]([.4, .3, .2, .1]), torch.nn.functional.one_hot(y, 4)
    (a, x), (b, z) = post_shift(problem, p, y, iterations=50), post_shift(problem, p, hot, iterations=50)
    assert torch.allclose(a, b) and x.best == z.best


def test_soft_targets_are_an_expectation_over_labels():
    p, y = random_sample(12, 3, 50)
    w, h = torch.full((50,), .02, dtype=torch.float64), p.argmax(1)
    drawn = [torch.multinomial(p, 1, generator=torch.Generator().manual_seed(s))[:, 0] for s in range(4000)]
    expected = sum(confusion_matrix(t, h, 3) for t in drawn) / 4000
    assert torch.allclose(sample_confusion(p, h, w, 3), expected, atol=.005) and torch.allclose(sample_confusion(y, h, w, 3), confusion_matrix(y, h, 3))


BAD = [ # chkstyle: ignore-node
    (dict(probabilities=torch.full((6, 4), .25)), r'shape \(6, 4\); this problem has 3 classes'),
    (dict(probabilities=torch.ones(6)), r'shape \(6,\)'),
    (dict(probabilities=torch.zeros(0, 3), target=torch.zeros(0).long()), r'shape \(0, 3\)'),
    (dict(probabilities=torch.randn(6, 3)), 'apply a softmax'),
    (dict(probabilities=torch.full((6, 3), 1.)), 'apply a softmax'),
    (dict(probabilities=torch.full((6, 3), torch.nan)), 'apply a softmax'),
    (dict(target=torch.tensor([0, 1, 2])), '6 rows of probabilities for 3 targets'),
    (dict(target=torch.tensor([0, 1, 2, 0, 1, 7])), r'target holds \[7\]'),
    (dict(target=torch.tensor([0, 1, 2, 0, 1, -1])), r'target holds \[-1\]'),
    (dict(target=torch.rand(6)), 'target holds torch.float32 values'),
    (dict(target=torch.rand(6, 4)), 'target rows have shape'),
    (dict(target=torch.rand(6, 3) + 1), 'target rows must be non-negative'),
    (dict(sample_weight=torch.ones(5)), 'sample_weight must be 6'),
    (dict(sample_weight=-torch.ones(6)), 'sample_weight must be 6'),
    (dict(sample_weight=torch.zeros(6)), 'not all of them 0'),
    (dict(step_size=0.), 'step_size is 0'),
    (dict(iterations=0), 'iterations is 0; it must be a whole number, at least 1'),
    (dict(iterations=10.5), 'iterations is 10.5; it must be a whole number'),
    (dict(iterations='x'), "iterations is 'x'"),
    (dict(step_size='a'), "step_size is 'a'; it must be positive"),
    (dict(step_size=-1.), 'step_size is -1.0; it must be positive'),
    (dict(shrinkage='x'), "shrinkage is 'x'; it must lie between 0 and 1"),
    (dict(floor=2.), 'floor is 2.0; it must lie between 0 and 1'),
    (dict(max_multiplier=0), 'max_multiplier is 0; it must be positive'),
    (dict(tolerance=-1), 'tolerance is -1; it must be 0 or more'),
    (dict(sample_weight='abc'), 'sample_weight is a str'),
    (dict(target=['a'] * 6), 'target is a list that does not hold numbers'),
    (dict(probabilities=[[.5, .5, 0], [1., 0]]), 'equally many in each row'),
    (dict(probabilities=torch.tensor([[torch.inf, 0, 0]] * 6)), 'hold nan or inf in row 0'),
    (dict(shrinkage=2.), r'shrinkage is 2.0; it must lie between 0 and 1'),
    (dict(shrinkage=-.1), 'shrinkage is -0.1')]

@pytest.mark.parametrize('changes,message', BAD, ids=[m for _, m in BAD])
def test_mistakes_are_told_in_one_line(changes, message):
    given = dict(probabilities=torch.full((6, 3), 1 / 3), target=torch.tensor([0, 1, 2, 0, 1, 2])) | changes
    with pytest.raises(InputError, match=message) as e: post_shift(worst_case_recall([.5, .3, .2]), **given)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('changes,message', [
    (dict(classes=['a', 'b']), 'labels that are not among classes'),
    (dict(classes=['a', 'b', 'c', 'd']), '3 columns of probabilities for 4 classes'),
    (dict(priors=[.5, .5]), 'this problem has 2 classes'),
    (dict(shrinkage=3), 'shrinkage is 3'),
    (dict(problem='worst-case-recall'), "problem is 'worst-case-recall'; give a function of the priors"),
    (dict(problem=None), 'problem is None; give a function of the priors'),
    (dict(problem=recall_constraint), 'cannot be called with the priors'),
    (dict(problem=lambda p: 1), 'problem returned a int; it must return a Problem'),
    (dict(problem=lambda p: recall_constraint(p, None)), 'tau is None; it must lie between 0 and 1'),
    (dict(problem=lambda p: coverage_constraint(p, 'x')), "fraction is 'x'; it must lie between 0 and 1"),
    (dict(iterations=10.5), 'iterations is 10.5'), (dict(step_size='a'), "step_size is 'a'"),
    (dict(priors=dict(a=.5, b=.3, c=.2)), 'priors is a dict that does not hold numbers')], ids=lambda v: v if isinstance(v, str) else '')
def test_mistakes_of_the_classifier(changes, message):
    with pytest.raises(InputError, match=message): PostShiftClassifier(**changes).fit(np.full((6, 3), 1 / 3), list('abcabc'))


def test_predict_refuses_scores(toy):
    _, y, p = toy
    post = PostShiftClassifier(iterations=5, cv=None).fit(p, y)
    with pytest.raises(InputError, match='apply a softmax'): post.predict(p.log())


@pytest.mark.parametrize('convert', [np.asarray, torch.Tensor.tolist, lambda p: p.requires_grad_(), lambda p: p.bfloat16()], ids=['numpy', 'list', 'with gradient', 'bfloat16'])
def test_arrays_lists_and_tensors(toy, convert):
    problem = worst_case_recall(toy[2].mean(0))
    gain, _ = post_shift(problem, convert(toy[2][:500].clone()), toy[1][:500].numpy(), iterations=30)
    assert torch.allclose(gain, post_shift(problem, toy[2][:500], toy[1][:500], iterations=30)[0], rtol=.15)


def test_whole_numbers_are_probabilities_too():
    "One-hot predictions as integers: a gain is not truncated"
    hot = torch.eye(3, dtype=torch.long)[[0, 0, 1, 1, 2, 2]]
    a, b = [post_shift(precision_constraint([.4, .3, .3], .6), p, torch.tensor([0, 1, 1, 2, 2, 2]), iterations=20)[1] for p in (hot, hot.double())]
    assert torch.equal(a.multipliers, b.multipliers) and a.best == b.best


def test_classes_that_the_sample_does_not_show(toy):
    "Columns for 4 classes, labels of 3: priors= names the missing one, which keeps its share of the multipliers"
    _, y, p = toy
    seen, names = y != 2, np.array(['d', 'a', 'c', 'b'])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        post = PostShiftClassifier(priors=p.mean(0), classes=names, iterations=50).fit(p[seen], names[y[seen]])
    multipliers = torch.stack([h['multipliers'] for h in post.reduction_.history])
    assert torch.allclose(multipliers[:, 2], p.mean(0)[2].double()) and np.isnan(post.violations_[2])
    assert np.isfinite([post.objective_, post.cross_fitted_objective_]).all()
    assert post.objective_ > post.base_objective_ and set(post.predict(p)) <= set(names)
    assert (post.predict(p) == names[bayes_rule(p, torch.tensor(post.gain_))]).all()
    with pytest.raises(InputError, match='class 2 is 0'): PostShiftClassifier(classes=names).fit(p[seen], names[y[seen]])


class Projected(PostShiftClassifier):
    "Takes any features: a fixed random projection and a softmax make probabilities of them, since most checks feed normal deviates"
    def _columns(self, X): return softmax(X @ np.random.default_rng(0).normal(size=(X.shape[1], len(self.classes_))), axis=1)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True # a random projection learns nothing of the features
        return tags

@parametrize_with_checks([Projected(iterations=20)], expected_failed_checks=lambda e: {})
def test_scikit_learn(estimator, check): check(estimator)


DIRECT = { # chkstyle: ignore-node
    'check_all_zero_sample_weights_error', 'check_classifiers_one_label', 'check_classifiers_one_label_sample_weights', 'check_classifiers_regression_target',
    'check_complex_data', 'check_do_not_raise_errors_in_init_or_set_params', 'check_estimator_cloneable', 'check_estimator_repr', 'check_estimator_sparse_array',
    'check_estimator_sparse_matrix', 'check_estimator_sparse_tag', 'check_estimator_tags_renamed', 'check_estimators_empty_data_messages',
    'check_estimators_unfitted', 'check_fit1d', 'check_fit2d_1sample', 'check_get_params_invariance', 'check_mixin_order', 'check_no_attributes_set_in_init',
    'check_parameters_default_constructible', 'check_requires_y_none', 'check_set_params', 'check_supervised_y_no_nan', 'check_valid_tag_types'}

@pytest.mark.filterwarnings('ignore')
def test_scikit_learn_directly():
    "What applies to the class itself; each other check feeds rows that are no distributions, and is refused with that reason"
    results = check_estimator(PostShiftClassifier(iterations=5), on_fail=None, on_skip=None)
    passed, failed = [[r for r in results if r['status'] == status] for status in ('passed', 'failed')]
    assert DIRECT <= {r['check_name'] for r in passed}
    told = [' '.join(str(e) for e in (r['exception'], r['exception'].__cause__, r['exception'].__context__)) for r in failed]
    assert all('columns of probabilities' in t or 'apply a softmax' in t for t in told), told


@pytest.mark.parametrize('name', PROBLEMS)
def test_pipeline_clone_and_pickle(toy, tmp_path, name):
    x, y, p = toy
    labels = np.array(['north', 'east', 'south', 'west'])[y[:1000]]
    post = PostShiftClassifier(PROBLEMS[name](p.mean(0)), classes=['north', 'east', 'south', 'west'], iterations=30, step_size=STEPS[name])
    pipeline = make_pipeline(FunctionTransformer(np.exp), post)
    log = p.log().numpy()
    fitted = clone(pipeline).fit(log[:1000], labels)
    predicted = fitted.predict(log)
    assert set(predicted) <= set(labels) and not hasattr(pipeline[-1], 'gain_')
    joblib.dump(fitted, tmp_path / 'model.joblib')
    for again in (pickle.loads(pickle.dumps(fitted)), joblib.load(tmp_path / 'model.joblib'), clone(fitted).fit(log[:1000], labels)):
        assert (again.predict(log) == predicted).all() and again[-1].cross_fitted_objective_ == fitted[-1].cross_fitted_objective_


def test_parameters_can_be_searched(toy):
    from sklearn.model_selection import GridSearchCV
    search = GridSearchCV(PostShiftClassifier(cv=None, iterations=20), dict(shrinkage=[0., .5, 1.]), scoring='balanced_accuracy', cv=3).fit(toy[2].numpy(), toy[1].numpy())
    assert search.best_params_['shrinkage'] < 1


def test_trap_42_the_cross_fitted_value_tells_of_overfitting():
    "100 classes on 5,000 points: what the fit gains is partly chance; each fifth on its own sees less of it, and fresh points say the same"
    rng = np.random.default_rng(0)
    y = np.arange(10000) % 100
    p = softmax(2.5 * np.eye(100)[y] + rng.normal(size=(10000, 100)), axis=1)
    post = PostShiftClassifier(worst_case_recall, iterations=60).fit(p[:5000], y[:5000])
    fresh = worst_case_recall([.01] * 100).objective(confusion_matrix(y[5000:], post.predict(p[5000:]), 100)).item()
    assert post.base_objective_ < post.objective_ and max(post.cross_fitted_objective_, fresh) < post.objective_ - .05


def test_trap_42_each_example_is_predicted_by_a_gain_that_has_not_seen_it(toy):
    _, y, p = [v[:300] for v in toy]
    splits = [(np.arange(100, 300), np.arange(100)), (np.r_[0:100, 200:300], np.arange(100, 200)), (np.arange(200), np.arange(200, 300))]
    post = PostShiftClassifier(priors=[.6, .25, .1, .05], iterations=20, cv=splits).fit(p, y)
    problem, predicted = worst_case_recall([.6, .25, .1, .05]), torch.zeros(300).long()
    for rest, fold in splits: predicted[fold] = bayes_rule(p[fold], post_shift(problem, p[rest], y[rest], iterations=20)[0])
    assert post.cross_fitted_objective_ == problem.objective(confusion_matrix(y, predicted, 4)).item()


def test_trap_43_the_classifier_is_deterministic(toy):
    _, y, p = [v[:600] for v in toy]
    a, b = [PostShiftClassifier(iterations=30).fit(p, y) for _ in 'ab']
    assert (a.gain_ == b.gain_).all() and a.cross_fitted_objective_ == b.cross_fitted_objective_ and (a.predict(p) == a.predict(p)).all()
    assert (a.predict(p) == np.concatenate([a.predict(p[i:i + 1]) for i in range(600)])).all()


def test_trap_43_a_mixture_predicts_the_same_twice():
    p = toy_distribution(500, seed=3)[2]
    gains = [torch.diag(g) for g in torch.rand(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)]
    mixture = StochasticClassifier([lambda q, g=g: bayes_rule(q, g) for g in gains], seed=1)
    torch.manual_seed(7)
    first = mixture(p)
    torch.manual_seed(8)
    assert mixture(p).equal(first) and mixture(p.flip(0)).flip(0).equal(first)
    assert not StochasticClassifier(mixture.members, seed=2)(p).equal(first)


def test_trap_44_the_expected_metric_of_the_mixture_is_reported(toy):
    "Not that of averaged scores, which is another classifier; the members are kept"
    _, y, p = toy
    gains = [torch.diag(torch.tensor(g, dtype=torch.float64)) for g in ([1., 1, 1, 1], [.05, 1, 5, 20], [1, 9, .1, .1])]
    members, weights = [lambda q, g=g: bayes_rule(q, g) for g in gains], [.5, .3, .2]
    mixture, problem = StochasticClassifier(members, weights), worst_case_recall(p.mean(0))
    C = mixture.confusion(p, y, 4)
    by_hand = sum(w * confusion_matrix(y, h(p), 4) for w, h in zip(weights, members))
    averaged = confusion_matrix(y, sum(w * (p @ g) / g.diagonal().sum() for w, g in zip(weights, gains)).argmax(1), 4)
    assert torch.allclose(C, by_hand) and abs(problem.objective(C) - problem.objective(averaged)) > .02 and mixture.members == members
    drawn = [confusion_matrix(y, StochasticClassifier(members, weights, seed)(p), 4) for seed in range(8)]
    assert torch.allclose(sum(drawn) / 8, C, atol=.01)
    game = SaddlePoint(problem)
    for h in members: game.update(confusion_matrix(y, h(p), 4))
    even = sum(confusion_matrix(y, h(p), 4) for h in members) / 3
    assert abs(game.average()['objective'] - problem.objective(even)) < 1e-12


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "A tiny finished run"
    from ncdo.cli import main
    folder = tmp_path_factory.mktemp('postshift') / 'run'
    main([*'train --model mlp-16 --steps 20 --batch-size 32 --objective accuracy --loss cross-entropy --out'.split(), str(folder)])
    return folder

OBJECTIVES = [ # chkstyle: ignore-node
    ('worst-case-recall', []), ('worst-case-recall', ['--groups', 'head-tail', '--tail', '.3']), ('average-recall', []), ('accuracy', []), ('recall', ['--tau', '.3']),
    ('precision', ['--tau', '.4']), ('coverage', ['--step-size', '.1']), ('balanced-coverage', ['--step-size', '.1', '--fraction', '.8'])]

@pytest.mark.parametrize('objective,more', OBJECTIVES, ids=lambda v: v if isinstance(v, str) else '')
def test_a_run_is_post_shifted(ncdo, run, objective, more):
    before = (run / 'record.json').read_bytes(), (run / 'scores.npz').read_bytes()
    status, out, err = ncdo('postshift', '--run', run, '--objective', objective, '--iterations', 40, *more)
    assert status == 0 and 'shifted, cross-fitted' in out, err
    path = out.split('result: ')[1].strip()
    result, bytes_ = json.loads(open(path).read()), open(path, 'rb').read()
    assert result['settings']['objective'] == objective and os.path.dirname(path) == str(run)
    if result['test']['worst_violation'] is None: assert result['validation']['objective'] >= result['before']['validation']['objective']
    assert ((run / 'record.json').read_bytes(), (run / 'scores.npz').read_bytes()) == before
    assert ncdo('postshift', '--run', run, '--objective', objective, '--iterations', 40, *more) == (0, out, '') and open(path, 'rb').read() == bytes_


def test_trap_42_the_command_prints_the_cross_fitted_value_beside_the_fitted(ncdo, run):
    _, out, _ = ncdo('postshift', '--run', run, '--step-size', 1, '--iterations', 100)
    value = lambda name: float(next(l for l in out.splitlines() if l.strip().startswith(name + ':')).split('objective ')[1].split(';')[0].split(',')[0])
    assert value('no shift, validation') <= value('shifted, validation') and value('shifted, cross-fitted') < value('shifted, validation')
    result = json.loads(open(out.split('result: ')[1].strip()).read())
    assert abs(result['cross_fitted']['objective'] - value('shifted, cross-fitted')) < 1e-3 and abs(result['test']['objective'] - value('shifted, test')) < 1e-3


MISTAKES = [ # chkstyle: ignore-node
    (['--objective', 'fairness'], "unknown objective 'fairness'"),
    (['--shrinkage', '2'], 'shrinkage is 2.0; it must lie between 0 and 1'),
    (['--iterations', '0'], 'iterations is 0'),
    (['--step-size', '0'], 'step_size is 0.0'),
    (['--groups', 'mine'], "unknown groups 'mine'"),
    (['--groups', 'head-tail', '--tail', '2'], 'tail is 2.0; give a number between 0 and 1'),
    (['--objective', 'recall', '--tau', '1.5'], 'tau is 1.5'),
    (['--seed', '1'], '--seed')]

@pytest.mark.parametrize('args,message', MISTAKES, ids=lambda v: ' '.join(v) if isinstance(v, list) else '')
def test_mistakes_are_one_line_status_2_and_nothing_written(ncdo, run, args, message):
    before = sorted(os.listdir(run))
    status, out, err = ncdo('postshift', '--run', run, *args)
    assert status == 2 and message in err and err.count('\n') == 1 and not out and sorted(os.listdir(run)) == before


def test_a_run_that_is_not_there(ncdo, tmp_path):
    status, out, err = ncdo('postshift', '--run', tmp_path / 'nothing')
    assert status == 2 and 'holds no record of a finished run' in err and err.count('\n') == 1 and not out and not list(tmp_path.iterdir())
    status, _, err = ncdo('postshift')
    assert status == 2 and '--run' in err and err.count('\n') == 1


@pytest.mark.parametrize('broken', ['missing', 'truncated'])
def test_a_run_without_its_scores(ncdo, run, tmp_path, broken):
    (tmp_path / 'record.json').write_bytes((run / 'record.json').read_bytes())
    if broken == 'truncated': (tmp_path / 'scores.npz').write_bytes((run / 'scores.npz').read_bytes()[:300])
    before = sorted(os.listdir(tmp_path))
    status, _, err = ncdo('postshift', '--run', tmp_path)
    assert status == 2 and 'compute the run again' in err and err.count('\n') == 1 and sorted(os.listdir(tmp_path)) == before


def test_the_benchmark_reports_and_draws(capsys, monkeypatch, tmp_path):
    from ncdo import bench
    small = dict(whole=(60, 4, 3), rounds=1, iterations=2, growth={'points': ((20, 3), (40, 3)), 'classes': ((40, 3), (40, 6))})
    bench.report_post_shift(tmp_path / 'growth.png', **small)
    out = capsys.readouterr().out
    assert out.count('60 points, 4 classes, 3 iterations') == 2 and out.count('(40, 6)') == 2 and (tmp_path / 'growth.png').stat().st_size > 1000
    called = []
    monkeypatch.setattr(bench, 'report_post_shift', lambda plot=None: called.append(plot))
    bench.main(['postshift'])
    bench.main(['postshift', '--plot', 'x.png'])
    assert called == [None, 'x.png']
    for wrong in (['postshift', '--plot'], ['postshift', 'x'], ['other']):
        with pytest.raises(SystemExit): bench.main(wrong)
        assert 'usage' in capsys.readouterr().err


def test_folds_hold_out_every_row_once(toy):
    from sklearn.model_selection import RepeatedKFold, ShuffleSplit, StratifiedKFold
    p, y = toy[2].numpy(), toy[1].numpy()
    fit = lambda cv: PostShiftClassifier(iterations=20, cv=cv).fit(p, y)
    for cv in (ShuffleSplit(5, test_size=.2, random_state=0), RepeatedKFold(n_splits=5, n_repeats=2)):
        with pytest.raises(InputError, match='every row once'): fit(cv)
    assert abs(fit(StratifiedKFold(5)).cross_fitted_objective_ - fit(5).cross_fitted_objective_) < .1


def test_tables_and_reversed_columns(toy):
    import pandas as pd
    p, y = toy[2].numpy(), toy[1].numpy()
    plain = PostShiftClassifier(iterations=20, cv=None).fit(p, y)
    table = pd.DataFrame(p, columns=list('abcd'))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        framed = PostShiftClassifier(iterations=20, cv=None).fit(table, y)
        assert (framed.predict(table) == plain.predict(p)).all()
        turned = PostShiftClassifier(iterations=20, cv=None, classes=[3, 2, 1, 0]).fit(p[:, ::-1], y)
        assert (turned.predict(p[:, ::-1]) == plain.predict(p)).mean() > .99


def drawn(seed, temperature=1., n=300, bias=0.):
    "Three unequal classes, their probabilities softened or sharpened, perhaps by a biased model"
    rng, priors = np.random.default_rng(seed), [.7, .2, .1]
    y = np.r_[np.arange(3), rng.choice(3, n - 3, p=priors)]
    z = rng.normal(size=(n, 3))
    z[np.arange(n), y] += 1.5
    z += np.log(priors) + bias * rng.normal(size=3)
    return softmax(z / temperature, 1), y


@pytest.mark.parametrize('temperature', [.1, 1, 10, 100, 1000])
@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_a_temperature_on_the_scores_changes_nothing(temperature, dtype):
    "The best diagonal rule is the same; with the paper's step of 1 it was no shift, .262, at temperatures from 10 on"
    q, y = drawn(0, temperature)
    post = PostShiftClassifier(worst_case_recall, cv=None).fit(q.astype(dtype), y)
    assert post.objective_ > .76 and abs(post.base_objective_ - .262) < 1e-3


def test_a_step_of_ones_own_stays_constant():
    q, y = drawn(0, 10.)
    assert post_shift(worst_case_recall([.7, .2, .1]), q, y, step_size=1., iterations=50)[1].step_size == 1
    fits = [PostShiftClassifier(worst_case_recall, cv=None, step_size=s).fit(q, y).objective_ for s in (1., .1, None)]
    assert fits[0] < .27 and fits[1] > .76 and fits[2] > .76


def of_ones_own(priors):
    "Costs; at most .6 of the predictions are class 0, and class 2 has a recall of .6"
    B = torch.zeros(2, 3, 3)
    B[0, :, 0], B[1, 2, 2] = -1, 1 / torch.as_tensor(priors)[2]
    return Problem(-torch.tensor([[0., 1, 1], [2, 0, 1], [4, 2, 0]]), B, [-.6, .6], priors)

THREE = PROBLEMS | {'groups': lambda p: worst_case_recall(p, [0, 1, 1]), 'coverage of groups': lambda p: balanced_coverage_constraint(p, groups=[0, 1, 1]), 'own': of_ones_own}

def best_of_all_rules(problem, q, y, temperature):
    "The best rank among the rules of a grid of multipliers"
    if problem.domain == 'simplex':
        away = torch.cartesian_prod(*[torch.linspace(-5, 5, 120 if problem.k == 2 else 40).double() / temperature] * (problem.k - 1))
        grid = torch.cat([torch.zeros(len(away), 1), away.view(len(away), -1)], 1).double()
        grid = (grid + problem.priors.log()[:problem.k] * (problem.k == 3)).softmax(-1)
    else: grid = torch.cartesian_prod(*[torch.cat([torch.zeros(1), torch.logspace(-3, 1, 14)]).double()] * problem.k)
    hits = [(torch.tensor(q) @ G).argmax(-1) for G in problem.gain(grid).split(500)]
    return max(rank(problem, confusion_matrix(torch.tensor(y), h, 3)) for h in torch.cat(hits))

@pytest.mark.parametrize('name', THREE)
@pytest.mark.parametrize('temperature', [1, 10])
def test_the_step_found_against_a_step_of_1_and_all_rules(name, temperature):
    "Where no shift is feasible, Algorithm 3 has no reason to move: precision is left out of the comparison with all rules"
    problem = THREE[name]([.7, .2, .1])
    for seed in (0, 1):
        q, y = drawn(seed, temperature, 200, bias=.7 * seed)
        of = lambda gain: rank(problem, confusion_matrix(torch.tensor(y), bayes_rule(torch.tensor(q), gain), 3))
        found, one = [of(post_shift(problem, q, y, step_size=s, iterations=600)[0]) for s in (None, 1.)]
        best = best_of_all_rules(problem, q, y, temperature)
        assert found[0] >= one[0] and found[1] > one[1] - .03 or found[0] > one[0]
        if of(torch.eye(3).double())[0] == 0 or problem.domain == 'simplex': assert found[0] > best[0] or found[0] == best[0] and found[1] > best[1] - .03


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([*EVERY]), st.integers(4, 6), st.integers(8, 60), st.sampled_from([None, None, .1, 10]))
def test_the_result_is_never_worse_than_no_shift_and_boosts_no_class_nobody_saw(seed, name, m, n, step):
    "Absent classes, weights of 0, soft labels, shrinkage; for classes nobody saw, predictions are among those of plain argmax"
    g = torch.Generator().manual_seed(seed)
    p, y = random_sample(seed, m, n)
    absent = torch.rand(m, generator=g) < (0, .3, .6)[seed % 3]
    y = y.where(~absent[y], int((~absent).double().argmax()))
    target = y if seed % 2 else .9 * torch.nn.functional.one_hot(y, m) + .1 * torch.nn.functional.one_hot(y.flip(0), m)
    w = torch.ones(n) if seed % 5 else torch.rand(n, generator=g).round(decimals=1).clamp(min=.0) + (torch.arange(n) == 0)
    priors = torch.rand(m, generator=g).double() + .05
    make = EVERY[name] if m == 4 or name not in MIXED else PROBLEMS['coverage']
    problem = make(priors / priors.sum())
    if seed % 7 == 0: problem = as_custom(problem)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        gain, _ = post_shift(problem, p, target, w, step_size=step, iterations=40, shrinkage=(0, .5, 1)[seed % 3])
        contest, w = SaddlePoint(problem), w.double() / w.sum()
        for h in (p.argmax(1), bayes_rule(p, gain)): contest.update(sample_confusion(target.double() if target.ndim == 2 else target, h, w, m))
    assert contest._rank(1) >= contest._rank(0)
    seen = sample_confusion(target.double() if target.ndim == 2 else target, p.argmax(1), w, m).sum(1) > 0
    unseen = ~seen[bayes_rule(p, gain)]
    assert (bayes_rule(p, gain)[unseen] == p.argmax(1)[unseen]).all()


TWO_OF_THREE = np.array([[.6, .35, .05]] * 6 + [[.5, .45, .05]] * 4), np.array([0] * 6 + [1] * 4)

@pytest.mark.parametrize('step', [None, 1.])
@pytest.mark.filterwarnings('ignore:no examples')
def test_a_class_nobody_saw_does_not_stand_in_the_way(step):
    "Worst recall 0 once, 1 without class 2"
    post = PostShiftClassifier(worst_case_recall, priors=[.58, .38, .04], classes=[0, 1, 2], step_size=step, cv=None).fit(*TWO_OF_THREE)
    assert post.objective_ == 1 and (post.predict(TWO_OF_THREE[0]) == TWO_OF_THREE[1]).all()
    assert post.predict([[.1, .1, .8]]) == [2] # It can still be predicted

@pytest.mark.filterwarnings('ignore:no examples')
@pytest.mark.parametrize('make', [lambda p: worst_case_recall(p, [0, 1, 1]), lambda p: recall_constraint(p, .9), lambda p: precision_constraint(p, .9),
    coverage_constraint,
    balanced_coverage_constraint, lambda p: balanced_coverage_constraint(p, groups=[0, 1, 1]), average_recall_goal])
def test_nor_in_that_of_other_goals(make):
    q, y = TWO_OF_THREE
    gain, _ = post_shift(make([.58, .38, .04]), q, y)
    predicted = bayes_rule(torch.tensor(q), gain)
    assert (predicted == torch.tensor(y)).all() and not (predicted == 2).any()


def test_a_missed_target_without_a_better_rule_is_told():
    p, y = torch.full((8, 2), .5), torch.tensor([0] * 4 + [1] * 4)
    with pytest.warns(UserWarning, match='found no rule better than the model as it came, which misses the target of class 1') as told: post_shift(recall_constraint([.5, .5], .9), p, y)
    assert len(told) == 1 and '\n' not in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        post_shift(recall_constraint([.5, .5], .9), p, y, shrinkage=1.) # No shift is what was asked for
        post_shift(worst_case_recall([.5, .5]), p, y)


def test_bounds_of_multipliers_and_the_tolerance_are_within_reach():
    q, y = drawn(0)
    problem, top = recall_constraint([.7, .2, .1], .99), lambda game: max(h['multipliers'].max() for h in game.history)
    for step in (None, 1.):
        assert top(post_shift(problem, q, y, step_size=step, max_multiplier=.2)[1]) <= .2 < top(post_shift(problem, q, y, step_size=step)[1])
    low = lambda **k: min(h['multipliers'].min() for h in post_shift(worst_case_recall([.7, .2, .1]), q, y, step_size=5., **k)[1].history)
    assert low(floor=.1) > .09 > low()
    fit = lambda tolerance: PostShiftClassifier(lambda p: recall_constraint(p, .6), tolerance=tolerance, cv=None).fit(q, y)
    assert fit(.01).objective_ >= fit(0.).objective_ and fit(.01).reduction_.tolerance == .01 and (fit(0.).violations_ <= 0).all()


def test_data_frames_all_the_way():
    import pandas as pd
    q, y = drawn(0)
    problem, frame, labels = worst_case_recall([.7, .2, .1]), pd.DataFrame(q, columns=list('abc')), pd.Series(y, index=range(7, 307))
    gain, _ = post_shift(problem, frame, labels, pd.Series(np.ones(300)), iterations=50)
    assert torch.equal(gain, post_shift(problem, q, y, iterations=50)[0]) and torch.equal(gain, post_shift(problem, q, labels.to_frame(), iterations=50)[0])
    expected = bayes_rule(torch.tensor(q), gain)
    assert bayes_rule(frame, pd.DataFrame(gain.numpy())).equal(expected) and bayes_rule(q.tolist(), gain).equal(expected)
