"Acceptance: every promised loss finds the Bayes rule in every random draw (the study of Table 1 makes 1,000)"
import pytest, torch
from ncdo.gains import bayes_rule
from ncdo.theory import TABLE1, calibration_table, candidate_losses, random_gains, risk_minimiser

@pytest.fixture(scope='module')
def table(): return calibration_table(60, classes=(3, 5, 10), seed=1)

@pytest.mark.parametrize('problem', list(TABLE1))
def test_promised_losses_always_agree(table, problem):
    promised = table[(table.problem == problem) & table.promised]
    assert {'re-weighted', 'hybrid A', 'hybrid B', 'hybrid, another D'} <= set(promised.loss)
    assert ('softmax-shifted' in set(promised.loss)) == (problem != 'balanced coverage constraint')
    assert ('logit-adjusted' in set(promised.loss)) == problem.endswith('recall') or problem == 'recall constraint'
    assert (promised.agreement == 1).all(), promised

@pytest.mark.parametrize('loss', ['printed: hybrid B, rows not raised', 'printed: softmax-shifted*, C = 1', 'printed: softmax-shifted', 'ERM', 'logit-adjusted'])
def test_what_is_not_promised_fails_somewhere(table, loss): assert (table[(table.loss == loss) & ~table.promised].agreement < 1).any()

def test_the_table_is_tidy_and_reproducible(table):
    assert list(table.columns) == ['problem', 'loss', 'promised', 'agreement', 'n'] and not table.duplicated(['problem', 'loss']).any()
    again = calibration_table(8, classes=(3,), problems=('coverage constraint',))
    assert again.equals(calibration_table(8, classes=(3,), problems=('coverage constraint',)))

def test_draws_keep_their_word():
    for problem in TABLE1:
        p, priors, gain = random_gains(problem, 7, 20)
        assert p.min() >= 1e-3 and priors.min() >= 1e-2 and torch.allclose(p.sum(-1), torch.ones(20, dtype=torch.float64)) and gain.shape == (20, 7, 7)

def test_the_minimiser_is_a_minimiser():
    "Gradients vanish at promised losses' minimisers"
    for problem in TABLE1:
        p, priors, gain = random_gains(problem, 5, 10)
        for loss, promised in candidate_losses(problem, gain, priors).values():
            if not promised: continue
            s = risk_minimiser(loss, p).requires_grad_()
            assert torch.autograd.grad(loss(s, p).sum(), s)[0].abs().max() < 1e-5

def test_single_gains_give_the_bayes_rule_through_the_minimiser():
    p, priors, gain = random_gains('coverage constraint', 4, 30)
    loss = candidate_losses('coverage constraint', gain, priors)['hybrid B'][0]
    assert torch.equal(risk_minimiser(loss, p).argmax(-1), torch.stack([bayes_rule(a, g) for a, g in zip(p, gain)]))
