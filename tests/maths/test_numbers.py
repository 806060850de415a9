"Numbers and labels of any library and width mean what they say, and what is no number is told in one line"
import math, numpy as np, pytest, torch
from ncdo.features import GoalClassifier
from ncdo.gains import InputError, accuracy_goal, balanced_coverage_constraint, check_priors, class_priors, confusion_matrix
from ncdo.gains import geometric_mean_gain, head_tail_groups, recall_constraint, worst_case_recall
from ncdo.goals import alpha_fair_goal, micro_f1_goal, recall_at_precision, soft_min_goal, worst_k_goal
from ncdo.postshift import PostShiftClassifier, post_shift
from ncdo.reductions import SaddlePoint

PRIORS = [.5, .3, .2]
C = torch.tensor([[.4, .05, .05], [.1, .15, .05], [.05, .05, .1]], dtype=torch.float64)
WHOLE = [lambda n: n, float, np.uint8, np.int8, np.int64, np.float32, np.float64, torch.tensor, np.array, lambda n: torch.tensor(float(n))]
REAL = [lambda x: x, np.float32, np.float64, torch.tensor, np.array, lambda x: torch.tensor(x, dtype=torch.float64)]


def value(problem): return problem.objective(C).item()
def play(problem):
    game = SaddlePoint(problem)
    for _ in range(3): game.update(C)
    return game.gain


@pytest.mark.parametrize('kind', WHOLE)
@pytest.mark.parametrize('make', [lambda i: micro_f1_goal(PRIORS, i), lambda i: worst_k_goal(PRIORS, i), lambda i: recall_at_precision(PRIORS, .5, i),
    lambda i: recall_at_precision(PRIORS, [.5, .6, .7], i), lambda i: alpha_fair_goal(PRIORS, i), lambda i: soft_min_goal(PRIORS, i)])
def test_a_number_means_the_same_whatever_it_came_in(make, kind):
    ours, plain = make(kind(2)), make(2)
    assert value(ours) == value(plain) and torch.equal(play(ours), play(plain)) and ours.names == plain.names


@pytest.mark.parametrize('kind', WHOLE)
def test_a_number_of_updates_in_any_type(kind):
    p, y = torch.softmax(torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), 1), torch.arange(60) % 3
    assert len(post_shift(worst_case_recall(PRIORS), p, y, step_size=1, iterations=kind(100))[1].history) == 101


@pytest.mark.parametrize('kind', REAL)
@pytest.mark.parametrize('make', [lambda x: head_tail_groups(torch.arange(1., 9) / 36, x), lambda x: recall_constraint(PRIORS, x).b,
    lambda x: SaddlePoint(worst_case_recall(PRIORS), x, floor=x / 100, tolerance=x).step_size, lambda x: alpha_fair_goal(PRIORS, x, floor=x).objective(C),
    lambda x: worst_case_recall(PRIORS).met(torch.tensor([.2, .3, .1]), x)])
def test_a_share_means_the_same_whatever_it_came_in(make, kind): assert torch.equal(torch.as_tensor(make(kind(.25))), torch.as_tensor(make(.25)))


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, np.uint8, np.int16, np.uint64])
def test_labels_of_any_width(dtype):
    "Comparisons in eight bits wrap round: -100 is 156 there"
    top = 128 if dtype in (torch.int8,) else 256
    y = torch.arange(top)
    labels = y.numpy().astype(dtype) if isinstance(dtype, type) else y.to(dtype)
    for ignored in (None, -100):
        for check in (True, False):
            assert torch.equal(confusion_matrix(labels, labels, top, ignored, check), torch.eye(top, dtype=torch.float64) / top)
        assert torch.equal(class_priors(labels, top, ignored), torch.full((top,), 1 / top, dtype=torch.float64))
    assert confusion_matrix(labels, labels, top, 3)[3, 3] == 0 and class_priors(labels[:3], 300, floor=1e-4)[2] > .3


@pytest.mark.parametrize('kind', [np.int64, np.uint8, float, torch.tensor])
def test_a_number_of_classes_in_any_type(kind):
    y = torch.arange(100) % 20
    assert torch.equal(confusion_matrix(y, y, kind(20)), confusion_matrix(y, y, 20)) and torch.equal(class_priors(y, kind(20)), class_priors(y, 20))


NOT_WHOLE = [True, '1', None, -1, .5, math.nan, math.inf, 10 ** 30, [1, 2], np.array([1])]
@pytest.mark.parametrize('wrong', NOT_WHOLE)
@pytest.mark.parametrize('what,make', [('background', lambda x: micro_f1_goal(PRIORS, x)), ('k', lambda x: worst_k_goal(PRIORS, x)),
    ('class_index', lambda x: recall_at_precision(PRIORS, .5, x)), ('num_classes', lambda x: confusion_matrix([0, 1], [0, 1], x)),
    ('num_classes', lambda x: class_priors([0, 1], x)), ('iterations', lambda x: post_shift(worst_case_recall(PRIORS), torch.eye(3), [0, 1, 2], iterations=x))])
def test_what_is_no_whole_number_is_told(what, make, wrong):
    with pytest.raises(InputError) as e: make(wrong)
    assert str(e.value).startswith(f'{what} is ') and '\n' not in str(e.value)


@pytest.mark.parametrize('wrong', [True, '1', .5, math.nan, [1], 10 ** 30])
@pytest.mark.parametrize('make', [lambda x: confusion_matrix([0, 1], [0, 1], 2, x), lambda x: class_priors([0, 1], 2, x)])
def test_what_cannot_be_ignored_is_told(make, wrong):
    with pytest.raises(InputError, match='ignore_index is .*; it must be a whole number'): make(wrong)


@pytest.mark.parametrize('wrong', [True, '1', None, -1, math.nan, math.inf, 10 ** 400, [.1]])
@pytest.mark.parametrize('what,make', [('alpha', lambda x: alpha_fair_goal(PRIORS, x)), ('beta', lambda x: soft_min_goal(PRIORS, x)),
    ('accuracy', lambda x: recall_at_precision(PRIORS, .5, 0, accuracy=x)), ('step_size', lambda x: SaddlePoint(worst_case_recall(PRIORS), x)),
    ('max_multiplier', lambda x: SaddlePoint(worst_case_recall(PRIORS), max_multiplier=x)), ('tolerance', lambda x: worst_case_recall(PRIORS).slack(x)),
    ('tail', lambda x: head_tail_groups(PRIORS, x)), ('floor', lambda x: geometric_mean_gain(PRIORS, PRIORS, x)), ('tau', lambda x: recall_constraint(PRIORS, x))])
def test_what_is_no_number_is_told(what, make, wrong):
    with pytest.raises(InputError) as e: make(wrong)
    assert str(e.value).startswith(what) and '\n' not in str(e.value)


@pytest.mark.parametrize('wrong', [.5, 1.5, -1, True, '1', math.nan, math.inf])
def test_a_floor_that_leaves_no_room_is_told(wrong):
    with pytest.raises(InputError, match='floor is .*; it must be less than 1/2'): class_priors([0, 0, 1], 2, floor=wrong)
    with pytest.raises(InputError, match='floor is .*; it must be less than 1/2'): check_priors([.5, .5], floor=wrong)


def test_a_floor_raises_what_is_smaller():
    assert torch.allclose(class_priors([0, 0, 0], 2, floor=.1), torch.tensor([10 / 11, 1 / 11], dtype=torch.float64))
    with pytest.raises(InputError, match='class 1 is 0'): class_priors([0, 0, 0], 2, floor=0)


@pytest.mark.parametrize('top', [4, 10 ** 9, 10 ** 30])
@pytest.mark.parametrize('make', [lambda g: worst_case_recall([.25] * 4, g), lambda g: balanced_coverage_constraint([.25] * 4, groups=g)])
def test_a_group_far_out_takes_no_memory(make, top):
    with pytest.raises(InputError, match='without gaps'): make([0, 0, 1, top])


@pytest.mark.parametrize('targets', [[True] * 3, np.array([True, False, True]), torch.tensor([True] * 3)])
def test_truth_values_are_no_targets(targets):
    with pytest.raises(InputError, match='tau holds truth values'): recall_constraint(PRIORS, targets)


def test_priors_for_head_and_tail_are_priors():
    for wrong in ([.5, math.nan, .5], [.5, -.5, 1.], [[.5, .5]], .5):
        with pytest.raises(InputError, match='priors'): head_tail_groups(wrong, .4)


def test_the_geometric_mean_is_the_limit():
    near = [alpha_fair_goal(PRIORS, a).objective(C).item() for a in (1, sum([.1] * 10), 1 + 1e-15, 1 + 1e-6)]
    assert np.allclose(near, near[0], rtol=1e-5)


# Folds and seeds of the classifiers

def held_out(n=90):
    y = np.sort(np.arange(n) % 3)
    return np.random.default_rng(0).dirichlet([1, 1, 1], n) * .5 + np.eye(3)[y] * .5, y


def fitted(**options): return PostShiftClassifier(**options).fit(*held_out()).cross_fitted_objective_


def test_a_number_of_folds_in_any_type():
    assert fitted(cv=3) == fitted(cv=np.int64(3)) == fitted(cv=3.) == fitted(cv=torch.tensor(3))
    assert fitted(cv=np.int64(1000)) == fitted(cv=1000)


@pytest.mark.parametrize('make', [PostShiftClassifier, GoalClassifier])
@pytest.mark.parametrize('option,wrong', [*[('cv', w) for w in (1, 0, True, -1, '3', .5, np.array([3])[0] - 3)],
    *[('random_state', w) for w in (1., '1', torch.tensor(1.), -1, 2 ** 32, True, 'x')]])
def test_folds_and_seeds_that_cannot_be(make, option, wrong):
    "Before anything is fitted"
    model = make(**{option: wrong})
    with pytest.raises(InputError, match=f'{option} is .*; it must be a whole number') as e: model.fit(*held_out())
    assert f'is {wrong!r};' in str(e.value) or f'is {wrong};' in str(e.value)
    assert not hasattr(model, 'gain_')


def test_accuracy_takes_weights_of_any_type():
    assert torch.equal(play(accuracy_goal(PRIORS, np.array([1, 2, 3], 'uint8'))), play(accuracy_goal(PRIORS, [1., 2., 3.])))
