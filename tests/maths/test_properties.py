"What must hold for every gain, score and label"
import torch, torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from ncdo.gains import (accuracy, at_priors, bayes_rule, confusion_matrix, coverage, coverage_constraint, precision_constraint, recall, recall_constraint,
    worst_case_recall)
from ncdo.losses import CostSensitiveLoss, hybrid_loss, logit_adjusted_loss, nonnegative_gain, reweighted_loss, softmax_shifted_loss
from ncdo.theory import risk_minimiser
from ncdo.reductions import update_multipliers

settings.register_profile('ncdo', max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile('ncdo')

@st.composite
def cases(draw, rows=6):
    "Scores (n, m), labels (n,), class probabilities (n, m) and a positive gain (m, m)"
    m = draw(st.integers(2, 6))
    number = lambda lo, hi, shape: torch.from_numpy(draw(arrays('float64', shape, elements=st.floats(lo, hi))))
    p = number(.01, 1, (rows, m))
    y = torch.from_numpy(draw(arrays('int64', rows, elements=st.integers(0, m - 1))))
    return number(-20, 20, (rows, m)), y, p / p.sum(-1, keepdim=True), number(.05, 5, (m, m))

def margin(values):
    "Largest less second largest"
    top = values.topk(2).values
    return top[..., 0] - top[..., 1]

def minimiser(f, p, gain): return risk_minimiser(lambda s, p: f(s, p, gain, reduction='none'), p)

@given(cases(), st.floats(-3, 3))
def test_row_shifts_leave_the_bayes_rule_and_the_minimisers_argmax_alone(case, size):
    _, _, p, gain = case
    shifted = gain + size * torch.linspace(-1, 1, len(gain))[:, None]
    clear = margin(p @ gain) > 1e-6
    assert torch.equal(bayes_rule(p, shifted)[clear], bayes_rule(p, gain)[clear])
    for f in (reweighted_loss, lambda *a, **k: hybrid_loss(*a, diag=torch.linspace(.5, 2, len(gain)), **k)):
        assert torch.equal(minimiser(f, p, shifted).argmax(-1)[clear], bayes_rule(p, gain)[clear])

@given(cases())
def test_raised_gains_are_non_negative_and_leave_non_negative_ones_alone(case):
    gain = case[3]
    assert torch.equal(nonnegative_gain(gain), gain) and (nonnegative_gain(gain - 3) >= 0).all()

@given(cases(), st.floats(1e-3, 1e3))
def test_scaling_the_gain_leaves_logit_adjusted_losses_alone(case, factor):
    s, y, _, gain = case
    assert torch.allclose(logit_adjusted_loss(s, y, factor * gain), logit_adjusted_loss(s, y, gain))
    for kind in ('re-weighted', 'hybrid-b'): assert torch.allclose(CostSensitiveLoss(factor * gain, kind)(s, y), CostSensitiveLoss(gain, kind)(s, y))

@given(cases())
def test_hybrid_on_a_diagonal_gain_is_logit_adjusted(case):
    s, y, p, gain = case
    gain = gain.diagonal().diag()
    for target in (y, p): assert torch.allclose(hybrid_loss(s, target, gain), logit_adjusted_loss(s, target, gain))

@given(cases(), st.randoms(use_true_random=False))
def test_permuting_classes_permutes_everything(case, random):
    s, y, p, gain = case
    order = torch.tensor(random.sample(range(len(gain)), len(gain)))
    place, permuted = order.argsort(), gain[order][:, order]
    for f in (reweighted_loss, logit_adjusted_loss, hybrid_loss):
        assert torch.allclose(f(s[:, order], place[y], permuted), f(s, y, gain)) and torch.allclose(f(s[:, order], p[:, order], permuted), f(s, p, gain))
    rows_equal = torch.diag(gain.diagonal()) + gain[0]
    assert torch.allclose(softmax_shifted_loss(s[:, order], place[y], rows_equal[order][:, order]), softmax_shifted_loss(s, y, rows_equal))
    clear = margin(p @ gain) > 1e-9
    assert torch.equal(bayes_rule(p[:, order], permuted)[clear], place[bayes_rule(p, gain)][clear])
    C, m = p.T @ s.softmax(-1) / len(p), len(gain)
    priors, lam = C.sum(1), gain[0]
    for make in (worst_case_recall, coverage_constraint, lambda q: recall_constraint(q, .5), lambda q: precision_constraint(q, .5)):
        a, b = make(priors), make(priors[order])
        assert torch.allclose(b.gain(lam[order]), a.gain(lam)[order][:, order]) and torch.allclose(b.violations(C[order][:, order]), a.violations(C)[order])
    assert torch.allclose(update_multipliers(lam[order] / lam.sum(), gain[1 % m][order], .1, 'simplex'), update_multipliers(lam / lam.sum(), gain[1 % m], .1, 'simplex')[order])

@given(cases())
def test_hard_labels_equal_one_hot_soft_labels(case):
    s, y, _, gain = case
    soft = F.one_hot(y, len(gain)).double()
    for f in (reweighted_loss, logit_adjusted_loss, hybrid_loss): assert torch.allclose(f(s, y, gain), f(s, soft, gain))
    for kind in ('re-weighted', 'hybrid-b'): assert torch.allclose(CostSensitiveLoss(gain, kind)(s, y), CostSensitiveLoss(gain, kind)(s, soft))
    rows_equal = torch.diag(gain.diagonal()) + gain[0]
    for kappa in (None, 0., .1): assert torch.allclose(*[softmax_shifted_loss(s, target, rows_equal, kappa=kappa) for target in (y, soft)])

@given(cases())
def test_the_minimiser_of_the_hybrid_is_log_of_what_a_prediction_earns(case):
    "The proof of Prop. 4: s* = log(G'p) up to a constant"
    _, _, p, gain = case
    s, expected = minimiser(hybrid_loss, p, gain), (p @ gain).log()
    assert torch.allclose(s - s.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True), atol=1e-5)

@given(cases())
def test_the_softmax_shifted_minimiser_is_log_of_what_a_prediction_earns(case):
    "The proof of Prop. 5, p at least .01"
    _, _, p, gain = case
    gain = torch.diag(gain.diagonal()) + gain[0]
    earned = p @ gain
    assert torch.allclose(earned.gather(1, minimiser(softmax_shifted_loss, p.clamp(min=2e-3), gain).argmax(-1, keepdim=True))[:, 0], earned.amax(-1), rtol=2e-2)

@given(cases())
def test_metrics_at_another_class_mix(case):
    s, y, p, _ = case
    C = p.T @ s.softmax(-1)
    C = C / C.sum()
    mix = p[0]
    moved = at_priors(C, mix)
    assert torch.allclose(moved.sum(-1), mix) and torch.allclose(recall(moved), recall(C)) and torch.allclose(at_priors(moved, C.sum(-1)), C)
    assert torch.isclose(coverage(moved).sum(), torch.tensor(1.).double()) and 0 <= accuracy(moved) <= 1
    assert torch.isclose(confusion_matrix(y, y, p.shape[1]).sum(), torch.tensor(1.).double())
