"GoalClassifier: scikit-learn's own checks, its conventions, other people's solutions, and what goes wrong"
import pickle, joblib, numpy as np, pandas as pd, pytest, torch
from functools import partial
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer, load_iris, load_wine, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold, TunedThresholdClassifierCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
import ncdo
from ncdo.features import GoalClassifier, even_bend, head_tables, objective_interval, probabilities_of
from ncdo.gains import (InputError, accuracy_goal, average_recall_goal, confusion_matrix,
    cost_matrix_goal, coverage_constraint, recall_constraint, worst_case_recall, worst_recall)
from ncdo.goals import geometric_mean_goal, macro_f1_goal
from ncdo.postshift import PostShiftClassifier

COSTS = np.array([[0, 1, 5], [2, 0, 3], [30, 10, 0]])
GOALS = {'worst class': worst_case_recall, 'G-mean': geometric_mean_goal, 'macro-F1': macro_f1_goal,
    'recall': partial(recall_constraint, tau=.5), 'coverage': coverage_constraint, 'costs': COSTS}


@parametrize_with_checks([GoalClassifier()])
def test_scikit_learn_checks(estimator, check): check(estimator)


@pytest.fixture(scope='module', autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope='module')
def rare():
    "Three classes of 60, 30 and 10 % that overlap"
    return make_classification(400, 6, n_informative=4, n_classes=3, weights=[.6, .3, .1], class_sep=.6, random_state=0)


@pytest.fixture(scope='module')
def fitted(rare): return GoalClassifier().fit(*rare)


@pytest.mark.parametrize('load', [load_wine, load_iris, load_breast_cancer])
@pytest.mark.parametrize('C', [.01, 1, 10])
@pytest.mark.parametrize('goal,weight', [(accuracy_goal, None), (average_recall_goal, 'balanced')])
def test_it_is_logistic_regression_where_the_gain_says_so(load, C, goal, weight):
    "To 1e-3 in probabilities; two classes and three; the average recall, re-weighted, is class_weight='balanced'"
    X, y = load(return_X_y=True)
    X = StandardScaler().fit_transform(X)
    y = np.where(np.arange(len(y)) % 3, y, y[0])  # Not separable
    theirs = LogisticRegression(C=C, class_weight=weight, tol=1e-8, max_iter=10000).fit(X, y)
    ours = GoalClassifier(goal, C=C, loss='re-weighted').fit(X, y)
    assert np.abs(ours.predict_proba(X) - theirs.predict_proba(X)).max() < 1e-3


def test_features_of_any_scale_reach_the_same_solution_as_logistic_regression():
    X, y = load_wine(return_X_y=True)  # From .1 to 1,700
    theirs = LogisticRegression(tol=1e-8, max_iter=100000, solver='newton-cg').fit(X, y)
    assert np.abs(GoalClassifier(accuracy_goal).fit(X, y).predict_proba(X) - theirs.predict_proba(X)).max() < 1e-3


def test_more_features_than_examples():
    X, y = make_classification(60, 200, n_informative=10, n_classes=3, random_state=0)
    theirs = LogisticRegression(tol=1e-8, max_iter=100000).fit(X, y)
    ours = GoalClassifier(accuracy_goal).fit(X, y)
    assert ours.coefs_[0].shape == (200, 3) and np.abs(ours.predict_proba(X) - theirs.predict_proba(X)).max() < 1e-3


def test_a_diagonal_gain_moves_intercepts_only(rare):
    X, y = rare
    plain, moved = GoalClassifier(accuracy_goal).fit(X, y), GoalClassifier(loss='logit-adjusted').fit(X, y)
    between = lambda model: model.coefs_[0] - model.coefs_[0][:, :1]
    assert np.allclose(between(plain), between(moved), atol=1e-4)
    shift = moved.intercepts_[0] - plain.intercepts_[0] - np.log(np.diag(moved.gain_))
    assert np.allclose(shift, shift[0], atol=1e-4)


@pytest.mark.parametrize('head', ['linear', 'mlp'])
@pytest.mark.parametrize('goal', GOALS)
def test_every_goal_is_no_worse_than_plain_training_on_its_own_counts(rare, goal, head):
    model = GoalClassifier(GOALS[goal], head=head, hidden=4, updates=1, cv=3).fit(*rare)
    plain = model.history_[0]
    if model.problem_.k and model.problem_.demands: assert model.violations_.max() <= max(plain['violations'].max(), 1e-3)
    else: assert model.objective_ >= plain['objective']
    assert model.interval_[0] < model.interval_[1] and np.isfinite(model.cross_fitted_objective_)
    shares = model.predict_proba(rare[0])
    assert np.allclose(shares.sum(1), 1) and (model.classes_[shares.argmax(1)] == model.predict(rare[0])).all()


def test_the_worst_class_gets_better(rare):
    X, y = rare
    fresh = lambda model: worst_recall(confusion_matrix(y, cross_val_predict(model, X, y, cv=StratifiedKFold(4)), 3)).item()
    assert fresh(GoalClassifier()) > fresh(LogisticRegression()) + .1


@pytest.mark.parametrize('loss', ['auto', 'hybrid-a', 're-weighted'])
def test_shares_give_the_probabilities_back(loss):
    "Softmax of the scores that a loss wants under known p, then the inverse of the gain"
    g = torch.Generator().manual_seed(0)
    p, priors = torch.rand(50, 3, generator=g).double().log().neg(), torch.tensor([.6, .3, .1]).double()
    p = p / p.sum(1, keepdim=True)
    for gain in (cost_matrix_goal(COSTS, priors).gain([]), worst_case_recall(priors).gain([.1, .2, .7]), 1e-30 * torch.eye(3).double()):
        log_diag, M = head_tables(gain, loss, priors)
        shares = (log_diag + (p @ M).log()).softmax(-1)
        assert torch.allclose(probabilities_of(shares, gain), p, atol=1e-8)
        assert (priors @ M.sum(-1)).item() == pytest.approx(1)


@pytest.mark.parametrize('loss', ['auto', 'hybrid-a', 're-weighted'])
def test_what_is_added_to_a_row_of_costs_changes_no_table(loss):
    priors = torch.tensor([.6, .3, .1]).double()
    first, *others = [head_tables(-torch.tensor(COSTS - row).double(), loss, priors) for row in (0, 100, [[-50], [200], [3]])]
    for other in others: assert all(torch.allclose(a, b) for a, b in zip(first, other))


def test_costs_of_two_classes_are_a_threshold():
    "Two costs make a diagonal gain, which a linear head has exactly"
    log_diag, M = head_tables(-torch.tensor([[0., 1], [5, 0]]).double(), 'auto', torch.tensor([.9, .1]).double())
    assert torch.allclose(log_diag.exp(), torch.tensor([1., 5]).double()) and torch.allclose(M, torch.eye(2).double())


def test_a_class_to_which_no_answer_matters(rare):
    X, y = rare
    model = GoalClassifier([[0, 1, 1], [1, 0, 1], [2, 2, 2]]).fit(X, y)
    assert np.isfinite(model.decision_function(X)).all() and set(model.predict(X)) <= {0, 1}


def test_costs_are_those_of_the_bayes_rule(rare):
    "The same answers whatever is added to a row; the objective is minus the mean cost of the counts"
    X, y = rare
    model = GoalClassifier(COSTS).fit(X, y)
    C = model.confusion_
    assert model.objective_ == pytest.approx(-(C * COSTS).sum() / C.sum()) == model.cross_fitted_objective_
    for more in ([[3], [-7], [1]], 100):
        moved = GoalClassifier(COSTS - np.array(more)).fit(X, y)
        assert (moved.predict(X) == model.predict(X)).all()
    stated = GoalClassifier(partial(cost_matrix_goal, COSTS)).fit(X, y)
    assert np.array_equal(stated.decision_function(X), model.decision_function(X))
    paid = lambda rule: COSTS[y, rule.fit(X, y).predict(X)].mean()
    assert paid(model) < paid(LogisticRegression())


@pytest.mark.parametrize('bad', [COSTS[:2], [[0, 1], [2, np.inf]], 'abc'])
def test_costs_it_refuses(bad):
    with pytest.raises(InputError, match='costs'): cost_matrix_goal(bad, [.5, .5])


def test_a_frame_of_costs_goes_by_its_labels(rare):
    X, y = rare[0], np.array(['often', 'rare', 'seldom'])[rare[1]]
    costs = pd.DataFrame(COSTS, ['often', 'rare', 'seldom'], ['often', 'rare', 'seldom'])
    other = costs.loc[['seldom', 'often', 'rare'], ['rare', 'seldom', 'often']]
    a, b, c = [GoalClassifier(goal).fit(X, y).decision_function(X) for goal in (COSTS, costs, other)]
    assert np.array_equal(a, b) and np.array_equal(a, c)
    for wrong in (pd.DataFrame(COSTS), costs.iloc[:2], costs.rename(columns={'rare': 'raer'}), costs.iloc[:, [0, 0, 1]]):
        with pytest.raises(InputError, match='label them with the classes of y') as told: GoalClassifier(wrong).fit(X, y)
        assert '\n' not in str(told.value)


def test_problem_as_goal(rare):
    shares = np.bincount(rare[1]) / 400
    a, b = [GoalClassifier(goal).fit(*rare) for goal in (worst_case_recall, worst_case_recall(shares))]
    assert np.array_equal(a.predict(rare[0]), b.predict(rare[0]))


def test_a_weight_of_zero_is_an_example_less(rare, fitted):
    X, y = rare
    more = np.vstack([X, 100 + X[:50]]), np.append(y, 1 + y[:50])
    padded = GoalClassifier().fit(*more, sample_weight=np.repeat([1., 0.], [400, 50]))
    assert np.allclose(padded.decision_function(X), fitted.decision_function(X)) and padded.objective_ == fitted.objective_


def test_priors_come_from_the_weights(rare):
    X, y = rare
    w = np.where(y == 2, 4., 1.)
    model = GoalClassifier().fit(X, y, w)
    shares = np.bincount(y, w) / w.sum()
    assert np.allclose(model.priors_, shares) and np.allclose(model.confusion_.sum(1), shares)


def test_string_labels_and_frames(rare, fitted):
    X, y = rare
    frame, names = pd.DataFrame(X, columns=list('abcdef')), np.array(['often', 'rare', 'seldom'])[y]
    model = GoalClassifier().fit(frame, names)
    assert model.feature_names_in_.tolist() == list('abcdef') and model.n_features_in_ == 6
    assert (model.predict(frame) == np.array(['often', 'rare', 'seldom'])[fitted.predict(X)]).all()
    with pytest.raises(ValueError, match='feature names'): model.predict(frame[list('bacdef')])


def test_float32_goes_the_same_way(rare, fitted):
    X, y = rare
    assert (GoalClassifier().fit(X.astype(np.float32), y).predict(X.astype(np.float32)) == fitted.predict(X)).mean() > .99


def test_pickles_and_clones(rare, fitted, tmp_path):
    joblib.dump(fitted, tmp_path / 'model')
    for again in (pickle.loads(pickle.dumps(fitted)), joblib.load(tmp_path / 'model'), clone(fitted).fit(*rare)):
        assert np.array_equal(again.decision_function(rare[0]), fitted.decision_function(rare[0]))


def test_pipeline_grid_and_calibration(rare):
    X, y = rare
    grid = GridSearchCV(make_pipeline(StandardScaler(), GoalClassifier(cv=3)), {'goalclassifier__C': [.1, 1.]}, cv=2)
    assert grid.fit(X, y).predict(X).shape == (400,)
    calibrated = CalibratedClassifierCV(GoalClassifier(cv=3), cv=2).fit(X, y)
    assert np.allclose(calibrated.predict_proba(X).sum(1), 1)


def test_threshold_on_top(rare):
    X, y = rare
    tuned = TunedThresholdClassifierCV(GoalClassifier(cv=3), scoring='balanced_accuracy', cv=3).fit(X, y > 1)
    assert set(tuned.predict(X)) == {False, True}


def test_a_feature_in_hundred_millions_does_not_hide_another(rare):
    X, y = rare
    one = np.random.default_rng(0).normal(size=(400, 1)) * 1e8
    wider = np.hstack([one, X])
    kept = lambda X: even_bend(torch.tensor(X), torch.ones(400).double())[1].shape[1]
    assert kept(wider) == kept(X) + 1
    learnt = GoalClassifier(accuracy_goal).fit(wider, y)
    assert (learnt.predict(wider) == GoalClassifier(accuracy_goal).fit(X, y).predict(X)).mean() > .95


def test_constant_features_count_for_nothing(rare, fitted):
    X, y = rare
    wider = np.hstack([X, np.full((400, 2), [1e6, 0.])])
    assert np.allclose(GoalClassifier().fit(wider, y).decision_function(wider), fitted.decision_function(X), atol=1e-4)
    for head in ('linear', 'mlp'):
        model = GoalClassifier(accuracy_goal, head=head, hidden=2).fit(np.ones((400, 2)), y)
        assert np.isfinite(model.decision_function(np.ones((3, 2)))).all() and (model.predict(np.ones((3, 2))) == 0).all()


def test_a_class_smaller_than_the_folds(rare):
    X, y = rare
    few = np.r_[np.flatnonzero(y < 2), np.flatnonzero(y == 2)[:3]]
    with pytest.warns(UserWarning, match='class 2 has 3 examples; using 3 folds in place of 5'): GoalClassifier().fit(X[few], y[few])
    with pytest.raises(InputError, match='class 2 has 1 example'): GoalClassifier().fit(X[few[:-2]], y[few[:-2]])


def test_a_class_that_a_fold_does_not_learn(rare):
    "Sorted labels and folds that are not stratified: one head never sees the rarest class"
    X, y = rare
    o = y.argsort(kind='stable')
    model = GoalClassifier(cv=KFold(3)).fit(X[o], y[o])
    assert np.isfinite(model.decision_function(X)).all() and set(model.predict(X)) == {0, 1, 2}


def test_without_a_cv_folds_are_stratified(rare):
    "Sorted labels: folds in the order of the rows would each leave out a class"
    X, y = rare
    o = y.argsort(kind='stable')
    a, b = [GoalClassifier(cv=cv).fit(X[o], y[o]) for cv in (None, StratifiedKFold(5))]
    assert np.array_equal(a.confusion_, b.confusion_)


@pytest.mark.parametrize('cv', [[(np.arange(400), np.arange(200))], [(np.arange(200), np.arange(200, 400))],
    [(np.arange(200), np.arange(200, 400)), (np.arange(400), np.arange(200))]])
def test_folds_that_judge_what_they_learnt_or_leave_something_out(rare, cv):
    with pytest.raises(InputError, match='hold out every row once'): GoalClassifier(cv=cv).fit(*rare)


@pytest.mark.parametrize('options,message', [(dict(goal='worst'), "goal is 'worst'; give a function"), (dict(goal=np.eye(2)), 'costs has shape'),
    (dict(goal=worst_case_recall([.5, .5])), 'goal is for 2 classes, y holds 3'), (dict(head='deep'), "unknown head 'deep'"),
    (dict(loss='softmax'), "loss 'softmax'"), (dict(C=0), 'C is 0; it must be positive'), (dict(cv=1), 'cv is 1; it must be a whole number, at least 2'),
    (dict(goal=partial(cost_matrix_goal, COSTS), loss='logit-adjusted'), "loss 'logit-adjusted' is for gains that are diagonal"),
    (dict(device='gpu'), "device 'gpu' cannot be used here"), (dict(device='cuda:77'), "device 'cuda:77' cannot be used here"),
    (dict(updates=-1), 'updates is -1'), (dict(hidden=0), 'hidden is 0')])
def test_options_it_refuses(rare, options, message):
    with pytest.raises(InputError, match=message) as told: GoalClassifier(**options).fit(*rare)
    assert '\n' not in str(told.value)


def test_a_pooled_minimum_is_an_interval_that_narrows():
    counts = torch.tensor([[40., 10], [4, 16]]).double()
    widths = [np.diff(objective_interval(worst_case_recall([.5, .5]), n * counts))[0] for n in (1, 100)]
    assert 5 < widths[0] / widths[1] < 15


def test_weights_that_differ_between_classes_do_not_blur_the_interval():
    "A class of 100 examples is worth 100, whatever weight all of them have"
    counts = torch.tensor([[80., 20], [10, 90]]).double()
    weighted = counts / counts.sum() * torch.tensor([[1.], [50.]])
    problem = worst_case_recall([.5, .5])
    a, b = objective_interval(problem, counts), objective_interval(problem, weighted, torch.tensor([100., 100]))
    assert np.allclose(a, b)


def test_the_interval_keeps_the_class_mix_of_the_counts():
    "F1 reads how frequent the classes are: examples of each class that are worth more narrow the interval and leave its place"
    counts, goal = torch.tensor([[900., 100], [10, 40]]).double(), macro_f1_goal([.95, .05])
    low, high = objective_interval(goal, counts, 1e8 * torch.ones(2).double())
    assert low == pytest.approx(goal.objective(counts).item(), abs=1e-3) == high


def test_draws_and_seed_of_an_interval_are_whole_numbers_of_any_library():
    counts, goal = torch.tensor([[80., 20], [10, 90]]).double(), worst_case_recall([.5, .5])
    wanted = objective_interval(goal, counts, draws=50, seed=3)
    for f in (float, np.float64, np.int64, torch.tensor): assert np.array_equal(objective_interval(goal, counts, draws=f(50), seed=f(3)), wanted)
    for given in (dict(draws=0), dict(draws=None), dict(draws=1.5), dict(seed=-1), dict(seed='1')):
        with pytest.raises(InputError, match=f'^{next(iter(given))} is '): objective_interval(goal, counts, **given)


def test_weights_of_a_class_leave_the_interval_as_wide(rare):
    X, y = rare
    a, b = [GoalClassifier(average_recall_goal, C=1e3).fit(X, y, w) for w in (None, np.where(y == 2, 30., 1.))]
    assert np.diff(b.interval_) < 1.3 * np.diff(a.interval_)


def test_a_random_state_of_ones_own(rare):
    a, b, c = [GoalClassifier(head='mlp', hidden=2, updates=0, cv=2, random_state=np.random.RandomState(seed)).fit(*rare).coefs_[0]
        for seed in (1, 1, 2)]
    assert np.array_equal(a, b) and not np.allclose(a, c)


def test_a_linear_head_that_stops_too_early_says_so(rare, monkeypatch):
    short = torch.optim.LBFGS.step
    def step(self, closure):
        result = short(self, closure)
        self.state[self._params[0]]['n_iter'] = 2000
        return result
    monkeypatch.setattr(torch.optim.LBFGS, 'step', step)
    with pytest.warns(ConvergenceWarning, match='not yet trained to the end'): GoalClassifier(accuracy_goal).fit(*rare)


class TestPostShift:
    "The shares of the gain, and scikit-learn's classifiers around and inside"
    def test_an_array_as_the_problem_is_refused_in_one_line(self, rare):
        with pytest.raises(InputError, match='problem is a ndarray; give a function') as told: self.shifted(*rare, COSTS).fit(*rare)
        assert '\n' not in str(told.value)

    def shifted(self, X, y, *problem):
        return make_pipeline(FunctionTransformer(LogisticRegression().fit(X, y).predict_proba), PostShiftClassifier(*problem))

    def test_shares_have_the_argmax_of_the_rule(self, rare):
        post = self.shifted(*rare).fit(*rare)
        shares = post.predict_proba(rare[0])
        assert np.allclose(shares.sum(1), 1) and (post.classes_[shares.argmax(1)] == post.predict(rare[0])).all()

    def test_without_a_shift_they_are_the_probabilities(self, rare):
        p = LogisticRegression().fit(*rare).predict_proba(rare[0])
        assert np.allclose(PostShiftClassifier(shrinkage=1.).fit(p, rare[1]).predict_proba(p), p)

    def test_around_and_inside_calibration(self, rare):
        X, y = rare
        around = CalibratedClassifierCV(self.shifted(X, y), cv=3).fit(X, y)
        inside = make_pipeline(FunctionTransformer(CalibratedClassifierCV(LogisticRegression()).fit(X, y).predict_proba), PostShiftClassifier()).fit(X, y)
        worst = [worst_recall(confusion_matrix(y, model.predict(X), 3)).item() for model in (around, inside)]
        assert worst[1] > worst[0]  # Calibration on top gives the rule for accuracy again

    def test_under_a_tuned_threshold(self, rare):
        X, y = rare[0], rare[1] > 1
        tuned = TunedThresholdClassifierCV(self.shifted(X, y), scoring='balanced_accuracy', cv=3).fit(X, y)
        assert tuned.predict(X).mean() > 0


def test_it_is_found_at_the_top(): assert ncdo.GoalClassifier is GoalClassifier and ncdo.cost_matrix_goal is cost_matrix_goal
