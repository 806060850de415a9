"The distilled loss against loops, the hybrid loss and the Bayes rule; traps 45-48; students through the command line"
import copy, json, math, numpy as np, pytest, torch
from torch.nn.functional import one_hot
from ncdo.data import load
from ncdo.distillation import DistilledLoss, distilled_loss, teacher_labels, teacher_priors
from ncdo.runs import Spec
from ncdo.schedule import run_stack, taught_by
from ncdo.gains import (InputError, average_recall_goal, balanced_coverage_constraint, bayes_rule, coverage_constraint, precision_constraint,
    worst_case_recall)
from ncdo.losses import hybrid_loss
from ncdo.theory import risk_minimiser
from ncdo.stacks import Stack, fit
from ncdo.training import Member, Recipe

GAMMAS = (0., .1, .3, .5, 1.)
GAINS = {'diagonal': worst_case_recall, 'precision': lambda p: precision_constraint(p, .6), 'coverage': coverage_constraint,
    'balanced coverage': balanced_coverage_constraint}
SHORT = Recipe(steps=14, batch_size=32, update_every=4)
QUICK = ['train', '--model', 'mlp-16', '--steps', 20, '--batch-size', 32]

def draw(kind, m=4, n=6, seed=0):
    "Scores, teacher labels of at least .001, priors and a gain at random multipliers"
    g = torch.Generator().manual_seed(seed)
    u = lambda *shape: torch.rand(*shape, generator=g, dtype=torch.float64)
    simplex = lambda *shape: .001 + (1 - .001 * m) * (lambda e: e / e.sum(-1, keepdim=True))(u(*shape).log().neg())
    priors, lam = simplex(m), simplex(m) if kind == 'diagonal' else u(m).log().neg() / 2
    return torch.randn(n, m, generator=g, dtype=torch.float64), simplex(n, m), priors, GAINS[kind](priors).gain(lam)


@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
@pytest.mark.parametrize('kind', GAINS)
def test_gamma_0_is_the_hybrid_loss_on_soft_labels(kind, reduction):
    s, z, priors, G = draw(kind)
    for diag in (None, 1 / priors):
        assert torch.allclose(distilled_loss(s, z, G, diag, 0., reduction), hybrid_loss(s, z, G, diag, reduction=reduction))


@pytest.mark.parametrize('gamma', GAMMAS)
@pytest.mark.parametrize('kind', GAINS)
def test_equation_11_in_a_loop(kind, gamma):
    s, z, priors, G = draw(kind, n=5)
    G, D = (G - G.amin(1, keepdim=True).clamp(max=0)).tolist(), (1 / priors).tolist()
    expected = []
    for si, zi in zip(s.tolist(), z.tolist()):
        zbar = [sum(zi[i] * G[i][y] / D[y] for i in range(4)) for y in range(4)]
        shifted = [si[y] - math.log(D[y]) - gamma * math.log(zbar[y]) for y in range(4)]
        total = sum(math.exp(v) for v in shifted)
        expected.append(-sum(zbar[y] ** (1 - gamma) * math.log(math.exp(shifted[y]) / total) for y in range(4)))
    found = distilled_loss(s, z, torch.tensor(G), 1 / priors, gamma, 'none')
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5)


@pytest.mark.parametrize('gamma', GAMMAS)
@pytest.mark.parametrize('kind', ['diagonal', 'precision', 'coverage'])
def test_the_minimiser_is_the_bayes_rule(kind, gamma):
    "Appendix F, on 1,000 random cases of 3 to 10 classes: 3 gains for each number of classes, 41 or 42 labels for each"
    agree = cases = 0
    for seed in range(24):
        m = 3 + seed % 8
        _, z, priors, G = draw(kind, m, 42 - (seed >= 16), seed)
        diag = 1 / priors if seed % 2 or not (G.diagonal() > 0).all() else None
        s = risk_minimiser(lambda s, p: distilled_loss(s, p, G, diag, gamma, 'none'), z)
        agree, cases = agree + (s.argmax(-1) == bayes_rule(z, G)).sum().item(), cases + len(z)
    assert agree == cases == 1000


@pytest.mark.parametrize('gamma', GAMMAS)
@pytest.mark.parametrize('kind', GAINS)
def test_minimised_where_the_appendix_says(kind, gamma):
    "s* = log (G'z), up to a constant"
    _, z, priors, G = draw(kind)
    s = (z @ (G - G.amin(1, keepdim=True).clamp(max=0))).log().requires_grad_()
    grad, = torch.autograd.grad(distilled_loss(s, z, G, 1 / priors, gamma, 'sum'), s)
    assert grad.abs().max() < 1e-12


@pytest.mark.parametrize('gamma', GAMMAS)
@pytest.mark.parametrize('kind', GAINS)
def test_gradients(kind, gamma):
    s, z, priors, G = draw(kind)
    assert torch.autograd.gradcheck(lambda s: distilled_loss(s, z, G, 1 / priors, gamma, 'none'), s.requires_grad_())


@pytest.mark.parametrize('gamma', GAMMAS)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision(dtype, gamma):
    s, z, priors, G = draw('coverage', n=64)
    for scale in (1, 1000):
        scores, exact = (scale * s).to(dtype).requires_grad_(), distilled_loss((scale * s).to(dtype).double(), z, G, 1 / priors, gamma)
        value = distilled_loss(scores, z.float(), G, 1 / priors, gamma)
        value.backward()
        assert value.dtype == dtype and value.isfinite() and scores.grad.isfinite().all() and math.isclose(value.item(), exact.item(), rel_tol=.01)
    with torch.autocast('cpu', torch.bfloat16): inside = distilled_loss((s.float() @ torch.eye(4)), z.float(), G, 1 / priors, gamma)
    assert math.isclose(inside.item(), distilled_loss(s.bfloat16().double(), z, G, 1 / priors, gamma).item(), rel_tol=1e-5)


@pytest.mark.parametrize('change,message', [
    (dict(gamma=1.5), r'gamma is 1.5; it must lie between 0 and 1'), (dict(gamma=-.1), 'gamma is -0.1'), (dict(gamma=math.nan), 'gamma is nan'),
    (dict(reduction='median'), "unknown reduction 'median'"), (dict(teacher=torch.tensor([0, 1])), r'teacher labels have shape \(2,\), logits \(2, 3\)'),
    (dict(teacher=torch.full((2, 4), .25)), r'shape \(2, 4\)'), (dict(teacher=torch.ones(2, 3)), 'sums to 3'), (dict(teacher=torch.full((2, 3), torch.nan)), 'sums to nan'),
    (dict(diag=[1., 0, 1]), 'class 1 on the diagonal is 0')], ids=lambda v: v if isinstance(v, str) else '')
def test_mistakes(change, message):
    given = dict(logits=torch.zeros(2, 3), teacher=torch.full((2, 3), 1 / 3), gain=torch.eye(3)) | change
    with pytest.raises(InputError, match=message) as e: distilled_loss(**given)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('setting,value', [(setting, x) for setting in ('gamma', 'floor') for x in ('1', [.1], None, True, -.1, math.nan, math.inf, np.ones(2))], ids=str)
def test_shares_that_are_none_are_refused(setting, value):
    s, z, priors, G = draw('diagonal')
    makers = [lambda: distilled_loss(s, z, G, **{setting: value})]
    if setting == 'gamma': makers.append(lambda: DistilledLoss(G, priors, value))
    for make in makers:
        with pytest.raises(InputError, match=f'{setting} is .*must lie between 0 and 1') as e: make()
        assert '\n' not in str(e.value)


@pytest.mark.parametrize('reduction', [None, 'median', 1])
def test_a_reduction_of_the_module_is_checked_at_once(reduction):
    with pytest.raises(InputError, match=f"unknown reduction '{reduction}'"): DistilledLoss(torch.eye(2), [.5, .5], reduction=reduction)


@pytest.mark.parametrize('number', [np.float64(.5), np.array(.5), torch.tensor(.5)], ids=repr)
def test_numbers_of_any_library_are_those_of_python(number):
    s, z, priors, G = draw('diagonal')
    assert torch.equal(distilled_loss(s, z, G, gamma=number), distilled_loss(s, z, G, gamma=.5))
    assert torch.equal(distilled_loss(s, z, G, gamma=1., floor=number), distilled_loss(s, z, G, gamma=1., floor=.5))
    assert torch.equal(DistilledLoss(G, priors, number)(s, z), DistilledLoss(G, priors, .5)(s, z))
    assert torch.equal(teacher_labels(s, number), teacher_labels(s, .5))


@pytest.mark.parametrize('temperature', ['1', None, [1], 0, -1., math.nan, math.inf, True, torch.ones(2)], ids=str)
def test_temperatures_that_are_none_are_refused(temperature):
    with pytest.raises(InputError, match='temperature is .*must be positive') as e: teacher_labels(torch.zeros(2, 3), temperature)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('gamma', GAMMAS)
@pytest.mark.parametrize('kind', GAINS)
def test_the_module_ignores_the_scale_of_the_gain(kind, gamma):
    s, z, priors, G = draw(kind)
    loss = DistilledLoss(G, priors, gamma)
    first = loss(s, z)
    M = (G - G.amin(1, keepdim=True).clamp(max=0)) * priors
    assert torch.allclose(first, distilled_loss(s, z, G / M.sum(1).mean(), 1 / priors, gamma), rtol=1e-4)
    for c in (1e-3, 7., 1e4):
        loss.set_gain(c * G)
        assert torch.allclose(loss(s, z), first, rtol=1e-5)


def test_state_and_device_moves():
    s, z, priors, G = draw('coverage')
    a, b = DistilledLoss(G, priors, .3), DistilledLoss(torch.eye(4), [.25] * 4, .3)
    b.load_state_dict(a.state_dict())
    assert sorted(a.state_dict()) == ['diag', 'gain'] and torch.equal(a(s, z), b(s, z)) and not list(a.parameters())
    double = copy.deepcopy(a).to(torch.float64)
    assert double.gain.dtype == double.diag.dtype == torch.float64 and torch.allclose(double(s, z), a(s, z))
    double.set_gain(2 * torch.eye(4))
    assert double.gain.dtype == torch.float64 and double.to('meta').gain.device.type == 'meta'
    assert DistilledLoss(G, priors, .3, 'none')(s, z).shape == (6,)


@pytest.mark.parametrize('priors,message', [([.5, .5, 0, 0], 'class 2 is 0'), ([.5, .5, .5, .5], 'sums to 2')])
def test_priors_of_the_module_are_checked(priors, message):
    with pytest.raises(InputError, match=message): DistilledLoss(torch.eye(4), priors)


def test_teacher_labels_in_a_loop():
    scores = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    for T in (.5, 1., 3.):
        loop = [[math.exp(v / T) / sum(math.exp(u / T) for u in row) for v in row] for row in scores.tolist()]
        assert torch.allclose(teacher_labels(scores, T), torch.tensor(loop), atol=1e-6)
    assert torch.equal(teacher_labels(scores + 100).argmax(-1), scores.argmax(-1)) and teacher_labels(1e4 * scores).isfinite().all()
    for T in (0, -3., math.nan):
        with pytest.raises(InputError, match='temperature is'): teacher_labels(scores, T)


def test_teacher_priors_are_the_mean_label():
    z = teacher_labels(torch.randn(50, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(teacher_priors(z), z.double().mean(0)) and teacher_priors(z).dtype == torch.float64
    with pytest.raises(InputError, match='class 2 is 0'): teacher_priors(torch.tensor([[.5, .5, 0], [1, 0, 0]]))


def test_trap_45_only_the_teacher_is_tempered_and_no_T_squared_appears():
    "There is no mixing with hard labels for a factor T^2 to balance; the student's scores are taken as they are, and the docs say so"
    s, _, priors, G = draw('coverage', n=30)
    teacher = 3 * torch.randn(30, 4, generator=torch.Generator().manual_seed(5))
    for T in (1., 3., 9.):
        z = teacher_labels(teacher, T).double()
        by_hand = -(z * s.log_softmax(-1)).sum(-1).mean()
        assert torch.allclose(distilled_loss(s, z, torch.eye(4), gamma=0.), by_hand) and torch.allclose(hybrid_loss(s, z, torch.eye(4)), by_hand)
        learnt = risk_minimiser(lambda s, p: distilled_loss(s, p, torch.eye(4), gamma=.3, reduction='none'), z).softmax(-1)
        assert torch.allclose(learnt, (teacher.double() / T).softmax(-1), atol=1e-5)
    text = open(__file__.replace('tests/maths/test_distillation.py', 'nbs/06_distillation.ipynb'), encoding='utf-8').read()
    assert 'Only the teacher is tempered' in text and 'T^2' in text


@pytest.mark.parametrize('m', [2, 10, 100])
def test_trap_46_the_mean_is_over_samples_not_classes(m):
    z, n = torch.full((7, m), 1 / m, dtype=torch.float64), 7
    s = torch.zeros(n, m, dtype=torch.float64)
    for gamma in (0., .4):
        expected = m * (1 / m) ** (1 - gamma) * math.log(m)
        for loss in (lambda s, z: distilled_loss(s, z, torch.eye(m), gamma=gamma), DistilledLoss(torch.eye(m), [1 / m] * m, gamma)):
            assert math.isclose(loss(s, z).item(), expected, rel_tol=1e-5)
    each = distilled_loss(torch.randn(n, m, dtype=torch.float64), z, torch.eye(m), reduction='none')
    assert each.shape == (n,)


@pytest.mark.parametrize('gamma', GAMMAS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('kind', GAINS)
def test_trap_47_zeros_in_the_teachers_labels(kind, dtype, gamma):
    _, _, priors, G = draw(kind)
    z = torch.tensor([[1., 0, 0, 0], [0, 0, 0, 1], [.5, .5, 0, 0], [1e-30, 1, 0, 0], [.25, .25, .25, .25]], dtype=dtype)
    for size in (1, 50):
        s = (size * torch.randn(5, 4, generator=torch.Generator().manual_seed(1))).to(dtype).requires_grad_()
        for value in (distilled_loss(s, z, G, 1 / priors, gamma), DistilledLoss(G, priors, gamma)(s, z)):
            grad, = torch.autograd.grad(value, s)
            assert value.isfinite() and grad.isfinite().all()


def test_trap_47_a_row_of_the_gain_that_is_all_zero():
    "A class nobody asks for: its one-hot label weighs nothing, and is no NaN"
    z, s = torch.eye(3), torch.randn(3, 3, requires_grad=True)
    for gamma in GAMMAS:
        value = distilled_loss(s, z, torch.diag(torch.tensor([1., 2, 0])), [1., 1, 1], gamma, 'none')
        grad, = torch.autograd.grad(value.sum(), s)
        assert value.isfinite().all() and grad.isfinite().all() and (gamma == 1 or value[2].abs() < 1e-3)


def test_trap_47_at_gamma_1_the_floor_sets_the_margin():
    z = torch.tensor([[1., 0]], dtype=torch.float64)
    for floor in (1e-3, 1e-6):
        s = risk_minimiser(lambda s, p: distilled_loss(s, p, torch.eye(2), gamma=1., reduction='none', floor=floor), z)[0]
        assert math.isclose((s[0] - s[1]).item(), -math.log(floor), rel_tol=1e-6)


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
    "Folder of a tiny finished run"
    folder = tmp_path_factory.mktemp('teacher') / 'run'
    spec = Spec(model='mlp-16', recipe=Recipe(steps=40, batch_size=32))
    run_stack([spec], [folder], device='cpu')
    return folder, spec

def student(teacher, **changes): return Spec(model='mlp-16', teacher=teacher[1].id, recipe=Recipe(steps=8, batch_size=32, update_every=4), **changes)


def test_trap_48_gains_are_built_from_the_teachers_priors(teacher, tmp_path, monkeypatch):
    import ncdo.schedule as schedule
    seen = []
    monkeypatch.setattr(schedule, 'Stack', lambda members, *args, **how: seen.extend(members) or Stack(members, *args, **how))
    spec, data = student(teacher, objective='average-recall', loss='hybrid-distilled', temperature=4.), load('digits-lt')
    run_stack([spec], [tmp_path / 'student'], device='cpu', teachers={spec.teacher: teacher[0]})
    labels = teacher_labels(taught_by(teacher[0], spec, data), 4.)
    member, = seen
    assert torch.equal(member.labels, labels) and torch.allclose(member.priors, labels.double().mean(0))
    assert torch.allclose(member.problem.priors, member.priors)
    assert torch.allclose(member.problem.gain([]).diagonal(), 1 / (10 * labels.double().mean(0))) and (member.priors - data.priors).abs().max() > .01
    assert torch.allclose(DistilledLoss(member.problem.gain([]), member.priors).diag, 1 / labels.mean(0))


def test_trap_48_the_stack_uses_them_too(teacher):
    data = load('digits-lt')
    labels = teacher_labels(taught_by(teacher[0], student(teacher), data))
    problem = average_recall_goal(teacher_priors(labels))
    stack = Stack([Member(data, problem, 'hybrid-distilled', labels=labels, gamma=.3)], 'mlp-16', SHORT, 'cpu')
    stack.update()
    s, z = torch.randn(1, 7, 10), labels[None, :7]
    theirs = distilled_loss(s[0], z[0], problem.gain([]) / (problem.gain([]) * teacher_priors(labels)).sum(1).mean(), 1 / teacher_priors(labels), .3)
    assert torch.allclose(stack.goals.losses(s, z)[0], theirs, rtol=1e-4)
    index = stack.images.order[0]
    for image, label in zip(index[0].tolist(), stack.images.targets(index)[0]): assert torch.equal(label, labels[data.train.tolist().index(image)])


def test_trap_48_a_teacher_of_another_split_is_refused(teacher, tmp_path):
    spec = student(teacher, split_seed=1)
    with pytest.raises(InputError, match='trained on another split'): taught_by(teacher[0], spec, load('digits-lt', split_seed=1))
    with pytest.raises(InputError, match='trained on another split') as e: run_stack([spec], [tmp_path / 'student'], device='cpu', teachers={spec.teacher: teacher[0]})
    assert '\n' not in str(e.value) and not (tmp_path / 'student').exists()
    with pytest.raises(InputError, match='no record in'): taught_by(tmp_path / 'nothing', spec, load('digits-lt'))


def pupils(dtype=torch.float32):
    "Students of every loss, with teachers and temperatures of their own"
    data = load('digits-lt')
    raw = torch.randn(len(data.train), 10, generator=torch.Generator().manual_seed(0)) + 3 * one_hot(data.y[data.train], 10)
    goals = [(worst_case_recall, 'logit-adjusted', .1), (worst_case_recall, 'hybrid-distilled', .3), (balanced_coverage_constraint, 'hybrid-distilled', 1.),
        (balanced_coverage_constraint, 'hybrid-a', .1), (worst_case_recall, 're-weighted', .1), (average_recall_goal, 'cross-entropy', .1)]
    labels = [teacher_labels(raw * (1 + i % 2), 1 + i) for i in range(len(goals))]
    return [Member(data, goal(teacher_priors(z)), loss, i, labels=z, gamma=gamma) for i, ((goal, loss, gamma), z) in enumerate(zip(goals, labels))]

def test_a_student_learns_what_it_would_alone():
    together = fit(Stack(pupils(), 'mlp-32', SHORT, 'cpu', torch.float64))
    for one, result in zip(pupils(), together):
        alone, = fit(Stack([one], 'mlp-32', SHORT, 'cpu', torch.float64))
        assert torch.allclose(result.test, alone.test, atol=1e-6), one.loss
        assert torch.allclose(result.reduction.multipliers, alone.reduction.multipliers, atol=1e-6), one.loss

def test_stacks_of_students_and_others_do_not_mix():
    data = load('digits-lt')
    plain = Member(data, worst_case_recall(data.priors), 'logit-adjusted')
    with pytest.raises(InputError, match='all have teacher labels, or none'): Stack([pupils()[0], plain], 'mlp-16', SHORT, 'cpu')
    with pytest.raises(InputError, match='needs teacher labels'): Stack([Member(data, plain.problem, 'hybrid-distilled')], 'mlp-16', SHORT, 'cpu')


def test_hard_teachers_give_the_run_on_labels():
    "One-hot teacher labels are the sample's labels, so the student is the plain run"
    data = load('digits-lt')
    for loss in ('logit-adjusted', 're-weighted', 'hybrid-b'):
        plain = Member(data, worst_case_recall(data.priors), loss, 3)
        taught = Member(data, plain.problem, loss, 3, labels=one_hot(data.y[data.train], 10).float())
        a, b = [fit(Stack([m], 'mlp-16', SHORT, 'cpu', torch.float64))[0] for m in (plain, taught)]
        assert torch.allclose(a.test, b.test, atol=1e-9), loss


@pytest.fixture(scope='module')
def taught(tmp_path_factory):
    "A teacher by the command line"
    from ncdo.cli import main
    folder = tmp_path_factory.mktemp('cli') / 'teacher'
    main([str(a) for a in (*QUICK, '--objective', 'accuracy', '--loss', 'cross-entropy', '--out', folder)])
    return folder

@pytest.mark.parametrize('loss,more', [('hybrid-distilled', ['--gamma', '.3']), ('hybrid-distilled', ['--gamma', '1', '--objective', 'balanced-coverage']),
    ('auto', ['--temperature', '2']), ('re-weighted', []), ('hybrid-b', ['--objective', 'coverage'])], ids=lambda v: v if isinstance(v, str) else ' '.join(v))
def test_a_student_by_the_command_line(ncdo, taught, tmp_path, loss, more):
    before = (taught / 'record.json').read_bytes()
    status, out, err = ncdo(*QUICK, '--teacher', taught, '--loss', loss, *more, '--out', tmp_path / 'student')
    assert status == 0 and 'worst class' in out, err
    record = json.loads((tmp_path / 'student/record.json').read_text())
    assert record['spec']['teacher'] == json.loads(before)['id'] and record['split_hash'] == json.loads(before)['split_hash'] and record['id'] != json.loads(before)['id']
    assert (taught / 'record.json').read_bytes() == before
    if '--gamma' in more: assert record['spec']['gamma'] == float(more[1])


def test_a_student_of_another_temperature_or_gamma_is_another_run(ncdo, taught, tmp_path):
    base = [*QUICK, '--teacher', taught, '--loss', 'hybrid-distilled']
    assert ncdo(*base, '--out', tmp_path / 'a')[0] == 0
    for change in (['--gamma', '.5'], ['--temperature', '1']):
        status, _, err = ncdo(*base, *change, '--out', tmp_path / 'a')
        assert status == 2 and 'the record of another run' in err
        assert ncdo(*base, *change, '--out', tmp_path / change[0])[0] == 0
    a, b, c = [json.loads((tmp_path / d / 'record.json').read_text()) for d in ('a', '--gamma', '--temperature')]
    assert a['history'] != b['history'] and a['history'] != c['history']


@pytest.mark.parametrize('args,message', [
    (['--loss', 'hybrid-distilled'], "loss 'hybrid-distilled' needs the labels of a teacher"),
    (['--teacher', 'nothing'], 'holds no record of a finished run to learn from'),
    (['--teacher', '{}', '--temperature', '0'], 'temperature is 0.0'),
    (['--teacher', '{}', '--loss', 'hybrid-distilled', '--gamma', '1.5'], 'gamma is 1.5; give a number from 0 to 1')], ids=lambda v: v if isinstance(v, str) else '')
def test_mistakes_are_one_line_status_2_and_nothing_written(ncdo, taught, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = ncdo(*QUICK, *[str(a).replace('{}', str(taught)) for a in args], '--out', 'student')
    assert status == 2 and message in err and err.count('\n') == 1 and not out and not list(tmp_path.iterdir())


def test_a_saved_distilled_loss_that_does_not_fit_is_told_in_a_line():
    s, z, priors, G = draw('coverage')
    loss = DistilledLoss(G, priors, .3)
    value, state = loss(s, z), loss.state_dict()
    for given, message in (({}, "no 'diag' and no 'gain', it is empty"), ({'gain': state['gain']}, "no 'diag', only"), (state | {'gain': torch.eye(3)}, 'made for 4 classes'),
        (state | {'diag': torch.ones(3)}, r'diag has shape \(3,\)'), (state | {'gain': torch.full((4, 4), math.inf)}, 'not finite')):
        with pytest.raises(InputError, match=message) as e: loss.load_state_dict(given)
        assert '\n' not in str(e.value) and torch.equal(loss(s, z), value)
    with pytest.warns(UserWarning, match="no 'diag' and no 'gain'"): loss.load_state_dict({}, strict=False)
    model = torch.nn.ModuleDict(dict(loss_fn=loss))
    with pytest.raises(RuntimeError, match=r'loss_fn: gain has shape \(3, 3\)'): model.load_state_dict({'loss_fn.gain': torch.eye(3), 'loss_fn.diag': state['diag']})


@pytest.mark.parametrize('gain,message', [(torch.eye(3), 'made for 4 classes'), (torch.zeros(4, 4), 'zero everywhere'), (torch.full((4, 4), math.nan), 'not finite')])
def test_a_gain_that_does_not_fit_is_refused(gain, message):
    with pytest.raises(InputError, match=message): DistilledLoss(gain, [.25] * 4)
    with pytest.raises(InputError, match=message): DistilledLoss(torch.eye(4), [.25] * 4).set_gain(gain)
