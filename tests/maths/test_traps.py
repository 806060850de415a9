"Traps 1-22 and 26-34 of the project's list, each under its number"
import math, pytest, torch, torch.nn.functional as F
from ncdo.gains import (InputError, accuracy_goal, average_recall, average_recall_goal, balanced_coverage_constraint, bayes_rule, class_priors,
    confusion_matrix, coverage_constraint, geometric_mean, geometric_mean_gain, head_tail_groups, precision, precision_constraint, recall,
    recall_constraint, worst_case_recall, worst_recall)
from ncdo.losses import CostSensitiveLoss, hybrid_loss, logit_adjusted_loss, reweighted_loss, softmax_shifted_loss
from ncdo.theory import risk_minimiser
from ncdo.reductions import SaddlePoint, plot_history, update_multipliers
from ncdo.theory import expected_confusion, play, solve_linear_program, toy_probabilities

PRIORS = torch.tensor([.6, .3, .1], dtype=torch.float64)
DENSE = torch.tensor([[4., 1, 1], [1, 5, 2], [2, 2, 6]])
S, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2, 0, 0])

def each_loss(gain=DENSE): return [CostSensitiveLoss(gain, kind, priors=PRIORS) for kind in ('re-weighted', 'hybrid-a', 'hybrid-b')] + [CostSensitiveLoss(gain.diagonal().diag())]

@pytest.mark.parametrize('make', [worst_case_recall, coverage_constraint, balanced_coverage_constraint, average_recall_goal, accuracy_goal,
    lambda p: recall_constraint(p, .5), lambda p: precision_constraint(p, .5), lambda p: CostSensitiveLoss(DENSE, 'hybrid-a', priors=p)])
def test_trap_01_a_zero_prior_is_an_error_naming_the_class(make):
    with pytest.raises(InputError, match='class 2 is 0'): make([.5, .5, 0])

def test_trap_01_or_a_floor_one_asks_for():
    priors = class_priors(torch.tensor([0, 1, 0, 1]), 3, floor=.01)
    loss = CostSensitiveLoss(average_recall_goal(priors).gain([]))
    for target in (torch.tensor([2]), torch.tensor([[.05, .05, .9]]), torch.tensor([[0., 0, 1]])): assert loss(torch.zeros(1, 3), target).isfinite()

def test_trap_02_predictions_are_the_argmax_of_raw_scores():
    p, gain = torch.tensor([[.6, .2, .2]], dtype=torch.float64), average_recall_goal(PRIORS).gain([])
    s = risk_minimiser(lambda s, p: logit_adjusted_loss(s, p, gain, reduction='none'), p)
    assert s.argmax() == bayes_rule(p, gain) and (s - gain.diagonal().log()).argmax() == p.argmax() != s.argmax()

def test_trap_03_a_rarer_class_has_a_lower_training_score_and_a_higher_one_after():
    gain = average_recall_goal(PRIORS).gain([])
    assert CostSensitiveLoss(gain).log_diag.argmax() == PRIORS.argmin()
    uniform = torch.full((1, 3), 1 / 3, dtype=torch.float64)
    s = risk_minimiser(lambda s, p: logit_adjusted_loss(s, p, gain, reduction='none'), uniform)
    assert (s[0].argsort() == PRIORS.argsort(descending=True)).all()

def test_trap_04_strength_and_a_diag_of_ones_own_tame_a_class_of_999():
    gain = average_recall_goal([.999, .0005, .0005]).gain([])
    spread = lambda **kwargs: (lambda d: (d.max() - d.min()).item())(CostSensitiveLoss(gain, 'hybrid-b', **kwargs).log_diag)
    assert math.isclose(spread(), math.log(.999 / .0005), rel_tol=1e-5)
    assert math.isclose(spread(strength=.5), spread() / 2, rel_tol=1e-5) and spread(strength=0.) == 0
    assert math.isclose(spread(diag=[1., 10, 20]), math.log(20), rel_tol=1e-5)
    s = risk_minimiser(lambda s, p: hybrid_loss(s, p, gain, diag=[1., 10, 20], reduction='none'), PRIORS[None])
    assert s.argmax() == bayes_rule(PRIORS[None], gain)

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('prior', [1e-8, 1e-5, 1e-12])
def test_trap_05_tiny_priors_in_half_precision(dtype, prior):
    gain = average_recall_goal([1 - prior - .3, .3, prior]).gain([])
    for kind in ('auto', 'hybrid-b'):
        s = S.to(dtype).requires_grad_()
        value, exact = CostSensitiveLoss(gain, kind)(s, Y), CostSensitiveLoss(gain, kind)(S.to(dtype).double(), Y)
        value.backward()
        assert value.isfinite() and s.grad.isfinite().all() and math.isclose(value.item(), exact.item(), rel_tol=.01)

@pytest.mark.parametrize('size', [5e3, 1e5])
def test_trap_06_huge_scores_are_finite_and_right(size):
    s, soft = (size * torch.sign(S)).requires_grad_(), torch.rand(8, 3).softmax(-1)
    for loss in each_loss() + [CostSensitiveLoss(DENSE.diagonal().diag(), 'softmax-shifted')]:
        for target in (Y, soft):
            value = loss(s, target)
            assert value.isfinite() and torch.autograd.grad(value, s)[0].isfinite().all()
            assert torch.isclose(value.double(), loss(s.double(), target.double() if target.ndim == 2 else target), rtol=1e-4)

def test_trap_07_the_weight_of_a_single_sample_counts():
    s, y = torch.zeros(1, 2), torch.tensor([1])
    one, many = [reweighted_loss(s, y, torch.diag(torch.tensor([1., w]))) for w in (1, 100)]
    assert torch.isclose(many, 100 * one) and F.cross_entropy(s, y, weight=torch.tensor([1., 100])) == F.cross_entropy(s, y)

def test_trap_08_the_mean_is_the_mean_of_unreduced_losses():
    gain, s, y = torch.diag(torch.tensor([2., 4, 6])), torch.randn(2, 3), torch.tensor([2, 1])
    for f in (reweighted_loss, logit_adjusted_loss, hybrid_loss, softmax_shifted_loss):
        none, mean, total = [f(s, y, gain, reduction=r) for r in ('none', 'mean', 'sum')]
        assert torch.allclose(none.mean(), mean) and torch.allclose(none.sum(), total)

@pytest.mark.parametrize('factor', [1e-6, 1000.])
def test_trap_09_a_constant_factor_on_the_gain_changes_nothing(factor):
    for a, b in zip(each_loss(), each_loss(factor * DENSE)): assert torch.isclose(a(S, Y), b(S, Y), rtol=1e-5)

def test_trap_10_rows_that_are_no_distribution_are_refused():
    for loss in each_loss():
        with pytest.raises(InputError, match='target row 3 sums to 1.7'): loss(S, F.one_hot(Y, 3) * torch.where(torch.arange(8) == 3, 1.7, 1.)[:, None])

def test_trap_11_mixup_rows_are_accepted():
    a, b, t = F.one_hot(Y, 3).float(), F.one_hot(Y.flip(0), 3).float(), .3
    for loss in each_loss(): assert torch.isclose(loss(S, t * a + (1 - t) * b), t * loss(S, Y) + (1 - t) * loss(S, Y.flip(0)), rtol=1e-5)

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_trap_12_losses_follow_the_dtype_of_the_scores(dtype):
    for loss in each_loss(): assert loss(S.to(dtype), Y).dtype == dtype
    for f in (reweighted_loss, logit_adjusted_loss, hybrid_loss): assert f(S.to(dtype), Y, DENSE.double()).dtype == dtype

def test_trap_13_tables_move_with_the_module():
    for loss in each_loss():
        assert 'gain' in dict(loss.named_buffers())
        moved = torch.nn.Sequential(loss).to('meta')[0]
        moved.check = False
        assert moved.gain.is_meta and moved.log_diag.is_meta and moved(S.to('meta'), Y.to('meta')).is_meta

@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_trap_13_and_14_on_a_gpu():
    for loss in each_loss():
        here = loss(S, Y)
        assert torch.isclose(loss.cuda()(S.cuda(), Y.cuda()).cpu(), here) and torch.isclose(loss.cpu()(S.cuda(), Y.cuda()).cpu(), here)
        with pytest.raises(InputError, match=r'\[-4\]'): loss(S.cuda(), torch.full((8,), -4).cuda())
        assert loss(S.cuda(), Y.cuda()).isfinite()

@pytest.mark.parametrize('bad', [-4, 3, -1])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.float64])
def test_trap_14_labels_out_of_range_are_named(bad, dtype):
    for loss in each_loss():
        with pytest.raises(InputError, match=rf'target holds \[{bad}\]'): loss(S.to(dtype), Y.where(Y != 2, bad))
    for f in (reweighted_loss, logit_adjusted_loss, hybrid_loss):
        with pytest.raises(InputError, match=rf'target holds \[{bad}\]'): f(S.to(dtype), Y.where(Y != 2, bad), DENSE)

def test_trap_15_weights_come_from_the_training_sample_not_the_batch():
    loss = CostSensitiveLoss(average_recall_goal(class_priors(Y, 3)).gain([]), 're-weighted')
    assert loss(S[:2], torch.tensor([0, 1])).isfinite() and loss(S[:1], torch.tensor([2])).isfinite()

def test_trap_16_a_loss_works_from_construction():
    constrained = recall_constraint(PRIORS, .5), precision_constraint(PRIORS, .5), coverage_constraint(PRIORS), balanced_coverage_constraint(PRIORS)
    for problem in (worst_case_recall(PRIORS), *constrained): assert CostSensitiveLoss(SaddlePoint(problem).gain)(S, Y).isfinite()

def test_trap_17_infeasible_constraints_hit_a_bound_and_say_so():
    p = toy_probabilities(200, seed=1)
    game = play(SaddlePoint(recall_constraint(p.mean(0), .97), 1.), p, 3000)
    assert game.multipliers.max() <= 10 and not game.feasible and game.at_bound and game.gain.isfinite().all()

def test_trap_18_a_multiplier_comes_back_from_the_floor():
    lam, ahead = torch.tensor([.5, .5], dtype=torch.float64), torch.tensor([-.75, -.5], dtype=torch.float64)
    for _ in range(4000): lam = update_multipliers(lam, ahead, .1, 'simplex')
    assert 5e-7 < lam[0] < 2e-6
    for _ in range(1000): lam = update_multipliers(lam, ahead.flip(0), .1, 'simplex')
    assert lam[0] > .99

def test_trap_19_an_absent_class_keeps_its_multiplier_and_is_named():
    game = SaddlePoint(worst_case_recall(PRIORS), 1.)
    C = torch.tensor([[.5, .1, 0], [.1, .3, 0], [0, 0, 0]], dtype=torch.float64)
    game.update(C + torch.diag(torch.tensor([0, 0, .1])))
    before = game.multipliers
    with pytest.warns(UserWarning, match='no examples of class 2'): gain = game.update(C)
    assert gain.isfinite().all() and game.multipliers[2] == before[2] and math.isclose(game.multipliers.sum(), 1) and not game.multipliers.isnan().any()
    constrained = SaddlePoint(recall_constraint(PRIORS, .9), 1.)
    with pytest.warns(UserWarning, match='class 2'): constrained.update(C)
    assert constrained.multipliers[2] == 0 and constrained.multipliers[1] > 0

def test_trap_20_steps_are_plain_and_projected():
    lam = torch.tensor([.5, .01], dtype=torch.float64)
    a, b = [update_multipliers(lam, torch.tensor([v, -1.], dtype=torch.float64), .1, 'nonnegative') for v in (.2, .4)]
    assert torch.isclose(b[0] - lam[0], 2 * (a[0] - lam[0])) and a[1] == b[1] == 0

def test_trap_21_history_and_a_plot():
    p = toy_probabilities(100, seed=1)
    game = play(SaddlePoint(coverage_constraint(p.mean(0)), .1), p, 7)
    assert len(game.history) == 7 and {'multipliers', 'violations', 'objective'} == set(game.history[0])
    plot_history(game)

def test_trap_22_precision_95_on_1000_points_is_solved():
    p = toy_probabilities(1000, 3, seed=1).pow(8)
    p = p / p.sum(-1, keepdim=True)
    problem = precision_constraint(p.mean(0), .95)
    game = play(SaddlePoint(problem, 2.), p, 1500)
    optimum, best = solve_linear_program(problem, p), game.history[game.best]
    unconstrained = problem.violations(expected_confusion(p, p.argmax(-1))).max()
    assert unconstrained > 5e-3 and best['violations'].max() <= 1e-3 and -5e-3 < optimum - best['objective'] < 1e-3

def test_trap_26_head_tail_gains_divide_by_priors_and_group_sizes():
    priors = torch.tensor([.4, .3, .2, .08, .02], dtype=torch.float64)
    groups, lam = head_tail_groups(priors, .4), torch.tensor([.4, .6], dtype=torch.float64)
    sizes = torch.tensor([3, 2])
    assert torch.allclose(worst_case_recall(priors, groups).gain(lam).diagonal(), lam[groups] / (sizes[groups] * priors))

def test_trap_27_a_large_step_oscillates_and_the_log_shows_it():
    p = toy_probabilities(1000, seed=1)
    moves = []
    for step in (.1, 10.):
        lam = torch.stack([h['multipliers'] for h in play(SaddlePoint(balanced_coverage_constraint(p.mean(0)), step), p, 400).history])[-100:]
        moves.append((lam[1:] - lam[:-1]).abs().mean().item())
    assert moves[1] > 20 * moves[0]

def test_trap_28_an_absent_class_is_undefined_not_zero():
    C = confusion_matrix([0, 0, 1, 1], [0, 1, 1, 1], 3)
    assert recall(C)[2].isnan() and worst_recall(C) == .5 and worst_case_recall([.4, .4, .2]).objective(C) == .5
    with pytest.warns(UserWarning, match='class 2'): SaddlePoint(worst_case_recall([.4, .4, .2])).update(C)

def test_trap_29_always_m_by_m(): assert confusion_matrix([1, 1], [1, 1], 4).shape == (4, 4)

def test_trap_30_average_over_classes_present(): assert average_recall(confusion_matrix([0, 0, 1, 1], [0, 2, 1, 1], 3)) == .75

def test_trap_31_counts_accumulate_and_are_divided_once():
    y, h = torch.tensor([0] * 9 + [1]), torch.tensor([0] * 5 + [1] * 5)
    whole = average_recall(confusion_matrix(y, h, 2))
    parts = [(confusion_matrix(a, b, 2), len(a)) for a, b in zip(y.split(6), h.split(6))]
    assert torch.isclose(average_recall(sum(n * C for C, n in parts) / 10), whole) and not math.isclose(sum(average_recall(C) for C, _ in parts) / 2, whole)

def test_trap_32_true_first_predicted_second():
    y, h = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1])
    C = confusion_matrix(target=y, predicted=h, num_classes=2)
    assert C[0, 1] == .25 and C[1, 0] == 0
    assert torch.equal(recall(confusion_matrix(target=h, predicted=y, num_classes=2)), precision(C))

def test_trap_33_the_geometric_mean_has_a_finite_gain():
    C = torch.diag(torch.tensor([.5, .5, 0], dtype=torch.float64)) + torch.tensor([[0, 0, 0], [0, 0, 0], [.2, 0, 0]])
    gain = geometric_mean_gain(recall(C), PRIORS)
    assert geometric_mean(C) == 0 and gain.isfinite().all() and gain.diagonal().argmax() == 2
    assert torch.isclose(gain[2, 2], 1 / (3 * PRIORS[2] * .01))

def test_trap_34_the_best_iterate_is_chosen_by_the_problem_itself():
    game = SaddlePoint(worst_case_recall([.5, .5]))
    always_one, fair = torch.tensor([[0, .5], [0, .5]], dtype=torch.float64), torch.tensor([[.3, .2], [.2, .3]], dtype=torch.float64)
    for C in (always_one, fair, always_one): game.update(C)
    assert game.best == 1
