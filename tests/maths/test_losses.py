"Losses against explicit loops and PyTorch's own, for every kind of score, label and state"
import copy, numpy as np, pickle, pytest, torch, torch.nn.functional as F
from torch import nn
from ncdo import bench
from ncdo.distillation import DistilledLoss, distilled_loss
from ncdo.gains import InputError, balanced_coverage_constraint, coverage_constraint, precision_constraint, worst_case_recall
from ncdo._kernels import LARGE, low_rank, low_rank_weight
from ncdo.losses import (CostSensitiveLoss, factor_gain, hybrid_loss, is_diagonal, logit_adjusted_loss, loss_tables, nonnegative_gain,
    reweighted_loss, shift_tables, shifted_table_loss, softmax_shifted_loss, split_gain, table_loss)
from ncdo.theory import risk_minimiser

M, PRIORS = 5, torch.tensor([.4, .25, .2, .1, .05])
LAM = torch.tensor([.1, 0, .3, .2, .5])
GAINS = dict(diagonal=worst_case_recall(PRIORS).gain(LAM + .01), precision=precision_constraint(PRIORS, .7).gain(LAM),
    coverage=coverage_constraint(PRIORS).gain(LAM), balanced=balanced_coverage_constraint(PRIORS).gain(LAM),
    dense=torch.rand(M, M, generator=torch.Generator().manual_seed(0)).double() + torch.eye(M))
CASES = [(k, g) for g in GAINS for k in ('re-weighted', 'hybrid-a', 'hybrid-b', 'auto')] + [('logit-adjusted', 'diagonal'), ('softmax-shifted', 'diagonal'),
    ('softmax-shifted', 'precision'), ('softmax-shifted', 'coverage')]

def data(n=12, m=M, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, m, generator=g, dtype=torch.float64), torch.randint(m, (n,), generator=g)

def make(kind, gain, **kwargs): return CostSensitiveLoss(GAINS[gain], kind, priors=PRIORS, **kwargs)

def explicit(s, y, gain, d):
    "Eq. 9 in loops, rows raised to be non-negative"
    G, out = gain - gain.amin(1, keepdim=True).clamp(max=0), []
    for row, c in zip(s, y.tolist()):
        z = row - d.log()
        out.append(-sum(G[c, i] / d[i] * (z[i] - z.exp().sum().log()) for i in range(len(d))))
    return torch.stack(out)

@pytest.mark.parametrize('gain', list(GAINS))
def test_functions_against_loops(gain):
    (s, y), G = data(), GAINS[gain]
    d = torch.linspace(.5, 2, M, dtype=torch.float64)
    each = dict(reduction='none')
    assert torch.allclose(reweighted_loss(s, y, G, **each), explicit(s, y, G, torch.ones_like(d)))
    assert torch.allclose(hybrid_loss(s, y, G, diag=d, **each), explicit(s, y, G, d))
    assert torch.allclose(hybrid_loss(s, y, G, **each), explicit(s, y, G, nonnegative_gain(G).diagonal()))
    assert torch.allclose(logit_adjusted_loss(s, y, G, **each), F.cross_entropy(s - G.diagonal().log(), y, **each))

@pytest.mark.parametrize('kind, gain', CASES)
def test_module_equals_tables(kind, gain):
    (s, y), loss = data(), make(kind, gain)
    if kind == 'softmax-shifted': expected = softmax_shifted_loss(s, y, GAINS[gain])
    else: expected = table_loss(s, y, *loss_tables(GAINS[gain], kind, PRIORS)).mean()
    assert torch.allclose(loss(s, y), expected)

@pytest.mark.parametrize('kind, gain', CASES)
def test_gradients_by_differences(kind, gain):
    (s, y), loss = data(4), make(kind, gain)
    assert torch.autograd.gradcheck(lambda s: loss(s, y), s.requires_grad_())
    assert torch.autograd.gradcheck(lambda s: loss(s, F.one_hot(y, M).double()), s)
    assert torch.autograd.gradgradcheck(lambda s: loss(s, y), s)

@pytest.mark.parametrize('kind, gain', [('hybrid-b', 'dense'), ('hybrid-b', 'coverage'), ('hybrid-a', 'precision'), ('auto', 'balanced'), ('auto', 'diagonal')])
@pytest.mark.parametrize('soft', [False, True])
def test_large_batches_take_other_paths_to_the_same_values(kind, gain, soft):
    "Structured and dense kernels at (n, m) with n m >= LARGE against the plain tables, values, gradients and double backward"
    m, g = 300, torch.Generator().manual_seed(0)
    n = LARGE // m + 1
    priors, lam = torch.linspace(2, 1, m) / torch.linspace(2, 1, m).sum(), torch.rand(m, generator=g) / m
    G = dict(dense=torch.rand(m, m, generator=g) + torch.eye(m), coverage=coverage_constraint(priors).gain(lam),
        precision=precision_constraint(priors, .5).gain(lam), balanced=balanced_coverage_constraint(priors).gain(lam),
        diagonal=worst_case_recall(priors).gain(lam))[gain]
    loss, (s, y) = CostSensitiveLoss(G, kind, priors=priors), data(n, m)
    assert (loss._fast.parts is None) == (gain == 'dense')
    if soft: y = torch.rand(n, m, generator=g, dtype=torch.float64).softmax(-1)
    s.requires_grad_()
    expected, value = table_loss(s, y, *loss_tables(G.double(), kind, priors)).mean(), loss(s, y)
    assert torch.isclose(value, expected)
    grads = [torch.autograd.grad(v, s, create_graph=True)[0] for v in (value, expected)]
    assert torch.allclose(*grads, atol=1e-12)
    seconds = [torch.autograd.grad((v ** 2).sum(), s)[0] for v in grads]
    assert torch.allclose(*seconds, atol=1e-12)
    plain = torch.autograd.grad(loss(s, y), s)[0]
    assert torch.allclose(plain, grads[1], atol=1e-12)

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize('kind, gain', [('auto', 'diagonal'), ('hybrid-b', 'dense'), ('softmax-shifted', 'coverage')])
@pytest.mark.parametrize('soft', [False, True])
def test_dtypes_are_followed(dtype, kind, gain, soft):
    (s, y), loss = data(), make(kind, gain)
    if soft: y = F.one_hot(y, M).to(dtype)
    s = s.to(dtype).requires_grad_()
    value = loss(s, y)
    value.backward()
    assert value.dtype == s.grad.dtype == dtype
    reference = loss(s.detach().double(), y.double() if soft else y)
    assert torch.allclose(value.double(), reference, rtol={torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-6))

@pytest.mark.parametrize('kind, gain', [('auto', 'diagonal'), ('hybrid-b', 'dense')])
@pytest.mark.parametrize('soft', [False, True])
def test_inside_autocast_everything_is_float32(kind, gain, soft):
    (s, y), loss = data(), make(kind, gain)
    if soft: y = F.one_hot(y, M).float()
    layer = nn.Linear(M, M)
    with torch.autocast('cpu', torch.bfloat16):
        scores = layer(s.float())
        value, full = loss(scores, y), loss(scores.float(), y)
    assert scores.dtype == torch.bfloat16 and value.dtype == torch.float32
    assert torch.isclose(value, loss(scores.float(), y), rtol=1e-6) and torch.isclose(full, value, rtol=1e-6)

@pytest.mark.parametrize('kind, gain', [('auto', 'diagonal'), ('hybrid-b', 'dense'), ('softmax-shifted', 'coverage')])
def test_compiles_without_graph_breaks(kind, gain):
    (s, y), loss = data(), make(kind, gain)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend='eager')
    for args in ((s.float(), y), (s.float(), F.one_hot(y, M).float()), (s, y)): assert torch.allclose(compiled(*args), loss(*args), rtol=1e-5)

@pytest.mark.parametrize('kind, gain', [('auto', 'diagonal'), ('hybrid-b', 'dense'), ('softmax-shifted', 'coverage')])
def test_reductions_and_ignored_labels(kind, gain):
    (s, y), mean = data(), make(kind, gain)
    none, total = make(kind, gain, reduction='none'), make(kind, gain, reduction='sum')
    assert torch.allclose(none(s, y).mean(), mean(s, y)) and torch.allclose(none(s, y).sum(), total(s, y))
    ignored = y.clone()
    ignored[::3] = -100
    kept = ignored != -100
    assert torch.allclose(mean(s, ignored), mean(s[kept], y[kept])) and (none(s, ignored)[::3] == 0).all()
    zero = make(kind, gain, ignore_index=0)
    assert torch.allclose(zero(s, y), mean(s[y != 0], y[y != 0]))

@pytest.mark.parametrize('kind, gain', [('auto', 'diagonal'), ('hybrid-b', 'dense'), ('softmax-shifted', 'coverage')])
def test_all_labels_ignored_is_zero_not_nan(kind, gain):
    s = data()[0].requires_grad_()
    value = make(kind, gain)(s, torch.full((12,), -100))
    value.backward()
    assert value == 0 and (s.grad == 0).all()

@pytest.mark.parametrize('kind', ['auto', 'hybrid-b'])
@pytest.mark.parametrize('target, message', [(torch.full((12,), M), r'target holds \[5\], outside the classes 0..4'), (torch.full((12,), -4), r'\[-4\]'), (torch.zeros(11).long(), 'one class index a row'),
    (torch.zeros(12), 'give integer class indices'), (torch.full((12, M), 1.7 / M), 'target row 0 sums to 1.7'), (torch.zeros(12, M + 1), 'target has shape')])
def test_bad_labels_are_named(kind, target, message):
    with pytest.raises(InputError, match=message): make(kind, 'diagonal')(data()[0], target)

def test_bad_gains_are_named():
    with pytest.raises(InputError, match='gain of class 1 on the diagonal is 0'): CostSensitiveLoss(torch.diag(torch.tensor([1., 0, 2])))
    with pytest.raises(InputError, match='not finite'): CostSensitiveLoss(torch.tensor([[1., torch.nan], [0, 1]]))
    with pytest.raises(InputError, match='must be square'): CostSensitiveLoss(torch.ones(2, 3))
    with pytest.raises(InputError, match='made for 5 classes'): make('auto', 'diagonal').set_gain(torch.eye(3))
    with pytest.raises(InputError, match="needs priors="): CostSensitiveLoss(GAINS['dense'], 'hybrid-a')
    with pytest.raises(InputError, match="use 'hybrid-b'"): make('logit-adjusted', 'dense')
    with pytest.raises(InputError, match='not a diagonal plus equal rows'): make('softmax-shifted', 'balanced')
    with pytest.raises(InputError, match='unknown loss'): make('focal', 'dense')
    with pytest.raises(InputError, match='zero everywhere'): CostSensitiveLoss(torch.ones(3, 3) * -1, 're-weighted')
    with pytest.raises(InputError, match='diag is for the hybrid losses'): make('re-weighted', 'dense', diag=torch.ones(M))

@pytest.mark.parametrize('kind, gain', CASES)
def test_a_loaded_copied_or_pickled_loss_is_the_same_loss(kind, gain, tmp_path):
    (s, y), loss = data(), make(kind, gain)
    other = CostSensitiveLoss(torch.eye(M), kind, priors=PRIORS)
    torch.save(loss.state_dict(), tmp_path / 'state.pt')
    other.load_state_dict(torch.load(tmp_path / 'state.pt', weights_only=True))
    for twin in (other, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))): assert torch.equal(twin(s, y), loss(s, y)) and torch.equal(twin.gain, loss.gain)

def test_the_gain_survives_half_and_double():
    (s, y), loss = data(), CostSensitiveLoss(torch.diag(torch.tensor([1., 1e-8, 1e8])))
    s, y = s[:, :3], y % 3
    before = loss(s, y)
    nn.Sequential(nn.Linear(3, 3), loss).half()
    assert torch.equal(loss(s, y), before) and abs(loss.gain[1, 1] - 1e-8) < 1e-15
    assert torch.equal(loss.double()(s, y), before) and 'gain' in loss.state_dict()

def test_moves_to_another_device():
    loss = make('hybrid-b', 'dense').to('meta')
    assert loss.gain.device.type == loss.log_diag.device.type == loss.weight.device.type == 'meta'

def test_kinds_change_with_the_gain():
    "auto is logit-adjusted while the gain is diagonal, as at the zero start of Algorithm 2"
    loss = CostSensitiveLoss(coverage_constraint(PRIORS).gain(torch.zeros(M)))
    assert loss.weight is None
    loss.set_gain(GAINS['coverage'])
    assert loss.weight is not None

def test_factor_gain_and_structure():
    G = GAINS['precision']
    log_diag, weight = factor_gain(G)
    assert torch.allclose(weight * log_diag.exp(), nonnegative_gain(G)) and torch.equal(nonnegative_gain(GAINS['dense']), GAINS['dense'])
    assert is_diagonal(GAINS['diagonal']) and not is_diagonal(G)
    alpha, beta = split_gain(G)
    assert torch.allclose(torch.diag(alpha) + beta, G) and torch.allclose(alpha, 1 + LAM.double())

@pytest.mark.parametrize('gain', ['precision', 'coverage', 'balanced', 'diagonal'])
@pytest.mark.parametrize('kind', ['hybrid-a', 'hybrid-b', 're-weighted'])
def test_low_rank_rebuilds_the_weights_or_declines(gain, kind):
    log_diag, weight = loss_tables(GAINS[gain], kind, PRIORS)
    parts = low_rank_weight(GAINS[gain], log_diag, weight)
    if parts is None: assert gain == 'diagonal'
    else: assert torch.allclose(parts[0].diag() + parts[1] @ parts[2], weight)
    assert low_rank(GAINS['dense']) is None

@pytest.mark.parametrize('problem', [coverage_constraint, balanced_coverage_constraint, lambda p: precision_constraint(p, .7)])
@pytest.mark.parametrize('where', [None, (0, 90), (99, 3), (64, 63)])
def test_low_rank_looks_at_all_rows_of_a_large_gain(problem, where):
    gain = problem(torch.linspace(3, 1, 100).double() / 200).gain(torch.rand(100, generator=torch.Generator().manual_seed(0)) + .1)
    if where: gain[where] *= 1.01
    parts = low_rank(gain)
    assert (parts is None) == bool(where)
    if parts: assert torch.allclose(torch.outer(*parts).fill_diagonal_(0), gain - gain.diagonal().diag())

@pytest.mark.parametrize('where', [(0, 0), (1, 2), (4, 3)])
@pytest.mark.parametrize('value', [torch.nan, torch.inf, -torch.inf])
def test_a_gain_that_is_not_finite_is_refused(where, value):
    gain = GAINS['dense'].clone()
    gain[where] = value
    with pytest.raises(InputError, match='not finite'): CostSensitiveLoss(gain)

def test_is_diagonal_with_zeros_and_signs_that_cancel():
    assert is_diagonal(torch.diag(torch.tensor([0., 2, -1]))) and not is_diagonal(torch.tensor([[0., 1], [-1, 0]])) and is_diagonal(torch.zeros(2, 3, 3))

@pytest.mark.parametrize('goal,most', [('worst-case recall', 10), ('balanced coverage', 14)])
def test_a_thousand_classes_take_a_few_square_matrices(goal, most):
    "A matrix for each constraint would be 1,000 of them"
    costs = bench.in_new_process(goal, 1000, n=2000, batch=8)
    assert 2 * 8e6 < costs['memory'] < most * 8e6

def test_sms_dagger_with_all_of_beta_outside_is_the_hybrid():
    (s, y), G = data(), GAINS['coverage']
    alpha, beta = split_gain(G)
    difference = softmax_shifted_loss(s, y, G, kappa=beta / alpha, reduction='none') - hybrid_loss(s, y, G, diag=alpha, reduction='none')
    assert torch.allclose(difference, difference[0].expand(12))

def test_sms_star_is_defined_for_all_scores_when_C_is_positive():
    G = torch.diag(torch.ones(M)) + .05 * LAM
    s, y = data()
    alpha, beta = split_gain(G.double())
    written_out = -((1 - (beta.max() - beta).sum()) * s.softmax(-1) + beta.max() - beta).log().gather(1, y[:, None])[:, 0]
    assert torch.allclose(softmax_shifted_loss(s, y, G.double(), kappa=0., reduction='none'), written_out)

def test_softmax_shifted_with_beta_zero_is_logit_adjusted():
    (s, y), G = data(), GAINS['diagonal']
    assert torch.allclose(softmax_shifted_loss(s, y, G), logit_adjusted_loss(s, y, G))

def test_penalty_mends_one_hot_probabilities():
    "spec.md 4: without it, the loss is plain ERM for a label that is certain"
    p, G = torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64) + torch.tensor([0, .5, 4])
    found = [risk_minimiser(lambda s, p, K=K: shifted_table_loss(s, p, shift_tables(G), penalty=K), p).argmax(-1).tolist() for K in (0., 1.5)]
    assert found == [[0, 1, 2], [2, 2, 2]]

def test_benchmark_reports_every_loss_at_every_size(capsys, monkeypatch):
    monkeypatch.setattr(bench, 'SIZES', {(8, 5): (1, 1)})
    monkeypatch.setattr(bench, 'time_update', lambda: 1.)
    bench.main(['losses'])
    out = capsys.readouterr().out
    assert 'logit-adjusted' in out and 'hybrid, dense gain, soft labels' in out and 'confusion_matrix + update' in out
    with pytest.raises(SystemExit): bench.main([])


@pytest.mark.parametrize('m,n', [(2, 4), (3, 4), (300, 2)])
@pytest.mark.parametrize('columns', [1, 2, 5])
def test_scores_of_another_width_are_refused(m, n, columns):
    "A single column would be broadcast: a head of one logit trained on nonsense"
    if columns == m: columns += 1
    for gain in (torch.eye(m).double(), torch.eye(m).double() + .1):
        with pytest.raises(InputError, match=f'they need {m} classes'): CostSensitiveLoss(gain)(torch.randn(n, columns), torch.zeros(n).long())


def test_a_problem_is_no_gain():
    with pytest.raises(InputError, match='SaddlePoint'): CostSensitiveLoss(worst_case_recall(PRIORS))


FUNCTIONS = {'re-weighted': (reweighted_loss, 'dense'), 'logit-adjusted': (logit_adjusted_loss, 'diagonal'), 'hybrid-b': (hybrid_loss, 'dense'),
    'softmax-shifted': (softmax_shifted_loss, 'coverage'), 'distilled': (lambda s, y, G, reduction, **_: distilled_loss(s, y, G, gamma=.3, reduction=reduction), 'dense')}
EVERY = [('auto', 'diagonal'), ('auto', 'dense'), ('re-weighted', 'dense'), ('logit-adjusted', 'diagonal'), ('hybrid-a', 'dense'), ('hybrid-b', 'dense'), ('softmax-shifted', 'coverage')]

def losses(kind, reduction):
    "The module and the function of a kind"
    if kind in FUNCTIONS:
        function, gain = FUNCTIONS[kind]
        yield lambda s, y: function(s, y, GAINS[gain], reduction=reduction)
    if kind == 'distilled': yield DistilledLoss(GAINS['dense'], PRIORS, .3, reduction)
    else: yield make(kind, dict(EVERY)[kind], reduction=reduction)

LAYOUTS = [(M,), (4, M), (4, M, 3), (4, 3, M), (4, M, 2, 3), (4, 2, 3, M), (1, M, 1), (4, M, M + 1)]

@pytest.mark.parametrize('kind', [*dict(EVERY), 'distilled'])
@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
@pytest.mark.parametrize('shape', LAYOUTS, ids=str)
def test_every_layout_of_scores_is_that_of_its_rows(kind, reduction, shape):
    "Classes last or on axis 1, hard and soft, or one example"
    axis = shape.index(M)
    s = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(axis)
    rows = lambda t: t.movedim(axis, -1).reshape(-1, M)
    for loss in losses(kind, reduction):
        for target, of_rows in ((z.argmax(axis), rows(z).argmax(-1)), (z, rows(z)))[kind == 'distilled':]:
            expected = loss(rows(s), of_rows)
            found = loss(s, target)
            assert torch.allclose(found, expected.reshape(z.argmax(axis).shape) if reduction == 'none' else expected)
            single = loss(s.float(), target if target.dtype == torch.int64 else target.float())
            assert torch.allclose(single.double(), found, rtol=1e-4, atol=1e-5)

@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
@pytest.mark.parametrize('shape', [(M,), (4, M), (4, M, 3), (4, M, 2, 3), (4, M, M + 1)], ids=str)
@pytest.mark.parametrize('soft', [False, True])
def test_layouts_against_pytorch(reduction, shape, soft):
    "For an identity, the loss is `cross_entropy`; for a diagonal gain, `cross_entropy` of the shifted scores"
    axis, g = min(1, len(shape) - 1), torch.Generator().manual_seed(0)
    s, target = torch.randn(shape, generator=g), torch.randn(shape, generator=g).softmax(axis)
    if not soft: target = target.argmax(axis)
    for gain in (torch.eye(M), GAINS['diagonal'].float()):
        shift = gain.diagonal().log().reshape([M if i == axis else 1 for i in range(len(shape))])
        expected = F.cross_entropy(s - shift, target, reduction=reduction)
        for loss in (CostSensitiveLoss(gain, reduction=reduction), lambda s, y: logit_adjusted_loss(s, y, gain, reduction=reduction)):
            assert torch.allclose(loss(s, target), expected, atol=1e-5)

@pytest.mark.parametrize('shape', [(M, M, M), (2, M, M), (2, M, M, M)], ids=str)
@pytest.mark.parametrize('soft', [False, True])
@pytest.mark.parametrize('kind', [*dict(EVERY), 'distilled'])
def test_a_layout_that_fits_both_ways_is_refused(shape, soft, kind):
    s, target = torch.zeros(shape), torch.full(shape, 1 / M) if soft or kind == 'distilled' else torch.zeros(shape[:-1]).long()
    for loss in losses(kind, 'mean'):
        with pytest.raises(InputError, match='on axis 1 or on the last') as e: loss(s, target)
        assert '\n' not in str(e.value)

@pytest.mark.parametrize('shape,target,message', [((3, M, 4), (3, 5), 'one class index a row'), ((3, 4, M), (4, 3), 'one class index a row'), ((3, 4, 6), (3, 4), f'need {M} classes'),
    ((M, 3, 4), (3, 4), f'need {M} classes'), ((M,), (1,), 'one class index a row'), ((M,), (M - 1,), 'one class index a row'), ((), (), f'need {M} classes'),
    ((4, M), (1,), 'one class index a row'), ((1, M), (4,), 'one class index a row'), ((4, M), (4, 1), 'one class index a row'), ((4, M), (), 'one class index a row')], ids=str)
@pytest.mark.parametrize('check', [True, False])
def test_labels_that_do_not_fit_are_refused_not_broadcast(shape, target, message, check):
    "A single label for a batch used to be broadcast by the outer weights"
    for gain in ('diagonal', 'dense'):
        for kind in ('auto', 're-weighted', 'hybrid-b'):
            with pytest.raises(InputError, match=message): make(kind, gain, check=check)(torch.zeros(shape), torch.zeros(target).long())

def test_a_large_batch_with_too_few_labels_is_refused():
    m = 300
    loss, n = CostSensitiveLoss(coverage_constraint(torch.full((m,), 1 / m)).gain(torch.rand(m) / m), 'hybrid-b'), LARGE // m + 1
    assert loss._fast.parts is not None
    with pytest.raises(InputError, match='one class index a row'): loss(torch.zeros(n, m), torch.zeros(n - 1).long())

@pytest.mark.parametrize('kind', [*dict(EVERY), 'distilled'])
@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
def test_nothing_to_learn_from_is_a_zero_with_a_graph(kind, reduction, dtype):
    "Empty batches of every layout and batches of ignored labels, at the first call and after others"
    full, y = data()[0].to(dtype), data()[1]
    none = torch.empty(0, M, dtype=dtype)
    cases = [((0, M), torch.empty(0).long()), ((0, M), none), ((3, 0, M), torch.empty(3, 0).long()), ((3, 0, M), none.expand(3, 0, M)),
        ((12, M), torch.full((12,), -100)), ((3, 4, M), torch.full((3, 4), -100)), ((3, M, 4), torch.full((3, 4), -100))]
    if kind == 'distilled': cases = [case for case in cases if case[1].is_floating_point()]
    for loss in losses(kind, reduction):
        for later in (False, True):
            for shape, target in cases:
                s = torch.zeros(shape, dtype=dtype, requires_grad=True)
                value = loss(s, target)
                assert value.requires_grad and (value == 0).all() and value.shape == (target.shape[:2 if len(shape) == 3 else 1] if reduction == 'none' else ())
                value.sum().backward()
                assert s.grad.shape == shape and (s.grad == 0).all()
            if not later: loss(full, F.one_hot(y, M).to(dtype))

@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize('kind', [*dict(EVERY), 'distilled'])
def test_every_kind_in_every_precision(dtype, kind):
    "Scores, soft labels and the module itself in another precision, as under bf16-true"
    s, y = data()
    z = torch.randn(12, M, generator=torch.Generator().manual_seed(3)).softmax(-1)
    for loss in losses(kind, 'mean'):
        for target in (y, z)[kind == 'distilled':]:
            expected = loss(s.to(dtype).double(), target)
            for moved in (loss, copy.deepcopy(loss).to(dtype) if isinstance(loss, nn.Module) else loss):
                scores = s.to(dtype).requires_grad_()
                value = moved(scores, target.to(dtype) if target.is_floating_point() else target)
                value.backward()
                assert value.dtype == scores.grad.dtype == dtype and scores.grad.isfinite().all()
                assert torch.allclose(value.double(), expected, rtol={torch.float16: 5e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-5))

@pytest.mark.parametrize('kind, gain', EVERY)
def test_a_saved_loss_that_does_not_fit_is_told_in_a_line(kind, gain):
    loss = make(kind, gain)
    before, (s, y) = loss.gain.clone(), data()
    value = loss(s, y)
    for state, message in (({}, "no 'gain', it is empty"), ({'net.weight': torch.ones(1)}, r"no 'gain', only \['net.weight'\]"), ({'gain': torch.eye(3)}, 'made for 5 classes'),
        ({'gain': torch.full((M, M), torch.nan)}, 'not finite'), ({'gain': torch.ones(M)}, 'must be square')):
        with pytest.raises(InputError, match=message) as e: loss.load_state_dict(state)
        assert '\n' not in str(e.value) and torch.equal(loss.gain, before) and torch.equal(loss(s, y), value)
    with pytest.warns(UserWarning, match="no 'gain', it is empty; the loss keeps"): found = loss.load_state_dict({}, strict=False)
    assert found.missing_keys == ['gain'] and torch.equal(loss(s, y), value)
    with pytest.raises(RuntimeError, match='Unexpected key'): loss.load_state_dict(loss.state_dict() | {'more': torch.ones(1)})

def test_a_saved_gain_must_suit_the_kind():
    loss = make('logit-adjusted', 'diagonal')
    with pytest.raises(InputError, match="use 'hybrid-b'"): loss.load_state_dict({'gain': GAINS['dense']})
    assert torch.equal(loss.gain, GAINS['diagonal'])

def test_a_loss_within_a_model_leaves_the_report_to_the_model():
    model = nn.ModuleDict(dict(net=nn.Linear(2, M), loss_fn=make('auto', 'dense')))
    good = model.state_dict()
    with pytest.raises(RuntimeError, match='Missing key.*loss_fn.gain'): model.load_state_dict({k: v for k, v in good.items() if k != 'loss_fn.gain'})
    with pytest.raises(RuntimeError, match='loss_fn.gain: gain has shape'): model.load_state_dict(good | {'loss_fn.gain': torch.eye(3)})
    assert model.load_state_dict({}, strict=False).missing_keys == ['net.weight', 'net.bias', 'loss_fn.gain']
    model.load_state_dict(good | {'loss_fn.gain': GAINS['diagonal']})
    assert torch.equal(model['loss_fn'](*data()), make('auto', 'diagonal')(*data()))

@pytest.mark.parametrize('kind', [*dict(EVERY), 'distilled'])
def test_gains_priors_and_diagonals_of_pandas_and_numpy(kind):
    import pandas as pd
    (s, y), names = data(), list('abcde')
    G = GAINS[dict(EVERY, distilled='dense')[kind]]
    forms = [G.numpy(), G.tolist(), pd.DataFrame(G.numpy()), pd.DataFrame(G.numpy(), names, names)]
    if kind == 'distilled':
        z = F.one_hot(y, M).double()
        values = [loss(s, z) for g in forms for loss in (DistilledLoss(g, pd.Series(PRIORS.numpy()), .3), DistilledLoss(G, PRIORS, .3))]
        values += [distilled_loss(s, z, g, pd.Series(1 / PRIORS.numpy()), .3) - distilled_loss(s, z, G, 1 / PRIORS, .3) + values[0] for g in forms]
    else: values = [CostSensitiveLoss(g, kind, priors=pd.Series(PRIORS.numpy()))(s, y) for g in forms] + [CostSensitiveLoss(G, kind, priors=PRIORS)(s, y)]
    if kind in FUNCTIONS and kind != 'distilled':
        function = FUNCTIONS[kind][0]
        values += [function(s, y, g) - function(s, y, G) + values[0] for g in forms]
    for value in values: assert torch.allclose(value, values[0])

@pytest.mark.parametrize('kind', ['auto', 'distilled'])
def test_tables_that_cannot_be_read_are_refused(kind):
    import pandas as pd
    frame = pd.DataFrame(GAINS['dense'].numpy(), list('abcde'), list('abcde'))
    make_loss = CostSensitiveLoss if kind == 'auto' else lambda g: DistilledLoss(g, PRIORS)
    for gain, message in ((frame[list('bacde')], r"the columns \['b', 'a'"), (frame.set_axis([1, 0, 2, 3, 4]).set_axis([1, 0, 2, 3, 4], axis=1), r'the rows \[1, 0'), (frame.iloc[0], 'must be square'),
        (frame.astype(object).mask(frame > 1, 'x'), 'no table of numbers'), ([[1, 2], [3]], 'no table of numbers'), (None, 'no table of numbers'), ('auto', 'no table of numbers')):
        with pytest.raises(InputError, match=message) as e: make_loss(gain)
        assert '\n' not in str(e.value)
    shuffled = pd.Series(PRIORS.numpy(), [1, 0, 2, 3, 4])
    with pytest.raises(InputError, match=r'diag has the index \[1, 0'): make('hybrid-b', 'dense', diag=shuffled)
    with pytest.raises(InputError, match=r'diag has shape \(3,\)'): make('hybrid-b', 'dense', diag=[1., 2, 3])
    with pytest.raises(InputError, match=r'priors has shape \(2,\)'): CostSensitiveLoss(GAINS['dense'], 'hybrid-a', priors=[.5, .5])
    with pytest.raises(InputError, match=r'kappa has shape \(3,\)'): softmax_shifted_loss(*data(), GAINS['coverage'], kappa=torch.ones(3))

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64]

@pytest.mark.parametrize('dtype', INTEGERS)
@pytest.mark.parametrize('check', [True, False])
@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
@pytest.mark.parametrize('kind', dict(EVERY))
def test_labels_of_every_integer_type_are_the_same_labels(dtype, check, reduction, kind):
    (s, y), loss = data(), make(kind, dict(EVERY)[kind], reduction=reduction, check=check)
    assert torch.equal(loss(s, y.to(dtype)), loss(s, y))
    if kind in FUNCTIONS:
        function, gain = FUNCTIONS[kind]
        assert torch.equal(function(s, y.to(dtype), GAINS[gain], reduction=reduction), function(s, y, GAINS[gain], reduction=reduction))

@pytest.mark.parametrize('check', [True, False])
@pytest.mark.parametrize('kind', ['auto', 'hybrid-b', 'softmax-shifted'])
@pytest.mark.parametrize('m, label', [(256, 156), (256, 255), (300, 156)])
@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
def test_bytes_do_not_wrap_round(check, kind, m, label, reduction):
    "-100 as a byte is 156, and 256 is 0"
    s, y = data(2, m)[0], torch.tensor([label, 3])
    loss = CostSensitiveLoss(torch.eye(m), kind, reduction=reduction, check=check)
    assert torch.allclose(loss(s, y.byte()), F.cross_entropy(s, y, reduction=reduction))
    assert torch.allclose(logit_adjusted_loss(s, y.byte(), torch.eye(m), reduction=reduction), F.cross_entropy(s, y, reduction=reduction))

@pytest.mark.parametrize('value', [0, 0., np.int64(0), np.array(0), torch.tensor(0)])
@pytest.mark.parametrize('kind', ['auto', 're-weighted', 'softmax-shifted'])
def test_an_ignored_label_of_any_library_is_that_label(value, kind):
    (s, y), gain = data(), dict(EVERY, auto='diagonal')[kind]
    assert torch.allclose(make(kind, gain, ignore_index=value)(s, y), make(kind, gain)(s[y != 0], y[y != 0]))
    if kind in FUNCTIONS:
        function = FUNCTIONS[kind][0]
        assert torch.allclose(function(s, y, GAINS[gain], ignore_index=value), function(s[y != 0], y[y != 0], GAINS[gain]))

@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
@pytest.mark.parametrize('kind', dict(EVERY))
def test_without_an_ignored_label_every_one_counts(kind, reduction):
    (s, y), loss = data(), make(kind, dict(EVERY)[kind], reduction=reduction, ignore_index=None)
    assert torch.equal(loss(s, y), make(kind, dict(EVERY)[kind], reduction=reduction)(s, y))
    with pytest.raises(InputError, match=r'target holds \[-100\].*ignore_index is None'): loss(s, y.where(y > 0, -100))
    if kind not in FUNCTIONS: return
    function, gain = FUNCTIONS[kind]
    how = dict(ignore_index=None, reduction=reduction)
    assert torch.equal(function(s, y, GAINS[gain], **how), function(s, y, GAINS[gain], reduction=reduction))
    with pytest.raises(InputError, match='outside the classes'): function(s, y.where(y > 0, -100), GAINS[gain], **how)

@pytest.mark.parametrize('value', ['1', [1], torch.nan, torch.inf, True, .5, torch.ones(2)], ids=str)
@pytest.mark.parametrize('kind', [k for k in FUNCTIONS if k != 'distilled'])
def test_an_ignored_label_that_is_none_is_refused_at_once(value, kind):
    function, gain = FUNCTIONS[kind]
    for attempt in (lambda: make(kind, gain, ignore_index=value), lambda: function(*data(), GAINS[gain], ignore_index=value)):
        with pytest.raises(InputError, match='ignore_index is .*must be a whole number') as e: attempt()
        assert '\n' not in str(e.value)

@pytest.mark.parametrize('kind', ['hybrid-b', 'softmax-shifted', 'cross-entropy', 'pairwise'])
@pytest.mark.parametrize('strength', ['1', [1], None, True, torch.nan, torch.inf], ids=str)
def test_a_strength_that_is_no_number_is_refused_at_once(kind, strength):
    with pytest.raises(InputError, match='strength is .*it must be a finite number') as e: make(kind, 'coverage', strength=strength)
    assert '\n' not in str(e.value)

@pytest.mark.parametrize('settings, message', [
    (dict(diag='abcde'), 'diag is a str that does not hold numbers'), (dict(diag=list('abcde')), 'diag is a list that does not hold numbers'),
    (dict(diag=torch.ones(1, M)), r'diag has shape \(1, 5\)'), (dict(diag=1.), r'diag has shape \(\)'),
    (dict(diag=[1, 1, torch.inf, 1, 1]), 'D of class 2 on the diagonal is inf'), (dict(diag=[1, 1, torch.nan, 1, 1]), 'D of class 2 on the diagonal is nan'),
    (dict(diag=[1, 2, 1, 1, 1], strength=1e5), 'D of class 1 on the diagonal is inf'), (dict(reduction=None), "unknown reduction 'None'")], ids=str)
def test_settings_that_cannot_be_are_refused_at_once(settings, message):
    with pytest.raises(InputError, match=message) as e: make('hybrid-b', 'coverage', **settings)
    assert '\n' not in str(e.value)

@pytest.mark.parametrize('gain', [torch.zeros(0, 0), np.zeros((0, 0)), []], ids=str)
def test_a_gain_of_no_class_is_refused(gain):
    with pytest.raises(InputError, match='must be square, a row for each class'): CostSensitiveLoss(gain)

@pytest.mark.parametrize('setting, values, message', [('eps', [0, -1, '1', [1], None, torch.nan, np.ones(3)], 'eps is .*must be positive'),
    ('penalty', [-1, '1', None, torch.nan, torch.inf, np.ones(3)], 'penalty is .*must be 0 or more'), ('constant', [0, -1, '1', np.ones(M), torch.nan], 'constant is .*must be positive'),
    ('kappa', ['1', list('abcde'), torch.nan, torch.inf, [0, 0, torch.nan, 0, 0], torch.ones(2, M)], 'kappa (is|has|holds) ')])
def test_settings_of_the_softmax_shifted_loss_are_checked(setting, values, message):
    for value in values:
        with pytest.raises(InputError, match=message) as e: softmax_shifted_loss(*data(), GAINS['coverage'], **{setting: value})
        assert '\n' not in str(e.value)

@pytest.mark.parametrize('setting', ['eps', 'penalty', 'constant', 'kappa'])
@pytest.mark.parametrize('number', [np.int64(1), np.float32(1), np.array(1.), torch.tensor(1), torch.tensor(1.)], ids=repr)
def test_numbers_of_any_library_set_the_softmax_shifted_loss(setting, number):
    result = lambda x: softmax_shifted_loss(10 * data()[0], data()[1], GAINS['coverage'], **{setting: x})
    assert torch.equal(result(number), result(1)) and not torch.equal(result(1), result(.5))

@pytest.mark.parametrize('eps', [0., .1, .3])
def test_label_smoothing_adds_its_share_of_every_column_to_the_gain(eps):
    "As soft labels; with the identity it is PyTorch's own, with a gain the rule learnt is that of another gain"
    (s, y), G = data(), GAINS['dense']
    smooth = lambda p: (1 - eps) * p + eps / M
    assert torch.allclose(CostSensitiveLoss(torch.eye(M))(s, smooth(F.one_hot(y, M).double())), F.cross_entropy(s, y, label_smoothing=eps))
    p = torch.randn(50, M, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    learnt = risk_minimiser(lambda s, p: hybrid_loss(s, p, G, reduction='none'), smooth(p))
    assert torch.allclose(learnt.log_softmax(-1), (p @ ((1 - eps) * G + eps / M * G.sum(0))).log().log_softmax(-1), atol=1e-5)

@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('kind', [*dict(EVERY), 'distilled'])
@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
def test_layouts_and_empty_batches_on_a_gpu(kind, reduction):
    for shape in [*LAYOUTS, (0, M), (3, 0, M), (300, M, 60)]:
        axis = shape.index(M)
        s, z = [torch.randn(shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2)]
        for loss in losses(kind, reduction):
            for target in (z.argmax(axis), z.softmax(axis))[kind == 'distilled':]:
                expected = loss(s, target)
                moved = copy.deepcopy(loss).cuda() if isinstance(loss, nn.Module) else loss
                assert torch.allclose(moved(s.cuda(), target.cuda()).cpu(), expected, rtol=1e-4, atol=1e-5)
