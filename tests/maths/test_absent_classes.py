"One policy for classes that the held-out sample lacks: values, what counts as met, where multipliers start, what is predicted"
import warnings, pytest, torch
from hypothesis import given, settings, strategies as st
from ncdo.gains import (ClassProblem, Problem, accuracy_goal, average_recall, average_recall_goal, balanced_coverage_constraint,
    coverage_constraint, group_mean, precision_constraint, recall, recall_constraint, worst_case_recall)
from ncdo.reductions import SaddlePoint

settings.register_profile('absent', max_examples=80, deadline=None, derandomize=True)
settings.load_profile('absent')

GOALS = { # chkstyle: ignore-node
    'worst': worst_case_recall, 'recall': lambda p, **k: recall_constraint(p, .6, **k), 'precision': lambda p, **k: precision_constraint(p, .6, **k),
    'certain precision': lambda p, **k: precision_constraint(p, 1., **k), 'coverage': coverage_constraint, 'balanced': balanced_coverage_constraint,
    'accuracy': accuracy_goal, 'average': average_recall_goal}
GROUPED = {'worst group': worst_case_recall, 'balanced group': balanced_coverage_constraint}

def as_dense(problem):
    "The same problem from its matrices"
    A = problem.gain(torch.zeros(problem.k)) / problem.ratio[:, None]
    B = torch.zeros(problem.k, problem.m, problem.m, dtype=torch.float64)
    for i, e in enumerate(torch.eye(problem.k, dtype=torch.float64)): B[i] = problem.gain(e) / problem.ratio[:, None] - A
    B = B.where(B.abs() > 1e-12, 0)
    return Problem(None if problem.domain == 'simplex' else A, B, problem.b, problem.priors, problem.target_priors, problem.domain, problem.names)

def random_priors(g, m):
    p = torch.rand(m, generator=g, dtype=torch.float64) + .05
    return p / p.sum()

def confusion_without(g, m, absent):
    C = torch.rand(m, m, generator=g, dtype=torch.float64) + 2 * torch.eye(m)
    C[absent] = 0
    return C / C.sum()

def drawn(seed, m):
    "Generator, priors, target priors or None, some absent classes (never all)"
    g = torch.Generator().manual_seed(seed)
    p, t = random_priors(g, m), random_priors(g, m) if seed % 2 else None
    absent = torch.rand(m, generator=g) < (0, .3, .6)[seed % 3]
    absent[torch.randint(m, (1,), generator=g)] = False
    return g, p, t, absent

def assert_same(a, b, C):
    for x, y in zip(a.evaluate(C), b.evaluate(C)): assert torch.allclose(x, y, equal_nan=True, rtol=1e-9), (x, y)

@given(st.integers(0, 10**6), st.integers(2, 6), st.sampled_from([*GOALS, *GROUPED]))
def test_class_problems_say_what_their_matrices_say(seed, m, name):
    g, p, t, absent = drawn(seed, m)
    k = 1 + seed % (m - 1)
    groups = torch.cat([torch.arange(k), torch.randint(k, (m - k,), generator=g)])
    problem = GOALS[name](p, target_priors=t) if name in GOALS else GROUPED[name](p, groups=groups, target_priors=t)
    dense = as_dense(problem)
    assert_same(problem, dense, confusion_without(g, m, absent))
    assert torch.allclose(problem.share, dense.share)

@given(st.integers(0, 10**6), st.integers(2, 7))
def test_so_do_class_problems_of_ones_own(seed, m):
    "Any signs, groups of one, of all, and classes in none"
    g, p, t, absent = drawn(seed, m)
    k = int(torch.randint(1, m + 1, (1,), generator=g))
    number = lambda: torch.randint(-2, 3, (m,), generator=g).double() * (torch.rand(m, generator=g) < .7)
    problem = ClassProblem(p, t, objective=number(), diag=number(), row=number(), column=number(),
        groups=torch.randint(-1, k, (m,), generator=g), b=torch.rand(k, generator=g))
    assert_same(problem, as_dense(problem), confusion_without(g, m, absent))

@given(st.integers(0, 10**6), st.integers(3, 6))
def test_the_estimate_is_of_the_classes_seen(seed, m):
    "Mean recall over the classes seen, coverage among them, and never more than 1"
    g, p, t, absent = drawn(seed, m)
    C, mix, groups = confusion_without(g, m, absent), p if t is None else t, torch.arange(m) % 2
    seen = mix * ~absent / (mix * ~absent).sum()
    coverage = (C / C.sum(-1, keepdim=True)).nan_to_num() * seen[:, None]
    problem = coverage_constraint(p, target_priors=t)
    assert torch.isclose(problem.objective(C), average_recall(C))
    assert torch.allclose((problem.b - problem.violations(C))[~absent], coverage.sum(0)[~absent]) and problem.violations(C)[absent].isnan().all()
    assert torch.allclose(-worst_case_recall(p, groups, t).violations(C), group_mean(recall(C), groups), equal_nan=True)
    assert torch.isclose(accuracy_goal(p, target_priors=t).objective(C), coverage.diagonal().sum())

def test_a_perfect_classifier_has_recall_1_whatever_is_missing():
    "1.25 once, from matrices, where a class of share .2 was missing"
    p, C = torch.tensor([.5, .3, .2]), torch.diag(torch.tensor([.6, .4, 0]))
    B = torch.diag_embed(torch.eye(3) / p)
    for problem in (worst_case_recall(p), Problem(None, B, [0, 0, 0], p, domain='simplex'), Problem(B.sum(0) / 3, B, [.9] * 3, p)):
        objective, violations = problem.evaluate(C)
        assert torch.isclose(objective, torch.tensor(1.).double()) and violations[2].isnan()
        assert torch.allclose((problem.b - violations)[:2], torch.ones(2).double())

def test_the_objective_is_unknown_only_where_nothing_that_it_rewards_occurs():
    C = torch.diag(torch.tensor([1., 1, 0]))
    rewards = lambda *a: Problem(torch.diag(torch.tensor(a)), torch.zeros(0, 3, 3), [], [.5, .3, .2]).objective(C)
    assert rewards(0., 0, 1).isnan() and abs(rewards(1., 0, 1) - .7) < 1e-6 and accuracy_goal([.5, .3, .2], weights=[0., 0, 1]).objective(C).isnan()

def test_a_constraint_is_known_by_its_own_classes():
    "Those whose right answers count in it; without such, the rows it has entries in"
    cost = torch.zeros(1, 3, 3)
    cost[0, 0, 2] = cost[0, 1, 2] = -1 # Classes 0 and 1 not taken for 2
    known = lambda B, *rows: ~Problem(None, B, [-.1], [.5, .3, .2]).violations(torch.eye(3)[list(rows)].sum(0).diag()).isnan()
    assert known(cost, 0, 2) and known(cost, 1) and not known(cost, 2)
    assert known(cost + torch.diag(torch.tensor([0., 0, 1])), 2) and not known(cost + torch.diag(torch.tensor([0., 0, 1])), 0, 1)

def test_nothing_unknown_is_met():
    problem, C = recall_constraint([.5, .3, .2], .5), torch.diag(torch.tensor([.6, .4, 0]))
    game = SaddlePoint(problem)
    with pytest.warns(UserWarning, match='class 2'): game.update(C)
    assert problem.met(problem.violations(C)).tolist() == [True, True, False] and game.best == 0 and not game.feasible
    game.update(torch.diag(torch.tensor([.5, .3, .2])) - torch.tensor([[.2, -.2, 0], [0, 0, 0], [0, 0, 0]]))
    assert game.feasible and game.best == 1 # Known to be met before what may be, though its accuracy is lower
    assert worst_case_recall([.5, .3, .2]).met(torch.tensor([-.5, torch.nan, 0])).tolist() == [True, False, True]

def test_a_class_nobody_saw_starts_without_a_boost():
    p, C = [.58, .38, .04], torch.diag(torch.tensor([.6, .4, 0]))
    game = SaddlePoint(worst_case_recall(p), 1.)
    with pytest.warns(UserWarning, match='no examples of class 2 in this confusion matrix; its multiplier starts without a boost'): game.update(C)
    assert torch.allclose(game.multipliers, torch.tensor([.48, .48, .04]).double()) and torch.isclose(game.gain[2, 2], torch.tensor(1.).double())
    assert game.history[0]['multipliers'].tolist() == [1 / 3] * 3 # What the first classifier was made with
    game.update(torch.eye(3) / 3 + torch.diag(torch.tensor([.1, 0]), 1))
    before = game.multipliers
    with pytest.warns(UserWarning, match='its multiplier stays as it is'): game.update(C)
    assert game.multipliers[2] == before[2] != .04

@pytest.mark.parametrize('known', [[True, True, False], [False, False, True], [False] * 3, [True] * 3])
def test_neutral_multipliers(known):
    lam, known = torch.tensor([.2, .3, .5]).double(), torch.tensor(known)
    problem = worst_case_recall([.58, .38, .04])
    start = problem.neutral(lam, known)
    assert torch.isclose(start.sum(), lam.sum()) and torch.allclose(start[~known], problem.priors[~known]) and (start >= 0).all()
    if known.all(): assert start.equal(lam)
    elif known.sum() == 2: assert torch.isclose(start[0] / start[1], lam[0] / lam[1])
    assert recall_constraint(problem.priors, .5).neutral(lam, known).tolist() == lam.where(known, 0).tolist()
    grouped, half = worst_case_recall(problem.priors, [0, 1, 1]), torch.tensor([.5, .5]).double()
    assert grouped.neutral(half, torch.tensor([True, False])).allclose(torch.tensor([.58, .42]).double())


def test_a_stack_and_a_saddle_point_agree_where_a_class_is_missing_from_validation():
    from dataclasses import replace
    from ncdo.data import load
    from ncdo.stacks import Stack
    from ncdo.training import Member, Recipe
    data = load('digits-lt')
    data = replace(data, validation=data.validation[(data.y[data.validation] != 9) & (data.y[data.validation] != 4)])
    groups = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0, 0, 1]) # Nobody of group 1 is there
    goals = [worst_case_recall(data.priors), worst_case_recall(data.priors, groups), coverage_constraint(data.priors), recall_constraint(data.priors, .9)]
    stack = Stack([Member(data, g, 'auto', 0) for g in goals], 'mlp-16', Recipe(steps=24, batch_size=32, update_every=4), 'cpu')
    games = [SaddlePoint(g, m.step_size) for g, m in zip(goals, stack.members)]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for step in range(24):
            if step % 4 == 0:
                for game, C in zip(games, stack.confusion('validation')): game.update(C)
            stack.train_step()
    for game, mine in zip(games, [stack.goals.reduction(k) for k in range(len(stack.members))]):
        assert mine.multipliers.equal(game.multipliers) and mine.best == game.best and mine.feasible == game.feasible
        for column in ('multipliers', 'objective', 'violations'):
            assert torch.stack([h[column] for h in mine.history]).allclose(torch.stack([h[column] for h in game.history]), equal_nan=True)
    assert torch.allclose(games[0].multipliers[[4, 9]], data.priors[[4, 9]]) and not games[3].feasible
