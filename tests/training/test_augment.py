"TrivialAugment against torchvision, mixup by hand, both in stacks of runs and by name in a recipe"
import dataclasses, json, math, numpy as np, pytest, torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv
from ncdo.augment import OPERATIONS, STRENGTHS, TRANSFORMS, Transform
from ncdo.augment import equalized, mixed, mixup, operate, trivial
from ncdo.data import load
from ncdo.gains import InputError, worst_case_recall
from ncdo.losses import KINDS, CostSensitiveLoss
from ncdo.runs import Spec, spec_of
from ncdo.schedule import pack
from ncdo.stacks import Stack, fit
from ncdo.training import Images, Member, Recipe

CPU = torch.device('cpu')
SIZES = [(8, 8), (32, 32), (33, 31), (5, 40), (2, 7), (1, 1), (64, 64)]
PLAIN = Recipe(steps=14, batch_size=32, update_every=4)
BOTH = dataclasses.replace(PLAIN, augment='trivial', mixup=1.)


def shear(x, *slopes):
    angles = [math.degrees(math.atan(s)) for s in slopes]
    return tv.affine(x, 0., [0, 0], 1., angles, center=[0, 0])


def shift(x, *pixels): return tv.affine(x, 0., [int(p) for p in pixels], 1., [0., 0.])


THEIRS = dict( # Image and signed share of the full strength
    Identity=lambda x, s: x,
    ShearX=lambda x, s: shear(x, .99 * s, 0),
    ShearY=lambda x, s: shear(x, 0, .99 * s),
    TranslateX=lambda x, s: shift(x, 32 * s, 0),
    TranslateY=lambda x, s: shift(x, 0, 32 * s),
    Rotate=lambda x, s: tv.rotate(x, 135 * s),
    Brightness=lambda x, s: tv.adjust_brightness(x, 1 + .99 * s),
    Color=lambda x, s: tv.adjust_saturation(x, 1 + .99 * s),
    Contrast=lambda x, s: tv.adjust_contrast(x, 1 + .99 * s),
    Sharpness=lambda x, s: tv.adjust_sharpness(x, 1 + .99 * s),
    Posterize=lambda x, s: tv.posterize(x, round(8 - 6 * abs(s))),
    Solarize=lambda x, s: tv.solarize(x, 1 - abs(s)),
    AutoContrast=lambda x, s: tv.autocontrast(x),
    Equalize=lambda x, s: tv.equalize(x))


def theirs(x, name, strengths, signs):
    "(n, c, h, w) of one image (c, h, w), one at a time by torchvision's functions"
    return torch.stack([THEIRS[name](x.clone(), s * k / 30) for k, s in zip(strengths, signs)])


def ours(x, name, strengths, signs):
    "(n, c, h, w) of one image (c, h, w), changed by one operation to n degrees"
    n, as_bytes = len(strengths), lambda v: torch.tensor(v, dtype=torch.uint8)[None]
    each = x.expand(1, n, *x.shape).contiguous()
    how = [OPERATIONS.index(name)] * n, list(strengths), [int(s < 0) for s in signs]
    return operate(each, *map(as_bytes, how))[0]


def picture(channels, size, kind='float', dtype=torch.float32):
    g = torch.Generator().manual_seed(sum(size) + channels)
    x = torch.rand(channels, *size, generator=g, dtype=dtype)
    return x if kind == 'float' else (255 * x).round() / 255


@pytest.mark.parametrize('name', OPERATIONS)
@pytest.mark.parametrize('channels', [1, 3])
def test_each_operation_is_torchvisions(name, channels):
    "Geometry bit for bit, colours to 1e-6; at every strength, with both signs"
    degrees = [k for k in range(STRENGTHS) for _ in range(2)], [1, -1] * STRENGTHS
    tolerance = 0 if name in OPERATIONS[:6] else 1e-6
    for size in SIZES:
        x = picture(channels, size)
        assert (ours(x, name, *degrees) - theirs(x, name, *degrees)).abs().max() <= tolerance, size


@pytest.mark.parametrize('name', OPERATIONS[:6])
def test_a_large_image_differs_at_most_where_a_pixel_lies_between_two(name):
    "In both precisions: a place halfway between two neighbours may fall to the other, by rounding"
    for dtype in (torch.float32, torch.float64):
        x, degrees = picture(1, (224, 200), dtype=dtype), ([8, 24, 17, 30], [1, -1, 1, -1])
        differs = ours(x, name, *degrees) != theirs(x, name, *degrees)
        assert differs.double().mean() < 1e-3


@pytest.mark.parametrize('name', ['Posterize', 'Solarize', 'AutoContrast', 'Equalize'])
def test_on_bytes_too(name):
    "Where rounding could decide, a byte at the threshold of Solarize is inverted"
    for size in [(32, 32), (64, 64), (8, 8)]:
        x, degrees = picture(3, size, 'bytes'), (range(STRENGTHS), [1] * STRENGTHS)
        found, expected = ours(x, name, *degrees), theirs(x, name, *degrees)
        if name == 'Solarize':
            at = torch.stack([(255 * x).round() * 2 == 17 * (30 - k) for k in range(STRENGTHS)])
            assert torch.equal(torch.where(at, 1 - x, expected), found) and at.float().mean() < .01
        else: assert (found - expected).abs().max() <= 1e-6


def test_equalize_is_pillows():
    from PIL import Image, ImageOps
    x = (picture(1, (40, 40)) ** 2 * 255).to(torch.uint8)
    even = ImageOps.equalize(Image.fromarray(x[0].numpy()))
    found = (equalized((x / 255)[None])[0, 0] * 255).round().numpy()
    assert np.array_equal(found, np.asarray(even))
    constant = torch.full((1, 1, 40, 40), 77 / 255)
    assert torch.allclose(equalized(constant), constant)


def test_the_operations_and_strengths_are_those_of_torchvision():
    "Its tables at 31 bins; the middle translation is 16 pixels here, or 15.999999 there"
    space = v2.TrivialAugmentWide()._AUGMENTATION_SPACE
    assert tuple(space) == OPERATIONS
    most_of = dict(ShearX=.99, TranslateX=32, Rotate=135, Brightness=.99, Sharpness=.99)
    for name, most in most_of.items():
        values, signed = space[name]
        assert signed and torch.allclose(values(31, 32, 32), torch.arange(31) * most / 30)
    assert space['Posterize'][0](31, 32, 32).tolist() == [round(8 - k / 5) for k in range(31)]
    assert torch.allclose(space['Solarize'][0](31, 32, 32), 1 - torch.arange(31) / 30)


@pytest.mark.parametrize('channels', [2, 4])
def test_other_numbers_of_channels(channels):
    "Grey is the mean of the channels; what needs no grey is done channel by channel"
    x = picture(channels, (12, 9))
    for name in OPERATIONS:
        found = ours(x, name, [30, 15], [1, -1])
        assert found.shape == (2, channels, 12, 9) and found.min() >= 0 and found.max() <= 1
        if name in ('Color', 'Contrast'): continue
        alone = torch.cat([ours(c[None], name, [30, 15], [1, -1]) for c in x], 1)
        assert torch.equal(found, alone), name
    grey = x.mean(0, keepdim=True)
    assert torch.allclose(ours(x, 'Color', [30], [-1])[0], .01 * x + .99 * grey, atol=1e-6)


def test_pixels_beyond_white_are_cut_before_and_stay_cut():
    "The digits carry noise; without TrivialAugment they are seen with all of it"
    x, degrees = 3 * picture(1, (8, 8)) - 1, ([20], [1])
    both = lambda name: [ours(v, name, *degrees) for v in (x, x.clamp(0, 1))]
    for name in OPERATIONS: assert torch.equal(*both(name))
    assert torch.equal(ours(x, 'Identity', *degrees)[0], x.clamp(0, 1))
    recipes = [dataclasses.replace(PLAIN, augment=name) for name in ('crop-flip', 'trivial')]
    crops, cut = [Images(members((0,)), r, CPU, torch.float64) for r in recipes]
    first = torch.zeros(1, dtype=torch.int64)
    (seen, _), (changed, _) = crops.batch(first), cut.batch(first)
    assert (seen * crops.std + crops.mean).max() > 16 >= (changed * cut.std + cut.mean).max() - 1e-9


def test_what_is_drawn():
    "Operations, strengths and signs: uniform, independent, from the generator alone, as bytes"
    draw = trivial().draw
    chance = draw(torch.Generator().manual_seed(0), 400, 128)
    assert all(c.dtype == torch.uint8 and c.shape == (400, 128) for c in chance)
    counts = torch.zeros(14, 31, 2, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    counts.index_put_([c.flatten().long() for c in chance], one, accumulate=True)
    expected = counts.sum() / counts.numel()
    n, chi = counts.numel() - 1, ((counts - expected).square() / expected).sum()
    assert abs(chi - n) < 5 * math.sqrt(2 * n) and counts.min() > 0
    again = draw(torch.Generator().manual_seed(0), 400, 128)
    assert all(torch.equal(a, b) for a, b in zip(chance, again))


@pytest.mark.parametrize('alpha', [.2, 1., 5.])
def test_shares_of_mixup_are_from_beta(alpha):
    from scipy.stats import beta
    partner, share = mixup(alpha).draw(torch.Generator().manual_seed(1), 300, 50)
    everyone = torch.arange(50, dtype=torch.int32).expand(300, 50)
    assert torch.equal(partner.sort(-1).values, everyone)
    for q in (.1, .3, .5, .7, .9):
        below = (share.double() <= beta(alpha, alpha).ppf(q)).double().mean()
        assert abs(below - q) < 5 * math.sqrt(q * (1 - q) / share.numel())
    with torch.random.fork_rng(), np.errstate(all='raise'):
        torch.manual_seed(7), np.random.seed(7)
        again = mixup(alpha).draw(torch.Generator().manual_seed(1), 300, 50)
    assert torch.equal(again[1], share) and torch.equal(again[0], partner)


def test_extreme_alphas_give_finite_shares():
    shares = [mixup(alpha).draw(torch.Generator(), 20, 8)[1] for alpha in (1e-300, 1e-3, 1e6)]
    assert torch.stack(shares).isfinite().all()


def test_mixed_by_hand():
    x, y = torch.rand(2, 3, 1, 4, 4), torch.eye(3).expand(2, 3, 3)
    partner, share = torch.tensor([[1, 2, 0], [0, 2, 1]], dtype=torch.int32), torch.rand(2, 3)
    X, Y = mixed(x, y, partner, share)
    for k in range(2):
        for i in range(3):
            s, j = share[k, i], partner[k, i]
            assert torch.allclose(X[k, i], s * x[k, i] + (1 - s) * x[k, j])
            assert torch.allclose(Y[k, i], s * y[k, i] + (1 - s) * y[k, j])


@pytest.mark.parametrize('kind', [k for k in KINDS if 'teacher' not in KINDS[k].needs])
def test_every_loss_of_a_mixed_label_is_the_mix_of_two_losses(kind):
    g = torch.Generator().manual_seed(0)
    scores, y = torch.randn(6, 3, generator=g), torch.eye(3)[[0, 1, 2, 0, 0, 1]]
    gain = torch.tensor([1., 12, 50]).diag()
    if kind != 'logit-adjusted': gain += torch.tensor([.2, .5, .9])
    priors = torch.tensor([.5, .3, .2])
    loss = CostSensitiveLoss(gain, kind, priors=priors, reduction='none')
    share, partner = torch.rand(6, generator=g), torch.tensor([1, 2, 0, 5, 3, 4])
    _, mix = mixed(torch.zeros(1, 6, 1, 2, 2), y[None], partner[None], share[None])
    parts = share * loss(scores, y) + (1 - share) * loss(scores, y[partner])
    assert torch.allclose(loss(scores, mix[0]), parts, rtol=1e-4)


def members(seeds=(0, 1, 2)):
    data = load('digits-lt')
    return [Member(data, worst_case_recall(data.priors), loss, seed)
        for seed in seeds for loss in ('logit-adjusted', 'hybrid-b')]


def test_a_member_of_a_stack_sees_what_it_would_alone_bit_for_bit():
    everyone, step = members(), torch.full((1,), 9)
    X, Y = Images(everyone, BOTH, CPU, torch.float32).batch(step)
    for k, member in enumerate(everyone):
        x, y = Images([member], BOTH, CPU, torch.float32).batch(step)
        assert torch.equal(x[0], X[k]) and torch.equal(y[0], Y[k])


def test_a_member_learns_what_it_would_alone():
    everyone = members((0, 1))
    together = fit(Stack(everyone, 'mlp-16', BOTH, 'cpu', torch.float64))
    for k in (0, 3):
        alone, = fit(Stack([everyone[k]], 'mlp-16', BOTH, 'cpu', torch.float64))
        assert torch.allclose(together[k].test, alone.test, atol=1e-6)


def test_resumed_in_the_middle_equals_uninterrupted_bit_for_bit(tmp_path):
    start = lambda: Stack(members(), 'mlp-16', BOTH, 'cpu')
    whole, first, path = fit(start()), start(), tmp_path / 'checkpoint.safetensors'
    for _ in range(7): first.train_step()
    first.save(path)
    for a, b in zip(whole, fit(start(), checkpoint=path)):
        assert torch.equal(a.test, b.test)
        assert torch.equal(a.reduction.multipliers, b.reduction.multipliers)


def test_order_and_crops_are_those_without():
    crops = dataclasses.replace(PLAIN, augment='crop-flip')
    images, plain = [Images(members(), r, CPU, torch.float32) for r in (BOTH, crops)]
    assert torch.equal(images.order, plain.order) and torch.equal(images.chance, plain.chance)
    assert images.border == plain.border == 1
    assert not plain.changes and len(images.changes) == 2


def test_trivial_then_mixup_then_ones_own(monkeypatch):
    mine = Transform(lambda g, steps, n: (), lambda x, y: (x, y))
    monkeypatch.setitem(TRANSFORMS, 'mine', lambda: mine)
    changes = dataclasses.replace(BOTH, transform='mine').transforms
    assert changes[0].draw is trivial().draw and changes[1].apply is mixed and changes[2] is mine
    assert Recipe().transforms == Recipe(augment='crop-flip').transforms == []


def test_compiles_whole():
    images, step = Images(members(), BOTH, CPU, torch.float32), torch.full((1,), 3)
    expected = images.batch(step)
    how = dict(dynamic=False, fullgraph=True, backend='eager')
    images.look_up_changed = torch.compile(images.look_up_changed, **how)
    assert all(torch.equal(a, b) for a, b in zip(images.batch(step), expected))


def test_what_a_gpu_compiles_gives_the_same_numbers(monkeypatch):
    "Tried on the CPU; a change of one's own that cannot be compiled runs as it is"
    def numpys(x, y, bright):
        assert not torch.compiler.is_compiling()
        bright = torch.from_numpy(bright.numpy().copy())
        return x * bright[..., None, None, None] + x.mean().item(), y
    draw = lambda g, steps, n: (torch.rand(steps, n, generator=g),)
    monkeypatch.setitem(TRANSFORMS, 'numpys', lambda: Transform(draw, numpys))
    for recipe in (BOTH, dataclasses.replace(BOTH, transform='numpys+mixup-1')):
        stack = Stack(members(), 'mlp-16', recipe, 'cpu')
        expected = stack.images.batch(stack.clock)
        stack.recorder._compile()
        try: found = stack.images.batch(stack.clock)
        except torch._dynamo.exc.BackendCompilerFailed: pytest.skip('no C++ compiler')
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected))


# The recipe

@pytest.mark.parametrize('given,kept', [('none', False), (False, False), ('crop-flip', True),
    (True, True), ('trivial', 'trivial')])
def test_augment_is_chosen_by_name_and_kept_as_version_1_did(given, kept):
    recipe = Recipe(augment=given)
    assert recipe.augment is kept or recipe.augment == kept == 'trivial'
    spec = Spec(recipe=recipe)
    assert spec.id == Spec(recipe=Recipe(augment=kept)).id
    assert spec_of(json.loads(json.dumps(dict(spec=dataclasses.asdict(spec))))) == spec


@pytest.mark.parametrize('wrong', ['flip', '', 1, 0, None, 'True', ['trivial']])
def test_another_augmentation_is_refused_with_the_list(wrong):
    known = 'augment is .*; give one of none, crop-flip, trivial'
    with pytest.raises(InputError, match=known): Recipe(augment=wrong)


@pytest.mark.parametrize('wrong', [-1, math.inf, math.nan, 'much', True])
def test_an_alpha_that_cannot_be_is_refused(wrong):
    with pytest.raises(InputError, match='mixup is .*; give a number of'): Recipe(mixup=wrong)


def test_mixup_by_a_name_needs_a_positive_alpha():
    with pytest.raises(InputError, match='mixup is 0.0; give'): Recipe(transform='mixup-0')


def test_what_a_run_is():
    "Ids of version 0.1 stay; another augmentation or alpha is another run, in another stack"
    changes = {}, dict(augment=True), dict(augment='trivial'), dict(mixup=1), dict(mixup=.2)
    specs = [Spec(recipe=Recipe(**c)) for c in changes]
    assert specs[0].id == 'bf616d24bf88' and len({s.id for s in specs}) == 5
    assert len(pack(specs)) == len({s.recipe.pace for s in specs}) == 5


def test_from_the_command_line(ncdo, tmp_path):
    args = ['train', '--model', 'mlp-16', '--steps', 20, '--batch-size', 32, '--augment', 'trivial',
        '--mixup', 1, '--out', tmp_path / 'run']
    assert ncdo(*args)[0] == 0 and 'holds this run already' in ncdo(*args)[2]
    recipe = json.loads((tmp_path / 'run/record.json').read_text())['spec']['recipe']
    assert recipe['augment'] == 'trivial' and recipe['mixup'] == 1
    status, _, err = ncdo(*args[:-4], '--augment', 'flip', '--out', tmp_path / 'other')
    assert status == 2 and err.count('\n') == 1
    assert "augment is 'flip'; give one of none, crop-flip, trivial" in err
    status, _, err = ncdo(*args[:8], 'none', *args[9:])
    assert status == 2 and 'augment trivial, not False' in err
