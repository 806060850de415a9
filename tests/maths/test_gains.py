"Metrics against scikit-learn and by hand; problems against their matrices"
import numpy as np, pytest, torch
from sklearn.metrics import balanced_accuracy_score, confusion_matrix as sklearn_confusion, precision_score, recall_score
from ncdo import gains
from ncdo.gains import (ClassProblem, InputError, Problem, accuracy, accuracy_goal, at_priors, average_recall, average_recall_goal, balanced_coverage,
    balanced_coverage_constraint, bayes_rule, check_priors, class_priors, confusion_matrix, coverage, coverage_constraint, group_mean, head_tail_groups,
    nanmin, precision, precision_constraint, recall, recall_constraint, worst_case_recall, worst_recall)

PRIORS = torch.tensor([.5, .25, .15, .1], dtype=torch.float64)

def five(priors=PRIORS, **kwargs):
    return dict(worst=worst_case_recall(priors, **kwargs), recall=recall_constraint(priors, .6, **kwargs), precision=precision_constraint(priors, .6, **kwargs),
        coverage=coverage_constraint(priors, **kwargs), balanced=balanced_coverage_constraint(priors, **kwargs))

def random_confusion(m=4, seed=0):
    C = torch.rand(m, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + torch.eye(m)
    return C / C.sum()

@pytest.mark.parametrize('seed', range(5))
def test_metrics_match_sklearn(seed):
    rng = np.random.default_rng(seed)
    y, h = rng.integers(0, 6, 300), rng.integers(0, 6, 300)
    C = confusion_matrix(y, h, 6)
    assert C.dtype == torch.float64 and torch.isclose(C.sum(), torch.tensor(1., dtype=torch.float64))
    np.testing.assert_allclose(C * 300, sklearn_confusion(y, h))
    np.testing.assert_allclose(recall(C), recall_score(y, h, average=None))
    np.testing.assert_allclose(precision(C), precision_score(y, h, average=None))
    np.testing.assert_allclose(average_recall(C), balanced_accuracy_score(y, h))
    np.testing.assert_allclose(accuracy(C), (y == h).mean())
    np.testing.assert_allclose(coverage(C), np.bincount(h, minlength=6) / 300)

def test_confusion_matrix_of_stacked_samples_is_the_stack():
    y, h = torch.randint(4, (3, 50)), torch.randint(4, (3, 50))
    assert torch.equal(confusion_matrix(y, h, 4), torch.stack([confusion_matrix(a, b, 4) for a, b in zip(y, h)]))

def test_ignored_targets_count_for_nothing():
    assert torch.equal(confusion_matrix([0, -100, 1], [0, 1, 1], 2, ignore_index=-100), confusion_matrix([0, 1], [0, 1], 2))

@pytest.mark.parametrize('y, h, message', [([0, 1], [0], 'they must agree'), ([], [], 'is empty'), ([0, 2], [0, 1], r'holds \[2\]'),
    ([0, 1], [0, -1], r'holds \[-1\]'), ([.5, 1.], [0, 1], 'give class indices')])
def test_confusion_matrix_says_what_is_wrong(y, h, message):
    with pytest.raises(InputError, match=message): confusion_matrix(torch.tensor(y), torch.tensor(h), 2)

def test_nothing_but_ignored_targets_is_an_error_not_nan():
    with pytest.raises(InputError, match='every target is ignore_index'): confusion_matrix([-100, -100], [0, 1], 2, ignore_index=-100)

@pytest.mark.parametrize('priors, message', [([.5, .6], 'sums to 1.1'), ([1.], 'at least 2 classes'), ([.5, .5, 0], 'priors of class 2 is 0'),
    ([1.5, -.5], 'priors of class 1 is -0.5'), ([float('nan'), 1.], 'class 0')])
def test_priors_are_checked(priors, message):
    with pytest.raises(InputError, match=message): check_priors(priors)

def test_class_priors_of_hard_soft_and_ignored_labels():
    y = torch.tensor([0, 0, 1, 255])
    assert torch.allclose(class_priors(y, 2, ignore_index=255), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
    assert torch.allclose(class_priors(torch.tensor([[.5, .5], [1., 0]]), 2), torch.tensor([.75, .25], dtype=torch.float64))

@pytest.mark.parametrize('name', list(five()))
@pytest.mark.parametrize('target', [None, [.25] * 4, [.1, .2, .3, .4]])
def test_class_problem_equals_its_dense_matrices(name, target):
    "The O(m) form and the plain matrices A, B_k, b_k agree on gains, objective and violations"
    problem = five(target_priors=target)[name]
    zero = torch.zeros(4, dtype=torch.float64)
    A = problem.gain(zero) / problem.ratio[:, None]
    B = torch.stack([problem.gain(e) / problem.ratio[:, None] - A for e in torch.eye(4, dtype=torch.float64)])
    dense = Problem(None if problem.domain == 'simplex' else A, B, problem.b, PRIORS, target, domain=problem.domain)
    C, lam = random_confusion(), torch.rand(4, dtype=torch.float64)
    assert torch.allclose(dense.gain(lam), problem.gain(lam))
    assert torch.allclose(dense.objective(C), problem.objective(C)) and torch.allclose(dense.violations(C), problem.violations(C))

@pytest.mark.parametrize('name', list(five()))
@pytest.mark.parametrize('target', [None, [.25] * 4])
def test_gain_on_training_confusion_is_the_lagrangian(name, target):
    "sum G_ij C_ij at the training mix = objective + sum lambda (value), measured at the target mix"
    problem, lam = five(target_priors=target)[name], torch.rand(4, dtype=torch.float64)
    C = at_priors(random_confusion(), PRIORS)
    objective = 0 if problem.domain == 'simplex' else problem.objective(C)
    assert torch.allclose((problem.gain(lam) * C).sum(), objective + (lam * (problem.b - problem.violations(C))).sum())

def test_stacks_of_confusions_and_multipliers():
    C, lam = torch.stack([random_confusion(seed=i) for i in range(3)]), torch.rand(3, 4, dtype=torch.float64)
    for problem in five().values():
        assert problem.gain(lam).shape == (3, 4, 4) and torch.equal(problem.gain(lam)[1], problem.gain(lam[1]))
        assert problem.violations(C).shape == (3, 4) and torch.allclose(problem.objective(C)[2], problem.objective(C[2]))

@pytest.mark.parametrize('name', ['worst', 'balanced'])
def test_goals_on_recall_do_not_depend_on_the_class_mix(name):
    C, lam = random_confusion(), torch.rand(4, dtype=torch.float64)
    a, b = five()[name], five(target_priors=[.25] * 4)[name]
    assert torch.allclose(a.violations(C), b.violations(C)) and torch.allclose(a.gain(lam), b.gain(lam))
    assert torch.allclose(a.violations(C), a.violations(at_priors(C, [.7, .1, .1, .1])))

def test_literal_coverage_on_a_balanced_sample_demands_errors():
    "spec.md 1: read to the letter, the constraint cannot be met by a perfect classifier measured on a balanced sample"
    perfect = torch.eye(4, dtype=torch.float64) / 4
    assert (.95 * PRIORS - coverage(perfect)).max() > .2
    assert (coverage_constraint(PRIORS).violations(perfect) < 0).all()

def test_balanced_coverage_sums_to_one():
    assert torch.isclose(balanced_coverage(random_confusion()).sum(), torch.tensor(1., dtype=torch.float64))

def test_absent_class_leaves_groups_and_averages_to_the_others():
    C = torch.zeros(4, 4, dtype=torch.float64)
    C[0, 0], C[0, 1], C[1, 1], C[3, 3] = .2, .2, .4, .2
    assert worst_case_recall(PRIORS).violations(C)[2].isnan() and worst_case_recall(PRIORS).objective(C) == worst_recall(C) == .5
    grouped = worst_case_recall(PRIORS, groups=[0, 0, 1, 1])
    assert torch.allclose(-grouped.violations(C), torch.tensor([.75, 1.], dtype=torch.float64))
    assert torch.isclose(coverage_constraint(PRIORS).objective(C), average_recall(C))
    assert precision_constraint(PRIORS, .5).violations(C)[2].isnan()

def test_nothing_predicted_satisfies_the_linear_precision_constraint():
    "spec.md 15"
    C = torch.tensor([[.5, 0], [.5, 0]], dtype=torch.float64)
    assert precision(C)[1].isnan() and precision_constraint([.5, .5], .9).violations(C)[1] == 0

def test_groups_are_checked_and_named():
    assert worst_case_recall(PRIORS, head_tail_groups(PRIORS, tail=.25)).names == ['head', 'tail']
    assert torch.equal(group_mean(torch.tensor([1., torch.nan, 3, 5]), [0, 0, 1, 1]), torch.tensor([1., 4]))
    with pytest.raises(InputError, match='without gaps'): worst_case_recall(PRIORS, [0, 0, 2, 2])
    with pytest.raises(InputError, match='head and tail need at least one'): head_tail_groups(PRIORS, tail=.1)

@pytest.mark.parametrize('make', [lambda: recall_constraint(PRIORS, 1.2), lambda: coverage_constraint(PRIORS, -1), lambda: Problem(None, torch.eye(4), [0], PRIORS),
    lambda: Problem(torch.eye(4), torch.eye(4)[None], [0], PRIORS, domain='simplex'), lambda: five()['worst'].gain([1.]),
    lambda: Problem(None, torch.eye(4)[None], [0], PRIORS, domain='box'), lambda: five()['worst'].objective(torch.eye(3))])
def test_misuse_is_told_in_one_line(make):
    with pytest.raises(InputError) as e: make()
    assert '\n' not in str(e.value)

def test_goals_without_constraints():
    assert torch.allclose(accuracy_goal(PRIORS).gain([]), torch.eye(4, dtype=torch.float64))
    assert torch.allclose(average_recall_goal(PRIORS).gain([]), torch.diag(1 / (4 * PRIORS)))
    assert len(accuracy_goal(PRIORS).initial_multipliers()) == 0

def test_bayes_rule_is_the_best_of_all_rules():
    p, G = torch.rand(5, 3, dtype=torch.float64).softmax(-1), torch.rand(3, 3, dtype=torch.float64)
    earned = [(p @ G)[torch.arange(5), list(h)].sum() for h in np.ndindex(*[3] * 5)]
    assert torch.isclose(max(earned), (p @ G)[torch.arange(5), bayes_rule(p, G)].sum())

def test_nanmin(): assert nanmin(torch.tensor([2., torch.nan, 1])) == 1 and nanmin(torch.tensor([torch.nan])).isnan()

def test_a_problem_of_ones_own_from_matrices():
    "Accuracy, while classes 0 and 1 together are predicted at most half of the time"
    B = -torch.ones(1, 4, 4, dtype=torch.float64) * torch.tensor([1., 1, 0, 0])
    problem, C = Problem(torch.eye(4), B, [-.5], PRIORS, names=['first two']), at_priors(random_confusion(), PRIORS)
    assert torch.allclose(problem.violations(C), coverage(C)[:2].sum() - .5) and problem.names == ['first two'] and isinstance(ClassProblem(PRIORS), gains.Problem)


@pytest.mark.parametrize('problem,missed,met', [
    (balanced_coverage_constraint(torch.full((1000,), .001)), .00095, False), # A class that is never predicted
    (balanced_coverage_constraint(torch.full((1000,), .001)), .00001, True),
    (coverage_constraint([.9, .0992, .0008]), .00076, False), (coverage_constraint([.9, .0992, .0008]), .00001, True),
    (precision_constraint([.8, .1985, .0015], .7), .0004, False), (precision_constraint([.8, .1985, .0015], .7), .00002, True),
    (recall_constraint([.6, .4], .5), .0009, True), (recall_constraint([.6, .4], .5), .0011, False),
    (Problem(torch.eye(2), torch.eye(2)[None], [-.5], [.5, .5]), .0009, True)])
def test_what_counts_as_met_is_small_beside_the_target(problem, missed, met):
    assert bool(missed <= problem.slack()[-1]) == met and problem.slack().max() <= 1e-3 and problem.slack().shape == problem.b.shape


def test_pandas_counts_are_not_taken_out_of_order():
    import pandas as pd
    labels = pd.Series([1] * 7 + [0] * 3, index=range(5, 15))
    with pytest.raises(InputError, match='sorts by frequency'): worst_case_recall(labels.value_counts(normalize=True))
    with pytest.raises(InputError, match='index'): check_priors(labels.map({0: 'a', 1: 'b'}).value_counts(normalize=True))
    assert torch.equal(check_priors(labels.value_counts(normalize=True).sort_index()), torch.tensor([.3, .7], dtype=torch.float64))
    assert torch.allclose(confusion_matrix(labels, labels, 2), torch.tensor([.3, .7], dtype=torch.float64).diag())


def test_one_number_for_each_constraint():
    with pytest.raises(InputError, match='one right-hand side for each constraint'): Problem(torch.eye(2), torch.eye(2)[None], .6, [.5, .5])


BROKEN = [ # chkstyle: ignore-node
    ([[.5, float('nan')], [.2, .3]], 'holds nan; give shares or counts'), ([[.5, float('inf')], [.2, .3]], 'holds inf'),
    ([[.5, -.1], [.3, .3]], 'holds -0.1; give shares or counts, 0 or more'), ([[0, 0], [0, 0]], 'is all 0; it needs at least one example'),
    ([[.5, .1, .2], [.1, .1, 0]], r'has shape \(2, 3\); this problem has 2 classes, so it must be \(2, 2\)'), ([.5, .5], r'has shape \(2,\)'),
    ([[.5], [.1, .2]], 'equally many in each row'), ('abc', 'the confusion matrix is a str'), (None, 'the confusion matrix is a NoneType'),
    ([[[.5, 0], [0, .5]], [[0, 0], [0, 0]]], 'is all 0')]

@pytest.mark.parametrize('C,message', BROKEN)
@pytest.mark.parametrize('make', [worst_case_recall, lambda p: Problem(torch.eye(2), torch.eye(2)[None], [.1], p)])
def test_broken_confusion_matrices_are_refused_by_name(make, C, message):
    from ncdo.reductions import SaddlePoint
    game = SaddlePoint(make([.5, .5]))
    for use in (game.problem.evaluate, game.update):
        with pytest.raises(InputError, match=message) as e: use(C)
        assert '\n' not in str(e.value)
    assert not game.history and game.multipliers.equal(game.problem.initial_multipliers())

def test_counts_frames_and_lists_are_confusion_matrices():
    import pandas as pd
    counts, problem = [[6, 2], [1, 3]], coverage_constraint([.6, .4])
    for C in (counts, np.array(counts), torch.tensor(counts), pd.DataFrame(counts, index=list('ab'), columns=list('ab')), np.array(counts)[::-1, ::-1][::-1, ::-1]):
        assert torch.allclose(problem.violations(C), problem.violations(torch.tensor(counts) / 12.))


def test_labels_in_any_container():
    import pandas as pd
    y, right = [0, 0, 1, 2], torch.tensor([.5, .25, .25], dtype=torch.float64)
    forms = y, np.array(y), torch.tensor(y), pd.Series(y, index=[9, 3, 5, 1]), pd.DataFrame({'label': y}), np.array(y[::-1])[::-1]
    for labels in forms: assert class_priors(labels, 3).equal(right)
    soft = torch.nn.functional.one_hot(torch.tensor(y)).double()
    for labels in (soft, soft.tolist(), pd.DataFrame(soft.numpy(), columns=list('abc'))): assert class_priors(labels, 3).allclose(right)

@pytest.mark.parametrize('labels,message', [(['a', 'b'], 'target is a list that does not hold numbers'), ([], r'shape \(0,\)'), ([.5, 1], 'give class indices'),
    ([[.5, .5]], r'rows of 3 class probabilities'), ({'a': 1}, 'target is a dict'), (None, 'target is a NoneType'), ([[0], [1, 2]], 'equally many in each row')])
def test_labels_that_are_none(labels, message):
    with pytest.raises(InputError, match=message): class_priors(labels, 3)

def test_nothing_but_ignored_labels():
    with pytest.raises(InputError, match='every target is ignore_index'): class_priors([255, 255], 3, ignore_index=255)

def test_gains_and_problems_from_data_frames():
    import pandas as pd
    p, G = torch.rand(5, 3).softmax(-1), torch.rand(3, 3)
    frame = lambda x: pd.DataFrame(x.numpy(), index=list('xyz')[:len(x)] if len(x) == 3 else None)
    assert bayes_rule(frame(p), frame(G)).equal(bayes_rule(p, G)) and bayes_rule(p.numpy(), G.tolist()).equal(bayes_rule(p, G))
    for B in (frame(G), G, G.tolist()):
        problem = Problem(frame(G), [B, B], [.1, .2], pd.Series([.5, .3, .2]))
        assert problem.gain([1., 1]).allclose(3 * G.double())
    with pytest.raises(InputError, match=r'gain has shape \(2, 2\); with 3 classes it must be \(3, 3\)'): bayes_rule(p, torch.eye(2))
    with pytest.raises(InputError, match='A and B must be finite'): Problem(G * torch.nan, [G], [.1], [.5, .3, .2])


def test_groups_by_name_and_in_any_container():
    import pandas as pd
    by_number = worst_case_recall(PRIORS, [0, 0, 1, 1])
    for groups in (['common', 'common', 'rare', 'rare'], np.array(['common', 'common', 'rare', 'rare']), pd.Series(['common', 'common', 'rare', 'rare'], index=[3, 1, 2, 0])):
        problem = worst_case_recall(PRIORS, groups)
        assert problem.names == ['common', 'rare'] and problem.groups.equal(by_number.groups)
        assert problem.violations(random_confusion()).equal(by_number.violations(random_confusion()))
        assert group_mean(torch.tensor([1., torch.nan, 3, 5]), groups).equal(torch.tensor([1., 4]))
    for groups in (np.array([0, 0, 1, 1], 'int16'), pd.Series([0, 0, 1, 1]), (0, 0, 1, 1), torch.tensor([0, 0, 1, 1]), [False, False, True, True]):
        assert worst_case_recall(PRIORS, groups).groups.equal(by_number.groups)

@pytest.mark.parametrize('groups,message', [([0, 0, 1], '3 entries; give one group for each of 4 classes'), ([[0], [1, 2], [3], [0]], 'give one group for each'),
    ([0, 0, 1, 1.5], 'holds 1.5; give whole numbers'), (np.array([0., 0, 1, 1]), 'holds 0.0; give whole numbers'), ([0, 0, -1, 1], 'without gaps'), ([0, 0, 2, 2], 'without gaps'),
    (['a', 'a', None, 'b'], 'give whole numbers'), ([0, 'a', 1, 1], "holds 'a'"), (3, 'give one group for each of 4 classes'), (torch.zeros(4, 2), 'give one group for each')])
@pytest.mark.parametrize('make', [worst_case_recall, lambda p, g: balanced_coverage_constraint(p, groups=g)])
def test_groups_that_are_none(make, groups, message):
    with pytest.raises(InputError, match=message) as e: make(PRIORS, groups)
    assert '\n' not in str(e.value)

@pytest.mark.parametrize('groups,message', [([0, 1, 2, 5], r'groups \+ 1 holds \[6\]'), ([0, 1, 2, -2], 'groups'), ([0, 1], r'shape \(2,\)'), (['a'] * 4, 'groups is a list')])
def test_groups_of_a_class_problem(groups, message):
    with pytest.raises(InputError, match=message): ClassProblem(PRIORS, diag=1., groups=groups, b=[.1] * 4)

@pytest.mark.parametrize('make,message', [(lambda: recall_constraint(PRIORS, None), 'tau is None; it must lie between 0 and 1'), (lambda: precision_constraint(PRIORS, 'x'), "tau is 'x'"),
    (lambda: coverage_constraint(PRIORS, 'x'), "fraction is 'x'"), (lambda: balanced_coverage_constraint(PRIORS, torch.nan), 'fraction is nan'),
    (lambda: worst_case_recall({'a': .5, 'b': .5}), 'priors is a dict that does not hold numbers'), (lambda: worst_case_recall('ab'), 'priors is a str'),
    (lambda: worst_case_recall(None), 'priors is a NoneType'), (lambda: coverage_constraint(PRIORS, target_priors=['a'] * 4), 'target_priors is a list'),
    (lambda: ClassProblem(PRIORS, diag='x'), 'diag is a str'), (lambda: ClassProblem(PRIORS, diag=[1., 2]), r'diag has shape \(2,\)'),
    (lambda: head_tail_groups(PRIORS, 'x'), "tail is 'x'"), (lambda: accuracy_goal(PRIORS, weights=[1., torch.inf, 1, 1]), 'one finite number')])
def test_bare_type_errors_became_one_line(make, message):
    with pytest.raises(InputError, match=message) as e: make()
    assert '\n' not in str(e.value)
