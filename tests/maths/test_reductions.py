"The saddle point against the linear program, its bookkeeping and its state"
import math, numpy as np, pandas as pd, pytest, torch
from ncdo.gains import (InputError, balanced_coverage_constraint, bayes_rule, confusion_matrix, coverage_constraint, head_tail_groups, precision_constraint,
    recall_constraint, worst_case_recall)
from ncdo.reductions import SaddlePoint, StochasticClassifier, best_mixture, plot_history, update_multipliers
from ncdo.theory import compare_with_program, dual_value, expected_confusion, play, solve_linear_program, toy_probabilities

PROBLEMS = {'worst-case recall': worst_case_recall, 'recall': lambda p: recall_constraint(p, .5), 'precision': lambda p: precision_constraint(p, .5),
    'coverage': coverage_constraint, 'balanced coverage': balanced_coverage_constraint}
STEPS = dict(zip(PROBLEMS, (.3, .1, .3, .1, .1)))

@pytest.mark.parametrize('name', PROBLEMS)
@pytest.mark.parametrize('seed, n, m', [(2, 12, 3), (5, 20, 4)])
def test_on_a_finite_toy_the_average_reaches_the_program(name, seed, n, m):
    p = toy_probabilities(n, m, seed=seed)
    found = compare_with_program(PROBLEMS[name](p.mean(0)), p, .1, 4000)
    if math.isnan(found['optimum']): pytest.skip('infeasible draw')
    assert abs(found['average_gap']) < 1e-3 and found['average_violation'] < 1e-3
    assert -1e-9 <= found['dual_gap'] < 1e-3

@pytest.mark.parametrize('name', PROBLEMS)
def test_on_many_points_the_best_iterate_reaches_the_program(name):
    p = toy_probabilities(3000, seed=1)
    found = compare_with_program(PROBLEMS[name](p.mean(0)), p, STEPS[name], 1000)
    assert abs(found['best_gap']) < 1e-3 and found['best_violation'] <= 1e-3 and -1e-9 <= found['dual_gap'] < 1e-3 and found['game'].feasible

def test_the_dual_value_bounds_the_optimum_at_any_multipliers():
    p = toy_probabilities(15, 3, seed=0)
    for make in PROBLEMS.values():
        problem = make(p.mean(0))
        optimum, lam = solve_linear_program(problem, p), torch.rand(3, dtype=torch.float64)
        if problem.domain == 'simplex': lam = lam / lam.sum()
        assert math.isnan(optimum) or dual_value(problem, p, lam) >= optimum - 1e-9

def test_targets_other_than_the_training_mix_are_reached_too():
    p = toy_probabilities(3000, seed=1)
    problem = coverage_constraint(p.mean(0), target_priors=[.25] * 4)
    found = compare_with_program(problem, p, .1, 1000)
    assert abs(found['best_gap']) < 1e-3 and found['best_violation'] <= 1e-3

def test_head_and_tail():
    p = toy_probabilities(3000, seed=1)
    found = compare_with_program(worst_case_recall(p.mean(0), head_tail_groups(p.mean(0), .25)), p, .3, 500)
    assert abs(found['best_gap']) < 1e-3 and found['game'].problem.names == ['head', 'tail']

def test_infeasible_ends_bounded_and_says_so():
    p = toy_probabilities(500, seed=1)
    game = play(SaddlePoint(recall_constraint(p.mean(0), .95), 1., max_multiplier=5.), p, 400)
    assert not game.feasible and game.multipliers.max() <= 5 and game.at_bound and math.isnan(solve_linear_program(game.problem, p))

def test_updates_by_hand():
    lam, v = torch.tensor([.25, .75], dtype=torch.float64), torch.tensor([-.2, -.6], dtype=torch.float64)
    expected = lam * (.5 * v).exp()
    assert torch.allclose(update_multipliers(lam, v, .5, 'simplex'), expected / expected.sum())
    assert torch.allclose(update_multipliers(lam, v, .5, 'nonnegative'), torch.tensor([.15, .45], dtype=torch.float64))
    assert update_multipliers(lam, torch.full((2,), torch.nan), .5, 'simplex').equal(lam)

def test_batched_updates_are_the_updates_of_each():
    lam, v = torch.rand(3, 4, dtype=torch.float64).softmax(-1), torch.randn(3, 4, dtype=torch.float64)
    for domain in ('simplex', 'nonnegative'):
        assert torch.allclose(update_multipliers(lam, v, .3, domain), torch.stack([update_multipliers(a, b, .3, domain) for a, b in zip(lam, v)]))

def test_starts_are_uniform_and_zero():
    assert SaddlePoint(worst_case_recall([.5, .5])).multipliers.tolist() == [.5, .5]
    assert SaddlePoint(coverage_constraint([.5, .5])).multipliers.tolist() == [0, 0]

def test_best_is_feasible_first_then_by_objective():
    game = SaddlePoint(coverage_constraint([.5, .5], .9))
    skewed, fair, better = [torch.tensor(c, dtype=torch.float64) for c in ([[.5, 0], [.4, .1]], [[.3, .2], [.2, .3]], [[.4, .1], [.1, .4]])]
    for C, best in ((skewed, 0), (fair, 1), (better, 2), (skewed, 2), (fair, 2)):
        game.update(C)
        assert game.best == best and game.improved == (best == len(game.history) - 1)
    assert game.feasible

def test_an_undefined_first_iterate_is_not_best_for_ever():
    game = SaddlePoint(worst_case_recall([.5, .3, .2], groups=[0, 0, 1]))
    game.history.append(dict(multipliers=game.multipliers, objective=torch.tensor(torch.nan), violations=torch.full((2,), torch.nan)))
    game.choose_best()
    assert game.best == 0
    game.update(torch.eye(3, dtype=torch.float64) / 3)
    assert game.best == 1

def test_state_resumes_exactly(tmp_path):
    p = toy_probabilities(200, seed=1)
    make = lambda: SaddlePoint(coverage_constraint(p.mean(0)), .5)
    whole, first, second = play(make(), p, 30), play(make(), p, 13), make()
    torch.save(first.state_dict(), tmp_path / 'state.pt')
    second.load_state_dict(torch.load(tmp_path / 'state.pt', weights_only=True))
    play(second, p, 17)
    assert torch.equal(whole.multipliers, second.multipliers) and whole.best == second.best and whole.average()['objective'] == second.average()['objective']
    with pytest.raises(InputError, match='number of classes 4, this problem 2'): SaddlePoint(coverage_constraint([.5, .5])).load_state_dict(first.state_dict())
    fresh = make()
    fresh.load_state_dict(make().state_dict())
    assert fresh.best is None and not fresh.history

@pytest.mark.parametrize('make', [lambda p: SaddlePoint(p, 0), lambda p: SaddlePoint(p, max_multiplier=-1), lambda p: SaddlePoint(p).average(),
    lambda p: plot_history(SaddlePoint(p)), lambda p: StochasticClassifier([]), lambda p: StochasticClassifier([len], weights=[-1.])])
def test_misuse_is_told_in_one_line(make):
    with pytest.raises(InputError): make(worst_case_recall([.5, .5]))

def test_stochastic_classifier_keeps_members_is_deterministic_and_reports_expectations():
    p = toy_probabilities(400, seed=1)
    zero, one = lambda x: torch.zeros(len(x)).long(), lambda x: torch.ones(len(x)).long()
    mix = StochasticClassifier([zero, one], weights=[3, 1], seed=5)
    assert torch.equal(mix(p), mix(p)) and torch.equal(mix(p)[50:70], mix(p[50:70])) and torch.equal(mix(p.flip(0)), mix(p).flip(0))
    assert abs(mix(p).double().mean() - .25) < .08 and not torch.equal(mix(p), StochasticClassifier([zero, one], [3, 1], seed=6)(p))
    y = torch.randint(2, (400,))
    assert torch.allclose(mix.confusion(p, y, 2), .75 * confusion_matrix(y, zero(p), 2) + .25 * confusion_matrix(y, one(p), 2))

ANSWERS = [lambda x, i=i: torch.full((len(x),), i) for i in range(2)]

@pytest.mark.parametrize('weights, message', [([torch.inf, 1], r'weights are \[inf, 1.0\]; each must be finite'), ([1, torch.nan], 'each must be finite'), ([1, -1], '0 or more'),
    ([0, 0], 'one of them positive'), ([1e308, 1e308], 'finite'), (1., r'shape \(\); give one for each of 2 members'), ([[1, 1]], r'shape \(1, 2\)'), ([1], r'shape \(1,\)'),
    ([1, 1, 1], r'shape \(3,\)'), ('11', 'weights is a str'), (['1', '1'], 'weights is a list that does not hold numbers'), (pd.Series([1, 3], [1, 0]), 'in their order')], ids=str)
def test_weights_of_members_are_checked(weights, message):
    with pytest.raises(InputError, match=message) as e: StochasticClassifier(ANSWERS, weights)
    assert '\n' not in str(e.value)

@pytest.mark.parametrize('weights', [[1, 3], (.25, .75), np.array([1, 3]), torch.tensor([1., 3]), pd.Series([1, 3]), [torch.tensor(1), torch.tensor(3)]], ids=repr)
def test_weights_of_any_library_are_probabilities(weights):
    assert StochasticClassifier(ANSWERS, weights).weights.tolist() == [.25, .75]

@pytest.mark.parametrize('members', [ANSWERS[0], torch.nn.Sequential(torch.nn.Identity()), 3, None, 'ab', [], [ANSWERS[0], 1], torch.ones(2), np.ones(2)], ids=repr)
def test_members_are_a_list_of_functions(members):
    with pytest.raises(InputError, match='members is a .*; give a list of functions') as e: StochasticClassifier(members)
    assert '\n' not in str(e.value)

def test_members_may_come_from_any_iterable():
    x = torch.zeros(3, 1)
    for members in (tuple(ANSWERS), iter(ANSWERS), dict(enumerate(ANSWERS)).values()):
        assert StochasticClassifier(members, [0, 1])(x).tolist() == [1] * 3

@pytest.mark.parametrize('seed', [1., np.int64(1), torch.tensor(1)], ids=repr)
def test_a_seed_is_the_same_in_every_type(seed):
    x = torch.arange(200.)[:, None]
    draws = lambda seed: StochasticClassifier(ANSWERS, seed=seed).draw(x)
    assert torch.equal(draws(seed), draws(1)) and not torch.equal(draws(1), draws(10)) and len(draws(-10 ** 18)) == 200

@pytest.mark.parametrize('seed', [True, None, 'a', 1.5, [1], math.nan, int('1' * 65)], ids=str)
def test_a_seed_that_is_none_is_refused(seed):
    with pytest.raises(InputError, match='seed is .*must be a whole number of at most 18 digits'): StochasticClassifier(ANSWERS, seed=seed)

@pytest.mark.parametrize('classes', ['2', 0, None, True, 1.5])
def test_a_number_of_classes_that_is_none_is_refused(classes):
    mix = StochasticClassifier(ANSWERS)
    assert torch.equal(mix.confusion(torch.zeros(2, 1), [0, 1], 2.), torch.full((2, 2), .25).double())
    with pytest.raises(InputError, match='num_classes is .*must be a whole number'): mix.confusion(torch.zeros(2, 1), [0, 1], classes)

@pytest.mark.parametrize('value', ['1', None, 1.5, True, math.nan, [1]], ids=str)
def test_counts_of_iterates_are_whole_numbers(value):
    game = played(worst_case_recall)
    for attempt in (game.average, lambda n: best_mixture(game, n)):
        with pytest.raises(InputError, match='must be a whole number') as e: attempt(value)
        assert '\n' not in str(e.value)
    assert game.average(1.)['objective'] == game.average(np.int64(1))['objective'] == game.average(1)['objective'] == game.average(-2)['objective']
    assert (best_mixture(game, 5.) == best_mixture(game, 5)).all()

@pytest.mark.parametrize('shape', [(1,), (2,), (2, 3)])
def test_an_update_takes_one_confusion_matrix(shape):
    game = played(worst_case_recall)
    before = game.multipliers.clone()
    with pytest.raises(InputError, match='confusion matrices for one update; give one') as e: game.update(torch.eye(3).expand(*shape, 3, 3) / 3)
    assert '\n' not in str(e.value) and torch.equal(game.multipliers, before) and len(game.history) == 3

def test_average_is_the_metric_of_the_mixture_of_iterates():
    p = toy_probabilities(12, 3, seed=2)
    game = play(SaddlePoint(worst_case_recall(p.mean(0)), .1), p, 50)
    Cs = [expected_confusion(p, bayes_rule(p, game.problem.gain(h['multipliers']))) for h in game.history[25:]]
    assert math.isclose(game.average(25)['objective'], game.problem.objective(torch.stack(Cs).mean(0)).item(), rel_tol=1e-9)

def test_history_can_be_plotted():
    p = toy_probabilities(50, seed=1)
    plot_history(play(SaddlePoint(coverage_constraint(p.mean(0))), p, 5), 'coverage')


def test_a_class_without_predictions_is_not_met():
    "Its whole target, .00095, lies under the tolerance of .001"
    reduction = SaddlePoint(balanced_coverage_constraint(torch.full((1000,), .001)))
    reduction.update(torch.eye(1000)[0].double().expand(1000, -1) / 1000)
    assert not reduction.feasible
    reduction.update(torch.eye(1000).double() / 1000)
    assert reduction.feasible and reduction.best == 1


def played(make, priors=(.5, .3, .2), updates=3):
    game = SaddlePoint(make(list(priors)))
    for _ in range(updates): game.update(torch.eye(len(priors)).double() + .2)
    return game

@pytest.mark.parametrize('make,message', [
    (lambda p: recall_constraint(p, .5), 'domain simplex, this problem nonnegative'), (lambda p: worst_case_recall([.4, .3, .2, .1]), 'number of classes 3, this problem 4'),
    (lambda p: worst_case_recall(p, [0, 1, 1]), 'number of multipliers 3, this problem 2'), (lambda p: worst_case_recall(p, ['a', 'b', 'c']), "the constraint 'class 0', this problem 'a'"),
    (lambda p: worst_case_recall([.2, .3, .5], target_priors=[.2, .3, .5]), None)])
def test_a_state_of_another_problem_is_refused_by_what_differs(make, message):
    "Also one that differs in nothing but what its numbers mean"
    state, other = played(worst_case_recall).state_dict(), SaddlePoint(make([.5, .3, .2]))
    if message is None: return other.load_state_dict(state) # Recalls do not depend on priors
    with pytest.raises(InputError, match=message) as e: other.load_state_dict(state)
    assert '\n' not in str(e.value) and not other.history and other.best is None

def test_a_state_of_another_goal_with_the_same_names_is_refused():
    state = played(lambda p: recall_constraint(p, .5)).state_dict()
    for make in (lambda p: precision_constraint(p, .5), coverage_constraint, lambda p: recall_constraint(p, .6)):
        with pytest.raises(InputError, match='another goal, other targets or other priors'): SaddlePoint(make([.5, .3, .2])).load_state_dict(state)
    SaddlePoint(recall_constraint([.5 + 1e-7, .3, .2 - 1e-7], .5)).load_state_dict(state)

@pytest.mark.parametrize('change,message', [
    (lambda s: {}, 'lacks multipliers, best'), (lambda s: {k: v for k, v in s.items() if k != 'best'}, 'lacks best'),
    (lambda s: {k: v for k, v in s.items() if k != 'history.objective'}, 'lacks history.objective'), (lambda s: s | {'history.objective': s['history.objective'][:1]}, 'different lengths'),
    (lambda s: s | dict(best=torch.tensor(7)), 'part of its history is missing'), (lambda s: None, 'saved state is a NoneType')])
def test_states_with_something_missing(change, message):
    game = played(worst_case_recall)
    with pytest.raises(InputError, match=message): game.load_state_dict(change(game.state_dict()))
    assert len(game.history) == 3

@pytest.mark.parametrize('updates', [0, 3])
@pytest.mark.parametrize('make', [worst_case_recall, lambda p: worst_case_recall(p, ['a', 'b', 'b']), lambda p: recall_constraint(p, .5)])
def test_states_survive_lists_and_states_of_old_load(make, updates):
    "The Hugging Face callback writes lists and reads them as float64; states of 0.1, and those a stack makes, do not say whose they are"
    game = played(make, updates=updates)
    as_lists = {k: torch.tensor(v.tolist(), dtype=torch.float64) for k, v in game.state_dict().items()}
    old = {k: v for k, v in game.state_dict().items() if k not in ('problem', 'probe')}
    for state in (game.state_dict(), as_lists, old):
        assert all(isinstance(v, torch.Tensor) for v in state.values())
        again = SaddlePoint(make([.5, .3, .2]))
        again.load_state_dict(state)
        assert again.multipliers.equal(game.multipliers) and again.best == game.best and len(again.history) == updates

def test_the_bounds_of_a_saddle_point_are_checked():
    problem = worst_case_recall([.5, .5])
    for bad in (dict(step_size='a'), dict(step_size=math.inf), dict(max_multiplier=None), dict(floor=1.), dict(tolerance=-1)):
        with pytest.raises(InputError, match=next(iter(bad))): SaddlePoint(problem, **bad)
    with pytest.raises(InputError, match='problem is a function; give a Problem'): SaddlePoint(worst_case_recall)

def test_the_plot_of_thousands_of_updates_is_a_band():
    import matplotlib.pyplot as plt
    game = play(SaddlePoint(coverage_constraint([.5, .3, .2])), toy_probabilities(30, 3), 600)
    axs = plt.subplots(1, 2)[1]
    plot_history(game, axs=axs, values='coverage')
    assert axs[1].get_ylabel() == 'coverage less its bound' and all(len(line.get_xdata()) <= 250 for line in axs[1].lines) and len(axs[0].collections) == 3
    plt.close('all')
