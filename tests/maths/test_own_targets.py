"A target for each class: what it means, whom it binds, that the optimum is reached, and what is refused"
import numpy as np, pandas as pd, pytest, torch
from ncdo.data import toy_distribution
from ncdo.gains import (InputError, Problem, balanced_coverage, balanced_coverage_constraint, bayes_rule, coverage, coverage_constraint,
    head_tail_groups, precision_constraint, recall, recall_constraint)
from ncdo.postshift import PostShiftClassifier, post_shift
from ncdo.reductions import SaddlePoint
from ncdo.theory import compare_with_program, expected_confusion, solve_linear_program

GOALS = dict(recall=recall_constraint, precision=precision_constraint, coverage=coverage_constraint, balanced=balanced_coverage_constraint)
OWN = dict(recall=[.5, .6, .7, .4], precision=[.5, .4, .6, .7], coverage=[.95, .6, .8, 0], balanced=[.3, 1, .95, .7])
P = torch.tensor([.4, .3, .2, .1], dtype=torch.float64)


def random_confusion(seed=0):
    C = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + torch.eye(4)
    C = C / C.sum(1, keepdim=True) * P[:, None]
    return C


@pytest.mark.parametrize('name', GOALS)
def test_equal_targets_are_one_target(name):
    C, lam = random_confusion(), torch.rand(4, dtype=torch.float64)
    one, each = GOALS[name](P, .7), GOALS[name](P, [.7] * 4)
    assert one.gain(lam).allclose(each.gain(lam), atol=1e-7) and one.violations(C).allclose(each.violations(C), atol=1e-7)


@pytest.mark.parametrize('target_priors', [None, [.25] * 4])
def test_violations_are_those_of_the_definition(target_priors):
    "At the training mix and at another; C has the training mix"
    C, t = random_confusion(), P if target_priors is None else torch.tensor(target_priors).double()
    at, own = C / P[:, None] * t[:, None], {k: torch.tensor(v).double() for k, v in OWN.items()}
    expected = dict(recall=own['recall'] - recall(C), precision=own['precision'] * coverage(at) - at.diagonal(),
        coverage=own['coverage'] * t - coverage(at), balanced=own['balanced'] / 4 - balanced_coverage(C))
    for name, make in GOALS.items(): assert make(P, OWN[name], target_priors=target_priors).violations(C).allclose(expected[name]), name


@pytest.mark.parametrize('name', GOALS)
@pytest.mark.parametrize('form', [tuple, np.array, torch.tensor, pd.Series, lambda v: np.array(v)[::-1].copy()[::-1], lambda v: torch.tensor(v, requires_grad=True)])
def test_any_container(name, form):
    lam = torch.rand(4, dtype=torch.float64)
    assert GOALS[name](P, form(OWN[name])).gain(lam).allclose(GOALS[name](P, OWN[name]).gain(lam))
    assert GOALS[name](P, np.float32(.5)).b.equal(GOALS[name](P, torch.tensor(.5)).b)


def test_a_target_for_each_group():
    groups = head_tail_groups(P, .25)
    problem = balanced_coverage_constraint(P, [.95, .6], groups)
    assert problem.b.tolist() == pytest.approx([.95 / 4, .15])
    named = balanced_coverage_constraint(P, pd.Series([.95, .6], ['common', 'rare']), ['common'] * 3 + ['rare'])
    assert named.b.equal(problem.b) and named.names == ['common', 'rare']


@pytest.mark.parametrize('name', GOALS)
def test_the_program_is_reached(name):
    "Post-shift and the game, on 3,000 points of known probabilities, against scipy's linear program"
    p = toy_distribution(3000)[2]
    problem = GOALS[name](p.mean(0), OWN[name])
    optimum = solve_linear_program(problem, p)
    gain, game = post_shift(problem, p, p, iterations=1000)
    objective, violations = problem.evaluate(expected_confusion(p, bayes_rule(p, gain)))
    assert abs(objective - optimum) < 2e-3 and game.feasible and problem.met(violations).all() and (game.multipliers > 0).any()
    found = compare_with_program(problem, p, .3, 600)
    assert abs(found['average_gap']) < 5e-3 and found['average_violation'] < 5e-3


@pytest.mark.parametrize('name', GOALS)
def test_a_class_with_target_0_has_no_demand(name):
    "Its multiplier stays 0, it is met even if nobody was seen of it, and the optimum is that of the other constraints alone"
    own, C = [.5, .4, .3, 0], random_confusion()
    problem = GOALS[name](P, own)
    assert problem.free.tolist() == [False] * 3 + [True]
    game = SaddlePoint(problem, 1.)
    for seed in range(5): game.update(random_confusion(seed) * torch.tensor([1., .5, 2, 1])[None])
    assert game.multipliers[3] == 0 and problem.met(torch.full((4,), torch.nan)).tolist() == [False] * 3 + [True]
    C[3] = 0
    assert problem.met(problem.violations(C), 2.)[3] and (problem.violations(C)[3] <= 0 or problem.violations(C)[3].isnan())
    dense = lambda keep: Problem(A, B[keep], problem.b[keep], P, names=[str(i) for i in range(len(keep))])
    A = problem.gain(torch.zeros(4))
    B = torch.stack([problem.gain(e) - A for e in torch.eye(4).double()])
    B = B.where(B.abs() > 1e-12, 0)
    assert dense([0, 1, 2, 3]).free.equal(problem.free)
    p = toy_distribution(300)[2]
    assert solve_linear_program(problem, p) == pytest.approx(solve_linear_program(dense([0, 1, 2]), p))


def test_soft_labels_and_estimators():
    p = toy_distribution(400)[2]
    post = PostShiftClassifier(recall_constraint(p.mean(0), [0, .9, 0, 0])).fit(p.numpy(), p.argmax(1).numpy())
    assert post.reduction_.multipliers[[0, 2, 3]].tolist() == [0, 0, 0]
    gain, game = post_shift(recall_constraint(p.mean(0), [0, .9, 0, 0]), p, p)
    assert game.feasible and gain[1, 1] * p.mean(0)[1] > gain[0, 0] * p.mean(0)[0]


@pytest.mark.parametrize('name', GOALS)
@pytest.mark.parametrize('own,message', [ # chkstyle: ignore-node
    ([.5, .5], r'has shape \(2,\); give one number, or one for each of 4 classes'),
    ([[.5] * 4], r'has shape \(1, 4\); give one number'),
    ([.5, .5, 1.2, .5], 'of class 2 is 1.2; it must lie between 0 and 1'),
    ([.5, -.1, .5, .5], 'of class 1 is -0.1; it must'),
    ([.5, .5, .5, float('nan')], 'of class 3 is nan; it must'),
    (torch.tensor(2.), 'is 2.0; it must lie between 0 and 1'),
    ('most', "is 'most'; it must lie"),
    (None, 'is None; it must lie'),
    ({'cat': .5}, 'is a dict that does not hold numbers'),
    ([.5, 'x', .5, .5], 'is a list that does not hold numbers'),
    (pd.Series([.5, .6, .7, .8], [2, 0, 1, 3]), r'has the index \[2, 0, 1, 3\]; give one number for each of the classes 0..3, in that order')])
def test_mistakes_name_the_class_and_the_mend(name, own, message):
    what = 'tau' if name in ('recall', 'precision') else 'fraction'
    with pytest.raises(InputError, match=f'^{what} {message}'): GOALS[name](P, own)


def test_mistakes_about_groups():
    groups = head_tail_groups(P, .25)
    for own, message in (([.5] * 4, r'shape \(4,\); give one number, or one for each of 2 groups'), ([.5, 2], 'fraction of group tail is 2.0; it'),
        (pd.Series([.5, .6], ['tail', 'head']), r"index \['tail', 'head'\]; give one number for each of the groups head..tail, in that order")):
        with pytest.raises(InputError, match=message): balanced_coverage_constraint(P, own, groups)
