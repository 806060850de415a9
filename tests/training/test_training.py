"Stacks, checkpoints, randomness"
import pytest, torch, torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from ncdo.data import load
from ncdo.gains import InputError, accuracy_goal, average_recall_goal, balanced_coverage_constraint, coverage_constraint, worst_case_recall
from ncdo.losses import CostSensitiveLoss
from ncdo.networks import ConvNorm, build, widen
from ncdo.stacks import Recorder, Stack, fit
from ncdo.training import Member, Recipe, crop_and_flip, draw_order

SHORT = Recipe(steps=14, batch_size=32, update_every=4)


def members(seeds=(0, 1)):
    goals = [(worst_case_recall, 'logit-adjusted'), (balanced_coverage_constraint, 'hybrid-b'), (worst_case_recall, 're-weighted'),
        (balanced_coverage_constraint, 'hybrid-a'), (accuracy_goal, 'cross-entropy'), (coverage_constraint, 'softmax-shifted')]
    data = load('digits-lt')
    return [Member(data, goal(data.priors), loss, seed) for goal, loss in goals for seed in seeds]


@pytest.mark.parametrize('model,parameters', [('resnet20', 272474), ('resnet56', 855770), ('resnet8', 78042)])
def test_resnets_have_the_size_of_the_literature(model, parameters):
    "He et al. report .27M for depth 20 and .85M for 56; the 1x1 shortcuts add 2,560 weights and 192 for their normalisation"
    net = build(model, (3, 32, 32), 10, [0])
    assert sum(p.numel() for p in net.parameters()) == parameters


@pytest.mark.parametrize('name', ['resnet9', 'resnet', 'vgg15', 'mlp', ''])
def test_unknown_models(name):
    with pytest.raises(InputError): build(name, (3, 32, 32), 10, [0])


@pytest.mark.parametrize('model', ['resnet8-w8', 'mlp-32'])
def test_a_member_learns_what_it_would_alone(model):
    everyone = members()
    together = fit(Stack(everyone, model, SHORT, 'cpu', torch.float64))
    for k in (0, 3, 4, 7, 10):
        alone, = fit(Stack([everyone[k]], model, SHORT, 'cpu', torch.float64))
        assert torch.allclose(together[k].test, alone.test, atol=1e-6), everyone[k].loss
        assert torch.allclose(together[k].reduction.multipliers, alone.reduction.multipliers, atol=1e-6)


def test_the_stack_computes_the_loss_of_the_module():
    stack = Stack(members(), 'mlp-16', SHORT, 'cpu')
    stack.update()
    logits, target = torch.randn(12, 7, 10), torch.randint(10, (12, 7))
    reductions = [stack.goals.reduction(k) for k in range(len(stack.members))]
    for m, r, s, y, mine in zip(stack.members, reductions, logits, target, stack.goals.losses(logits, target)):
        theirs = F.cross_entropy(s, y) if m.loss == 'cross-entropy' else CostSensitiveLoss(r.gain, m.loss, priors=m.data.priors)(s, y)
        assert torch.allclose(mine, theirs, rtol=1e-4), m.loss


@pytest.mark.parametrize('stop', [1, 4, 5, 9])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path, stop):
    whole = fit(Stack(members(), 'resnet8-w8', SHORT, 'cpu'))
    first = Stack(members(), 'resnet8-w8', SHORT, 'cpu')
    for _ in range(stop): first.train_step()
    first.save(tmp_path / 'checkpoint.safetensors', 'name')
    resumed = fit(Stack(members(), 'resnet8-w8', SHORT, 'cpu'), checkpoint=tmp_path / 'checkpoint.safetensors', name='name')
    for a, b in zip(whole, resumed):
        assert torch.equal(a.test, b.test) and torch.equal(a.reduction.multipliers, b.reduction.multipliers) and a.history == b.history
        assert a.reduction.best == b.reduction.best


def test_checkpoint_of_another_run_or_half_a_file(tmp_path):
    stack = Stack(members()[:1], 'mlp-16', SHORT, 'cpu')
    path = tmp_path / 'checkpoint.safetensors'
    stack.save(path, 'one')
    with pytest.raises(InputError, match='of another run'): stack.load(path, 'two')
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InputError, match='cannot be read'): stack.load(path, 'one')


def test_every_epoch_sees_every_image_once():
    train = torch.arange(100, 150)
    order, _ = draw_order(train, Recipe(steps=20, batch_size=10), seed=0)
    for epoch in order.view(4, 50): assert torch.equal(epoch.sort().values, train)


def test_chance_does_not_depend_on_the_length_of_the_epoch_before():
    a, b = [draw_order(torch.arange(50), Recipe(steps=n, batch_size=10), seed=3)[0] for n in (10, 20)]
    assert torch.equal(a, b[:10])


@pytest.mark.parametrize('border', [4, 2])
def test_crops_against_a_loop(border):
    torch.manual_seed(0)
    pool = torch.randint(0, 255, (6, 3, 12, 12), dtype=torch.uint8)
    padded, index = F.pad(pool, [border] * 4), torch.randint(6, (2, 5))
    chance = torch.cat([torch.randint(0, 2 * border + 1, (2, 5, 2)), torch.randint(0, 2, (2, 5, 1))], -1).byte()
    crops = crop_and_flip(padded, index, chance, border)
    for i in range(2):
        for j in range(5):
            dy, dx, flip = chance[i, j].tolist()
            one = padded[index[i, j], :, dy:dy + 12, dx:dx + 12]
            assert torch.equal(crops[i, j], one.flip(-1) if flip else one)


def test_the_border_is_an_eighth_of_the_side():
    recipe = Recipe(steps=500, batch_size=16, augment=True)
    stack = Stack(members()[:1], 'mlp-8', recipe, 'cpu')
    assert stack.images.border == 1 and stack.images.pool.shape[-2:] == (10, 10) and set(stack.images.chance[..., :2].unique().tolist()) == {0, 1, 2}


@pytest.mark.parametrize('depth', [18, 34])
def test_networks_for_imagenet_against_torchvision(depth):
    import torchvision
    theirs = getattr(torchvision.models, f'resnet{depth}')(num_classes=5).train()
    ours = build(f'resnet{depth}', (3, 64, 64), 5, [0, 1]).train()
    weights = [v if v.ndim != 2 else v[None] for v in theirs.state_dict().values()]
    ours.load_state_dict({k: torch.cat([w] * 2).view_as(v) if v.ndim else w for (k, v), w in zip(ours.state_dict().items(), weights, strict=True)})
    x = torch.randn(2, 6, 3, 64, 64)
    with torch.no_grad(): expected = torch.stack([theirs(part) for part in x])
    assert torch.allclose(ours(x), expected, atol=1e-4)


def test_enlarged_images():
    "The network sees what torchvision's transform makes of the images"
    from torchvision.transforms.v2.functional import resize
    x, alone = torch.rand(2, 3, 3, 16, 16), build('resnet18', (3, 40, 40), 4, [0, 1]).eval()
    bigger = torch.stack([resize(part, [40, 40], antialias=False) for part in x])
    assert torch.allclose(build('resnet18@40', (3, 16, 16), 4, [0, 1]).eval()(x), alone(bigger), atol=1e-5)
    assert torch.equal(build('mlp-8@16', (1, 8, 8), 3, [5]).net.head.weight, build('mlp-8', (1, 16, 16), 3, [5]).head.weight)


@pytest.mark.parametrize('name', ['resnet18@', 'resnet18@0', 'resnet18@big', 'mlp-8@-4'])
def test_a_size_that_is_none(name):
    with pytest.raises(InputError, match='is not a size in pixels'): build(name, (3, 16, 16), 4, [0])
    with pytest.raises(InputError, match='would shrink images of 16 x 20 pixels'): build('resnet18@16', (3, 16, 20), 4, [0])


@pytest.mark.parametrize('name', ['mlp-0', 'resnet8-w0', 'resnet9', 'resnet8-pad-w8', 'mlp-'])
def test_names_that_are_none(name):
    with pytest.raises(InputError): build(name, (3, 16, 16), 4, [0])


@pytest.mark.parametrize('model,K,n,memory,chunk', [('mlp-8', 24, 5000, 80e9, 2500), ('mlp-8', 12, 5000, 80e9, 5000), ('mlp-8', 1, 480, 80e9, 480),
    ('resnet18@224', 1, 5000, 80e9, 1000), ('mlp-8', 1000, 10, 80e9, 10), ('mlp-8', 24, 5000, 20e9, 1250), ('resnet18@224', 1, 5000, 10e9, 295)])
def test_pieces_in_which_a_gpu_measures(model, K, n, memory, chunk, monkeypatch):
    "All pieces alike, none larger than fits; sizes of CIFAR and TinyImageNet"
    from types import SimpleNamespace as Some
    side = int(model.partition('@')[2] or 0)
    monkeypatch.setattr('ncdo.stacks.gpu_memory', lambda device: memory)
    images = Some(size=[32, 32], parts=dict(validation=torch.zeros(K, n)))
    stack = Some(device='cuda', weights=Some(net=Some(side=side)), images=images, members=[0] * K, recipe=Some(rolling=1))
    assert Recorder(stack, False).chunk() == chunk and -(-n // chunk) * chunk - n < chunk


def test_augmented_stack_trains_and_measures_unaugmented():
    stack = Stack(members()[:2], 'resnet8-w8', Recipe(steps=4, batch_size=16, augment=True), 'cpu')
    x = stack.images.take(stack.images.parts['validation'][:, :3])
    plain = Stack(members()[:2], 'resnet8-w8', Recipe(steps=4, batch_size=16), 'cpu')
    assert torch.equal(x, plain.images.take(plain.images.parts['validation'][:, :3]))
    fit(stack)


def test_divergence_is_told():
    stack = Stack(members()[:1], 'mlp-16', Recipe(steps=20, batch_size=32, learning_rate=1e20, update_every=2), 'cpu')
    with pytest.raises(InputError, match='diverged at step'): fit(stack)


def test_rate():
    r = Recipe(steps=100, learning_rate=1., warmup=.1, milestones=(.5, .8))
    assert [round(r.rate(t), 6) for t in (0, 4, 9, 49, 50, 79, 80, 99)] == [.1, .5, 1, 1, .1, .1, .01, .01]


def test_average_recall_goal_is_menon_et_al():
    "LA with class priors: scores plus log prior in training"
    data = load('digits-lt')
    stack = Stack([Member(data, average_recall_goal(data.priors), 'logit-adjusted')], 'mlp-16', SHORT, 'cpu')
    logits, y = torch.randn(1, 9, 10), torch.randint(10, (1, 9))
    assert torch.allclose(stack.goals.losses(logits, y)[0], F.cross_entropy(logits[0] + data.priors.log().float(), y[0]), atol=1e-5)


class Watch(TorchDispatchMode):
    "Remembers operations that read a value back, or bring one in from Python"
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen += [str(function)] * any(word in str(function) for word in ('local_scalar', 'nonzero', 'lift_fresh', 'equal.default', 'masked_select'))
        return function(*args, **(kwargs or {}))


def test_a_step_and_an_update_need_nothing_from_the_processor():
    "What a GPU replays cannot ask: no value is read back, none is brought in"
    stack = Stack(members(), 'mlp-16', SHORT, 'cpu')
    stack.goals.check, stack.recorder.fast, stack.recorder.run = False, True, lambda function: function()
    with Watch() as watch: stack.train_step()
    assert not watch.seen and stack.goals.tick == 1
    with Watch() as watch: int(stack.clock)
    assert watch.seen


@pytest.mark.parametrize('model', ['resnet8', 'resnet8-pad'])
def test_widened_and_folded_networks_say_the_same(model, monkeypatch):
    "What runs on a GPU only, with the arithmetic of its two kernels written out"
    net, x = build(model, (3, 32, 32), 10, [0, 1]).double(), torch.randn(2, 4, 3, 32, 32, dtype=torch.float64)
    net.train()(x)
    plain = net.eval()(x)
    monkeypatch.setattr(torch, 'cudnn_convolution_relu', lambda x, w, b, *how: F.conv2d(x, w, b, *how).relu())
    monkeypatch.setattr(torch, 'cudnn_convolution_add_relu', lambda x, w, z, alpha, b, *how: (F.conv2d(x, w, b, *how) + alpha * z).relu())
    monkeypatch.setattr(torch, 'get_autocast_dtype', lambda device: torch.float64)
    y = x
    for part in net.body: y = part.infer(y)
    folded = net.head(y.mean((-2, -1)).unflatten(1, (2, -1)).transpose(0, 1))
    assert torch.allclose(plain, folded, atol=1e-10)
    grown = [m for m in net.modules() if isinstance(m, ConvNorm) and m.missing]
    for part in grown:
        z = torch.randn(3, part[0].in_channels, 8, 8, dtype=torch.float64)
        assert torch.allclose(part(z).relu(), part.infer(z), atol=1e-10)
    assert len(grown) == (3 if model.endswith('pad') else 5)


@pytest.mark.parametrize('triton,compiler,can', [(True, 'gcc', True), (True, 'clang', True), (True, None, False), (False, 'gcc', False)])
def test_a_gpu_without_triton_or_compiler_is_told(triton, compiler, can, monkeypatch):
    from ncdo.stacks import can_compile
    monkeypatch.delenv('CC', raising=False)
    monkeypatch.setattr('importlib.util.find_spec', lambda name: triton or None)
    monkeypatch.setattr('shutil.which', lambda name: f'/bin/{name}' if name == compiler else None)
    if can: assert can_compile()
    else:
        with pytest.warns(UserWarning, match='are not compiled'): assert not can_compile()


DRAWS = "from torch import nn\ndef net(num_classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.Dropout(.5), nn.Linear(32, num_classes))\n"


@pytest.fixture
def drawing(tmp_path, monkeypatch):
    "Name of a network of one's own that draws on its way"
    (tmp_path / 'drawing_nets.py').write_text(DRAWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return 'drawing_nets:net'


def test_dropout_follows_from_seed_and_step(tmp_path, drawing):
    "Whole, again, and gone on with from a checkpoint among other draws, all the same; the caller's own draws are left alone"
    def start(seed=0):
        torch.manual_seed(seed + 100)
        return Stack(members((seed,))[:1], drawing, Recipe(steps=20, batch_size=32, update_every=4), 'cpu')
    whole, again, broken, other = start(), start(), start(), start(1)
    for _ in range(10): broken.train_step()
    broken.save(tmp_path / 'c')
    resumed = start()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    results = [fit(stack, checkpoint=path)[0].test for stack, path in ((whole, None), (again, None), (resumed, tmp_path / 'c'), (other, None))]
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2]) and not torch.allclose(results[0], results[3])


@pytest.mark.parametrize('own', [True, False])
def test_a_network_of_ones_own_is_not_recorded(own, drawing, monkeypatch):
    "A recording would freeze what Python decides"
    from contextlib import nullcontext
    recorded = []
    monkeypatch.setattr(torch.cuda, 'device', lambda device: nullcontext())
    monkeypatch.setattr(Recorder, 'record', lambda self, function: recorded.append(function.__name__) or type('Graph', (), dict(replay=function)))
    stack = Stack(members((0,))[:1], drawing if own else 'mlp-16', SHORT, 'cpu')
    stack.recorder.fast = True
    for _ in range(5): stack.train_step()
    assert recorded == ([] if own else ['_measure_and_move', '_train']) and int(stack.clock) == 5


@pytest.mark.parametrize('own,rocm,can', [(True, None, True), (False, None, False), (True, '6.4', False)])
def test_half_precision_only_where_the_card_has_it(own, rocm, can, monkeypatch):
    from ncdo.stacks import has_bfloat16
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation=True: own or including_emulation)
    monkeypatch.setattr(torch.version, 'hip', rocm)
    assert has_bfloat16() == can


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('model,K', [('resnet20', 1), ('resnet20-pad', 3), ('resnet18@64', 1), ('resnet18@64', 2)])
def test_a_gpu_measures_what_a_cpu_measures(model, K):
    "The fused kernels of evaluation, in half precision"
    net, x = build(model, (3, 32, 32), 5, range(K)).eval(), torch.randn(K, 16, 3, 32, 32)
    with torch.no_grad():
        expected = net(x)
        with torch.autocast('cuda', torch.bfloat16): scores = net.cuda()(x.cuda()).cpu()
    assert (scores - expected).abs().max() < .05 * expected.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_a_gpu_learns_what_a_cpu_learns():
    slow, quick = [Stack(members((0,)), 'resnet8-w8', SHORT, device, fast=fast) for device, fast in (('cpu', False), ('cuda', True))]
    for a, b in zip(fit(slow), fit(quick)):
        assert torch.corrcoef(torch.stack([a.test.flatten(), b.test.flatten()]))[0, 1] > .9 # bfloat16 over 14 steps
        assert all(h['violations'].isfinite().all() for h in b.reduction.history) and len(a.history) == len(b.history)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('model,least', [('resnet8-w8', .96), ('resnet18@64', .8)])
def test_a_gpu_steps_where_a_cpu_steps(model, least):
    "How the first step moves the weights; half precision alone, emulated on a CPU, leaves correlations of .99 and .93"
    def moved(device, fast):
        stack = Stack(members((0,))[:2], model, SHORT, device, fast=fast)
        start = stack.weights.vector.clone()
        stack.train_step()
        return (stack.weights.vector - start).cpu()
    assert torch.corrcoef(torch.stack([moved('cpu', False), moved('cuda', True)]))[0, 1] > least


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
@pytest.mark.parametrize('steps', [1, 2, 5])
def test_a_gpu_rehearses_without_going_too_far(steps):
    result, = fit(Stack(members((0,))[:1], 'mlp-16', Recipe(steps=steps, batch_size=32, update_every=4), 'cuda'))
    assert result.test.isfinite().all() and len(result.history) == -(-steps // 4)


@pytest.mark.parametrize('steps', [1, 2, 3, 7])
def test_rehearsals_leave_no_trace(steps, monkeypatch):
    "Recording a step, or an update, with so few left that three rehearsals in a row would end up behind the last; recorded by a stand-in that runs it"
    from contextlib import nullcontext
    from types import SimpleNamespace as Some
    stream = Some(wait_stream=lambda other: None)
    here = lambda *x, **kw: nullcontext()
    stand_ins = dict(Stream=lambda: stream, current_stream=lambda: stream, stream=here, graph=here, CUDAGraph=lambda: None)
    for name, stand_in in stand_ins.items(): monkeypatch.setattr(torch.cuda, name, stand_in)
    recorded, plain = [Stack(members((0,))[:2], 'mlp-16', Recipe(steps=steps, batch_size=32, update_every=4), 'cpu') for _ in range(2)]
    monkeypatch.setattr(recorded.recorder, 'run', recorded.recorder.record)
    for stack in (recorded, plain):
        for _ in range(steps): stack.train_step()
    for (name, a), b in zip(recorded.state().items(), plain.state().values()): assert torch.equal(a, b), name


def test_widened_channels_stay_last_in_memory():
    "Else every convolution on a GPU begins and ends with a transposition"
    x = torch.randn(2, 6, 4, 4)
    y = widen(x, 2, 5)
    assert y.is_contiguous(memory_format=torch.channels_last) and y.shape == (2, 16, 4, 4)
    assert torch.equal(y.unflatten(1, (2, 8))[:, :, :3].flatten(1, 2), x) and not y.unflatten(1, (2, 8))[:, :, 3:].any()
