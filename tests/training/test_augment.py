"TrivialAugment against torchvision, mixup by hand, both in stacks of runs; `augment` and `mixup` of a recipe"
import dataclasses, json, math, numpy as np, pytest, torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv
from ncdo.augment import OPERATIONS, STRENGTHS, TRANSFORMS, Transform, equalized, mixed, mixup, operate, transforms_of
from ncdo.data import load
from ncdo.gains import InputError, worst_case_recall
from ncdo.runs import Spec, spec_of
from ncdo.schedule import pack
from ncdo.stacks import Stack, fit
from ncdo.training import Images, Member, Recipe

CPU = torch.device('cpu')
SIZES = [(8, 8), (32, 32), (33, 31), (5, 40), (2, 7), (1, 1), (64, 64)]
PLAIN = Recipe(steps=14, batch_size=32, update_every=4)
BOTH = dataclasses.replace(PLAIN, augment='trivial', mixup=1.)


def theirs(x, name, strength, sign):
    "What torchvision's functions make of one image, at a strength from 0 to 30"
    s = sign * strength / 30
    shear = lambda x, *angles: tv.affine(x, 0., [0, 0], 1., [math.degrees(math.atan(a)) for a in angles], center=[0, 0])
    shift = lambda x, *pixels: tv.affine(x, 0., [int(p) for p in pixels], 1., [0., 0.])
    return dict(Identity=lambda x: x, ShearX=lambda x: shear(x, .99 * s, 0), ShearY=lambda x: shear(x, 0, .99 * s), TranslateX=lambda x: shift(x, 32 * s, 0),
        TranslateY=lambda x: shift(x, 0, 32 * s), Rotate=lambda x: tv.rotate(x, 135 * s), Brightness=lambda x: tv.adjust_brightness(x, 1 + .99 * s),
        Color=lambda x: tv.adjust_saturation(x, 1 + .99 * s), Contrast=lambda x: tv.adjust_contrast(x, 1 + .99 * s),
        Sharpness=lambda x: tv.adjust_sharpness(x, 1 + .99 * s), Posterize=lambda x: tv.posterize(x, round(8 - strength / 5)),
        Solarize=lambda x: tv.solarize(x, 1 - strength / 30), AutoContrast=tv.autocontrast, Equalize=tv.equalize)[name](x)


def ours(x, name, strengths, signs):
    "(n, c, h, w) of one image (c, h, w), changed by one operation to n degrees"
    n, as_bytes = len(strengths), lambda v: torch.tensor(v, dtype=torch.uint8)[None]
    each = x.expand(1, n, *x.shape).contiguous()
    return operate(each, as_bytes([OPERATIONS.index(name)] * n), as_bytes(strengths), as_bytes([int(s < 0) for s in signs]))[0]


def picture(channels, size, kind='float', dtype=torch.float32):
    x = torch.rand(channels, *size, generator=torch.Generator().manual_seed(sum(size) + channels), dtype=dtype)
    return x if kind == 'float' else (255 * x).round() / 255


@pytest.mark.parametrize('name', OPERATIONS)
@pytest.mark.parametrize('channels', [1, 3])
def test_each_operation_is_torchvisions(name, channels):
    "Geometry bit for bit, colours to 1e-6; at every strength, with both signs"
    degrees = [(k, sign) for k in range(STRENGTHS) for sign in (1, -1)]
    for size in SIZES:
        x = picture(channels, size)
        expected = torch.stack([theirs(x.clone(), name, *d) for d in degrees])
        found = ours(x, name, *zip(*degrees))
        tolerance = 0 if OPERATIONS.index(name) <= OPERATIONS.index('Rotate') else 1e-6
        assert (found - expected).abs().max() <= tolerance, size


@pytest.mark.parametrize('name', ['Posterize', 'Solarize', 'AutoContrast', 'Equalize'])
def test_on_bytes_too(name):
    "Where rounding could decide: a byte at the threshold of Solarize is inverted; 255ths fall into their own bin of Equalize"
    for size in [(32, 32), (64, 64), (8, 8)]:
        x = picture(3, size, 'bytes')
        found = ours(x, name, range(STRENGTHS), [1] * STRENGTHS)
        expected = torch.stack([theirs(x.clone(), name, k, 1) for k in range(STRENGTHS)])
        if name == 'Solarize':
            at = torch.stack([((255 * x).round() * 2 == 17 * (30 - k)) for k in range(STRENGTHS)])
            assert torch.equal(torch.where(at, 1 - x, expected), found) and at.float().mean() < .01
        else: assert (found - expected).abs().max() <= 1e-6


def test_equalize_is_pillows():
    from PIL import Image, ImageOps
    x = (picture(1, (40, 40)) ** 2 * 255).to(torch.uint8)
    even = ImageOps.equalize(Image.fromarray(x[0].numpy()))
    assert np.array_equal((equalized((x / 255)[None])[0, 0] * 255).round().numpy(), np.asarray(even))
    constant = torch.full((1, 1, 40, 40), 77 / 255)
    assert torch.allclose(equalized(constant), constant)


def test_the_operations_and_strengths_are_those_of_torchvision():
    "Its tables at 31 bins; the middle translation is 16 pixels here, which its own table rounds down from 15.999998"
    space = v2.TrivialAugmentWide()._AUGMENTATION_SPACE
    assert tuple(space) == OPERATIONS
    for name, most in dict(ShearX=.99, TranslateX=32, Rotate=135, Brightness=.99, Sharpness=.99).items():
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
        assert found.shape == (2, channels, 12, 9) and found.isfinite().all() and found.min() >= 0 and found.max() <= 1
        if name in ('Color', 'Contrast'): continue
        alone = torch.cat([ours(c[None], name, [30, 15], [1, -1]) for c in x], 1)
        assert torch.equal(found, alone), name
    grey = x.mean(0, keepdim=True)
    assert torch.allclose(ours(x, 'Color', [30], [-1])[0], .01 * x + .99 * grey, atol=1e-6)


def test_pixels_beyond_white_are_cut_before_and_stay_cut():
    "The digits carry noise: whatever the operation, what comes out lies from 0 to 1; without TrivialAugment nothing is cut"
    x = 3 * picture(1, (8, 8)) - 1
    for name in OPERATIONS: assert torch.equal(ours(x, name, [20], [1]), ours(x.clamp(0, 1), name, [20], [1]))
    assert torch.equal(ours(x, 'Identity', [20], [1])[0], x.clamp(0, 1))


def test_what_is_drawn():
    "Operations, strengths and signs are uniform and independent, drawn from the generator alone, and kept as bytes"
    draw = transforms_of('trivial')[0].draw
    chance = draw(torch.Generator().manual_seed(0), 400, 128)
    assert all(c.dtype == torch.uint8 and c.shape == (400, 128) for c in chance)
    counts = torch.zeros(14, 31, 2, dtype=torch.float64)
    counts.index_put_([c.flatten().long() for c in chance], torch.ones((), dtype=torch.float64), accumulate=True)
    expected = counts.sum() / counts.numel()
    n, chi = counts.numel() - 1, ((counts - expected).square() / expected).sum()
    assert abs(chi - n) < 5 * math.sqrt(2 * n) and counts.min() > 0
    assert all(torch.equal(a, b) for a, b in zip(chance, draw(torch.Generator().manual_seed(0), 400, 128)))


@pytest.mark.parametrize('alpha', [.2, 1., 5.])
def test_shares_of_mixup_are_from_beta(alpha):
    from scipy.stats import beta
    partner, share = mixup(alpha).draw(torch.Generator().manual_seed(1), 300, 50)
    assert torch.equal(partner.sort(-1).values, torch.arange(50, dtype=torch.int32).expand(300, 50))
    for q in (.1, .3, .5, .7, .9):
        below = (share.double() <= beta(alpha, alpha).ppf(q)).double().mean()
        assert abs(below - q) < 5 * math.sqrt(q * (1 - q) / share.numel())
    with torch.random.fork_rng(), np.errstate(all='raise'):
        torch.manual_seed(7), np.random.seed(7)
        again = mixup(alpha).draw(torch.Generator().manual_seed(1), 300, 50)
    assert torch.equal(again[1], share) and torch.equal(again[0], partner)


def test_extreme_alphas_give_finite_shares():
    for alpha in (1e-300, 1e-3, 1e6): assert mixup(alpha).draw(torch.Generator(), 20, 8)[1].isfinite().all()


def test_mixed_by_hand():
    x, y = torch.rand(2, 3, 1, 4, 4), torch.eye(3).expand(2, 3, 3)
    partner, share = torch.tensor([[1, 2, 0], [0, 2, 1]], dtype=torch.int32), torch.rand(2, 3)
    X, Y = mixed(x, y, partner, share)
    for k in range(2):
        for i in range(3):
            s, j = share[k, i], partner[k, i]
            assert torch.allclose(X[k, i], s * x[k, i] + (1 - s) * x[k, j]) and torch.allclose(Y[k, i], s * y[k, i] + (1 - s) * y[k, j])


def members(seeds=(0, 1, 2)):
    data = load('digits-lt')
    return [Member(data, worst_case_recall(data.priors), loss, seed) for seed in seeds for loss in ('logit-adjusted', 'hybrid-b')]


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
        assert torch.equal(a.test, b.test) and torch.equal(a.reduction.multipliers, b.reduction.multipliers)


def test_order_and_crops_are_those_without():
    images, plain = [Images(members(), r, CPU, torch.float32) for r in (BOTH, dataclasses.replace(PLAIN, augment='crop-flip'))]
    assert torch.equal(images.order, plain.order) and torch.equal(images.chance, plain.chance) and images.border == plain.border == 1
    assert not plain.changes and len(images.changes) == 2


def test_trivial_then_mixup_then_ones_own(monkeypatch):
    recipe = dataclasses.replace(BOTH, transform='mixup-.2')
    assert [t.draw.__qualname__ for t in recipe.transforms] == ['draw_trivial', 'mixup.<locals>.draw', 'mixup.<locals>.draw']
    assert Recipe().transforms == Recipe(augment='crop-flip').transforms == []


def test_compiles_whole():
    images, step = Images(members(), BOTH, CPU, torch.float32), torch.full((1,), 3)
    expected = images.batch(step)
    images.look_up_changed = torch.compile(images.look_up_changed, dynamic=False, fullgraph=True, backend='eager')
    assert all(torch.equal(a, b) for a, b in zip(images.batch(step), expected))


def test_what_a_gpu_compiles_gives_the_same_numbers_around_a_change_that_cannot_be_compiled(monkeypatch):
    "On the CPU, where the compiler can be had; a person's own change asks the device, and runs as it is"
    def numpys(x, y, bright):
        assert not torch.compiler.is_compiling()
        return x * torch.from_numpy(bright.numpy().copy())[..., None, None, None] + x.mean().item(), y
    monkeypatch.setitem(TRANSFORMS, 'numpys', lambda: Transform(lambda g, steps, n: (torch.rand(steps, n, generator=g),), numpys))
    for recipe in (BOTH, dataclasses.replace(BOTH, transform='numpys+mixup-1')):
        stack = Stack(members(), 'mlp-16', recipe, 'cpu')
        expected = stack.images.batch(stack.clock)
        stack.recorder._compile()
        try: found = stack.images.batch(stack.clock)
        except torch._dynamo.exc.BackendCompilerFailed: pytest.skip('no C++ compiler')
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected))


# The recipe

@pytest.mark.parametrize('given,kept', [('none', False), (False, False), ('crop-flip', True), (True, True), ('trivial', 'trivial')])
def test_augment_is_chosen_by_name_and_kept_as_version_1_did(given, kept):
    recipe = Recipe(augment=given)
    assert recipe.augment is kept or recipe.augment == kept == 'trivial'
    spec = Spec(recipe=recipe)
    assert spec.id == Spec(recipe=Recipe(augment=kept)).id
    assert spec_of(json.loads(json.dumps(dict(spec=dataclasses.asdict(spec))))) == spec


@pytest.mark.parametrize('wrong', ['flip', '', 1, 0, None, 'True', ['trivial']])
def test_another_augmentation_is_refused_with_the_list(wrong):
    with pytest.raises(InputError, match='augment is .*; give one of none, crop-flip, trivial') as e: Recipe(augment=wrong)
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('wrong', [-1, math.inf, math.nan, 'much', True])
def test_an_alpha_that_cannot_be_is_refused(wrong):
    with pytest.raises(InputError, match='mixup is .*; give a number of at least 0'): Recipe(mixup=wrong)


def test_mixup_by_a_name_needs_a_positive_alpha():
    with pytest.raises(InputError, match='mixup is 0.0; give a positive number'): Recipe(transform='mixup-0')


def test_what_a_run_is():
    "Ids of version 0.1 stay; another augmentation or alpha is another run, in another stack"
    specs = [Spec(recipe=r) for r in (Recipe(), Recipe(augment=True), Recipe(augment='trivial'), Recipe(mixup=1), Recipe(mixup=.2))]
    assert specs[0].id == 'bf616d24bf88' and len({s.id for s in specs}) == 5 and len(pack(specs)) == 5
    assert len({r.pace for r in (s.recipe for s in specs)}) == 5 and Recipe(mixup=1) == Recipe(mixup=1.)


def test_from_the_command_line(ncdo, tmp_path):
    args = ['train', '--model', 'mlp-16', '--steps', 20, '--batch-size', 32, '--augment', 'trivial', '--mixup', 1, '--out', tmp_path / 'run']
    assert ncdo(*args)[0] == 0 and 'holds this run already' in ncdo(*args)[2]
    recipe = json.loads((tmp_path / 'run/record.json').read_text())['spec']['recipe']
    assert recipe['augment'] == 'trivial' and recipe['mixup'] == 1
    status, _, err = ncdo(*args[:-4], '--augment', 'flip', '--out', tmp_path / 'other')
    assert status == 2 and err.count('\n') == 1 and "augment is 'flip'; give one of none, crop-flip, trivial" in err
    status, _, err = ncdo(*args[:8], 'none', *args[9:])
    assert status == 2 and 'augment trivial, not False' in err
