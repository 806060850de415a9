"A batch transform is an entry of `TRANSFORMS`: per member, drawn from the run's seed, on the device, resumed bit for bit"
import dataclasses, pytest, torch
from ncdo.augment import TRANSFORMS, Transform
from ncdo.data import load
from ncdo.gains import InputError, balanced_coverage_constraint, coverage_constraint, worst_case_recall
from ncdo.runs import Spec
from ncdo.schedule import pack
from ncdo.stacks import Stack, fit
from ncdo.training import Images, Member, Recipe

PLAIN = Recipe(steps=14, batch_size=32, update_every=4)


def brightness():
    "Each image as bright as chance has it; labels stay"
    return Transform(lambda g, steps, n: (torch.rand(steps, n, generator=g),), lambda x, y, f: (x * f[..., None, None, None].to(x), y))


@pytest.fixture(autouse=True)
def known(monkeypatch): monkeypatch.setitem(TRANSFORMS, 'brightness', brightness)


def members(seeds=(0, 1), labels=None):
    goals = [(worst_case_recall, 'logit-adjusted'), (balanced_coverage_constraint, 'hybrid-b'), (worst_case_recall, 're-weighted'),
        (coverage_constraint, 'softmax-shifted')]
    if labels is not None: goals = [(worst_case_recall, 'logit-adjusted'), (worst_case_recall, 'hybrid-distilled')]
    data = load('digits-lt')
    return [Member(data, goal(data.priors), loss, seed, labels=labels) for goal, loss in goals for seed in seeds]


def recipe(transform, **changes): return dataclasses.replace(PLAIN, transform=transform, **changes)


@pytest.mark.parametrize('transform', ['mixup-1', 'brightness+mixup-.2', 'trivial+mixup-.2+brightness'])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path, transform):
    start = lambda: Stack(members(), 'mlp-16', recipe(transform, augment=True), 'cpu')
    whole, first, path = fit(start()), start(), tmp_path / 'checkpoint.safetensors'
    for _ in range(5): first.train_step()
    first.save(path)
    for a, b in zip(whole, fit(start(), checkpoint=path)):
        assert torch.equal(a.test, b.test) and torch.equal(a.reduction.multipliers, b.reduction.multipliers)
    plain = fit(Stack(members(), 'mlp-16', recipe('', augment=True), 'cpu'))
    assert not any(torch.allclose(a.test, b.test) for a, b in zip(whole, plain))


def test_a_member_learns_what_it_would_alone():
    everyone, how = members(), recipe('brightness+mixup-1+trivial')
    together = fit(Stack(everyone, 'mlp-16', how, 'cpu', torch.float64))
    for k in (0, 3, 6):
        alone, = fit(Stack([everyone[k]], 'mlp-16', how, 'cpu', torch.float64))
        assert torch.allclose(together[k].test, alone.test, atol=1e-6), everyone[k].loss


def test_images_and_labels_by_hand():
    "Pixels from 0 to 1, mixed as their labels are; the order is that of the run without a transform; each member draws its own"
    data, step = load('digits-lt'), torch.full((1,), 3)
    images, plain = [Images(members(), r, torch.device('cpu'), torch.float64) for r in (recipe('mixup-1'), PLAIN)]
    assert torch.equal(images.order, plain.order)
    (x, y), (partner, share) = images.batch(step), [d[3] for d in images.draws[0]]
    for k in range(2):
        seen = data.x[images.order[3, k]].double() / 16
        mixed = torch.stack([w * seen[i] + (1 - w) * seen[j] for i, (j, w) in enumerate(zip(partner[k].tolist(), share[k].tolist()))])
        mean, std = [f(data.x[data.train].double(), (0, 2, 3))[:, None, None] for f in (torch.mean, torch.std)]
        assert torch.allclose(x[k], (mixed * 16 - mean) / std, atol=1e-6)
        for i, (j, w) in enumerate(zip(partner[k].tolist(), share[k].tolist())):
            expected = torch.zeros(10, dtype=torch.float64)
            expected[data.y[images.order[3, k, i]]] += w
            expected[data.y[images.order[3, k, j]]] += 1 - w
            assert torch.allclose(y[k, i], expected, atol=1e-6)
    assert not torch.equal(share[0], share[1]) and torch.equal(share[0], share[2]) # Seeds 0, 1, 0, 1


def test_in_a_chain_each_has_chance_of_its_own():
    images = Images(members((0,)), recipe('brightness+brightness'), torch.device('cpu'), torch.float32)
    assert not torch.equal(images.draws[0][0], images.draws[1][0])


def test_labels_of_a_teacher_are_mixed_too():
    labels = torch.rand(269, 10).softmax(-1)
    stack = Stack(members(labels=labels), 'mlp-16', recipe('mixup-1'), 'cpu')
    _, y = stack.images.batch(stack.clock)
    assert torch.allclose(y.sum(-1), torch.ones(4, 32)) and not torch.equal(y, stack.images.targets(stack.images.order[0]))
    fit(stack)


def test_a_step_needs_nothing_from_the_processor():
    from test_training import Watch
    stack = Stack(members(), 'mlp-16', recipe('brightness+mixup-1+trivial', augment=True), 'cpu')
    stack.goals.check, stack.recorder.fast, stack.recorder.run = False, True, lambda function: function()
    with Watch() as watch: stack.train_step()
    assert not watch.seen


def test_what_a_run_is():
    "Without a transform, the id of version 0.1; with one, another; runs of different ones do not share a stack"
    specs = [Spec(recipe=r) for r in (Recipe(), Recipe(transform='mixup-1'), Recipe(transform='mixup-.2'))]
    assert specs[0].id == 'bf616d24bf88' and len({s.id for s in specs}) == 3 and len(pack(specs)) == 3


@pytest.mark.parametrize('name', ['mixup', 'cutmix', 'mixup-1+', '+'])
def test_an_unknown_name_is_refused_with_what_is_known(name, ncdo, tmp_path):
    with pytest.raises(InputError, match='unknown transform .*use one of trivial, mixup'): Recipe(transform=name)
    status, _, err = ncdo('train', '--transform', name, '--out', tmp_path / 'run')
    assert status == 2 and err.count('\n') == 1 and 'unknown transform' in err


def test_one_that_changes_shapes_is_told(monkeypatch):
    monkeypatch.setitem(TRANSFORMS, 'half', lambda: Transform(lambda g, steps, n: (), lambda x, y: (x[:, ::2], y)))
    with pytest.raises(InputError, match='must keep their shapes'): fit(Stack(members(), 'mlp-16', recipe('half'), 'cpu'))


def test_from_the_command_line(ncdo, tmp_path):
    args = ['train', '--model', 'mlp-16', '--steps', 20, '--batch-size', 32, '--transform', 'brightness+mixup-1', '--out', tmp_path / 'run']
    assert ncdo(*args)[0] == 0 and 'holds this run already' in ncdo(*args)[2]
