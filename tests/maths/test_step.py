"Post-shift finds its step, whatever the scale of the probabilities, and is never worse than no shift"
import warnings, itertools, numpy as np, pytest, torch
from ncdo.gains import (Problem, balanced_coverage_constraint, bayes_rule, coverage_constraint, precision_constraint, recall_constraint,
    worst_case_recall)
from ncdo.postshift import PostShiftClassifier, post_shift, sample_confusion
from ncdo.reductions import SaddlePoint


def sample(temperature=1., n=300, seed=0):
    "Three classes of .7, .2 and .1, scores softened by a temperature"
    rng = np.random.default_rng(seed)
    y = np.r_[np.arange(3), rng.choice(3, n - 3, p=[.7, .2, .1])]
    z = rng.normal(size=(n, 3))
    z[np.arange(n), y] += 1.5
    z += np.log([.7, .2, .1])
    q = np.exp(z / temperature - (z / temperature).max(1, keepdims=True))
    return q / q.sum(1, keepdims=True), y


def test_soft_probabilities():
    "No shift has a worst recall of .262; a step of .1 finds .771, a step of 1 nothing"
    q, y = sample(10)
    post = PostShiftClassifier(worst_case_recall, cv=None).fit(q, y)
    assert post.base_objective_ < .27 and post.objective_ >= .77
    assert PostShiftClassifier(worst_case_recall, cv=None, step_size=1.).fit(q, y).objective_ < .27


@pytest.mark.parametrize('seed', range(3))
def test_the_same_rule_at_every_temperature(seed):
    "argmax of z / T + log a: for a diagonal goal the best rule does not depend on T"
    found = [float(PostShiftClassifier(worst_case_recall, cv=None).fit(*sample(t, seed=seed)).objective_) for t in (.1, 1, 10, 100, 1000)]
    assert max(found) - min(found) <= .03, found


def rules(name, problem, temperature):
    "Brute force: gains diag(a) for three classes, or, where the goal's own are others, those of a grid of multipliers"
    grid = np.exp(np.linspace(-6, 6, 60) / temperature)
    if name == 'groups': return [problem.gain([t, 1 - t]) for t in 1 / (1 + grid)]
    if name == 'precision': return [problem.gain(v) for v in itertools.product([0, *np.geomspace(.003, 10, 13)], repeat=3)]
    return [torch.diag(torch.tensor([1, a, b])) for a, b in itertools.product(grid, grid)]


def best_of_all(name, problem, temperature, p, y):
    "Rank of the best rule: feasible or not, and its objective, or its smallest violation"
    w, game = torch.full((len(y),), 1 / len(y), dtype=torch.float64), SaddlePoint(problem)
    for gain in rules(name, problem, temperature): game.update(sample_confusion(y, bayes_rule(p, gain), w, 3))
    return game._rank(game.best)


GOALS = dict(worst=worst_case_recall, groups=lambda p: worst_case_recall(p, groups=[0, 1, 1]), recall=lambda p: recall_constraint(p, .7),
    coverage=lambda p: coverage_constraint(p, .95), balanced=lambda p: balanced_coverage_constraint(p, .8), precision=lambda p: precision_constraint(p, .4))


@pytest.mark.parametrize('goal', GOALS)
@pytest.mark.parametrize('temperature', [1, 10])
def test_close_to_brute_force(goal, temperature):
    q, y = map(torch.as_tensor, sample(temperature))
    problem = GOALS[goal](torch.bincount(y) / len(y))
    gain, _ = post_shift(problem, q, y)
    game = SaddlePoint(problem)
    game.update(sample_confusion(y, bayes_rule(q, gain), torch.full((len(y),), 1 / len(y), dtype=torch.float64), 3))
    ours, best = game._rank(0), best_of_all(goal, problem, temperature, q.double(), y)
    assert ours[0] == best[0] and ours[1] >= best[1] - (.06 if goal == 'precision' else .02), (ours, best)


@pytest.mark.parametrize('seed', range(12))
def test_never_worse_than_no_shift_on_its_sample(seed):
    "Random probabilities, weights, soft labels, missing classes, goals"
    rng = np.random.default_rng(seed)
    m, n = int(rng.integers(3, 6)), 60
    p = torch.tensor(rng.dirichlet(np.ones(m) / 2, n))
    y = torch.tensor(rng.integers(0, m - seed % 2, n)) # Every other time a class is missing
    w = torch.tensor(rng.exponential(size=n)) if seed % 3 else None
    priors = torch.tensor(rng.dirichlet(np.ones(m)) * .9 + .1 / m)
    bounds = lambda p: recall_constraint(p, .5), lambda p: precision_constraint(p, .3)
    for make in (worst_case_recall, coverage_constraint, balanced_coverage_constraint, *bounds):
        problem = make(priors)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            gain, _ = post_shift(problem, p, y, w, iterations=60)
            game, weight = SaddlePoint(problem), (torch.ones(n).double() if w is None else w) / (n if w is None else w.sum())
            for predicted in (p.argmax(1), bayes_rule(p, gain)): game.update(sample_confusion(y, predicted, weight, m))
        assert game._rank(1) >= game._rank(0)


def test_a_target_that_is_missed_is_told():
    q, y = sample()
    with pytest.warns(UserWarning, match='no rule better than the model as it came, which misses the target of class'):
        PostShiftClassifier(lambda p: recall_constraint(p, 1.), cv=None, iterations=1).fit(q[:, :], y)


def test_a_class_nobody_saw_is_not_boosted():
    p = torch.tensor([[.6, .35, .05]] * 6 + [[.5, .45, .05]] * 4)
    y = torch.tensor([0] * 6 + [1] * 4)
    for step in (None, 1., .1):
        gain, _ = post_shift(worst_case_recall([.58, .38, .04]), p, y, step_size=step)
        assert bayes_rule(p, gain).tolist() == y.tolist()


def test_a_problem_of_ones_own():
    q, y = map(torch.as_tensor, sample(10))
    B = torch.diag_embed(torch.eye(3).double() * 3 / (torch.bincount(y) / len(y)).double()) / 3
    own, built_in = Problem(None, B, torch.zeros(3), torch.bincount(y) / len(y), domain='simplex'), worst_case_recall(torch.bincount(y) / len(y))
    a, b = [bayes_rule(q, post_shift(problem, q, y)[0]) for problem in (own, built_in)]
    assert (a == b).double().mean() > .97
