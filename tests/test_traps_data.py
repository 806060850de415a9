"Traps of data, each named by its number: what bit people elsewhere, and what happens here"
import warnings, numpy as np, pytest, torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset
from pictures import COUNTS, archive, divided_folder, image_folder, picture
from ncdo.data import choose, common_size, from_dataset, load, long_tail_counts, read_npz
from ncdo.gains import InputError

PARTS = ('train', 'validation', 'test')


def sources(tmp_path):
    "Every way to come to `Data`, as a function of the split seed"
    pets = str(image_folder(tmp_path / 'pets'))
    half = str(divided_folder(tmp_path / 'half', train=dict(a=6, b=5), test=dict(a=6, b=5)))
    whole = str(divided_folder(tmp_path / 'whole', train=dict(a=6, b=5), val=dict(a=3, b=4), test=dict(a=3, b=2)))
    npz = str(archive(tmp_path / 'a.npz'))
    pairs = TensorDataset(torch.arange(40.).view(40, 1, 1, 1).expand(-1, 1, 4, 4), torch.arange(40) % 4)
    return dict(digits=lambda s: load('digits-lt', split_seed=s), folder=lambda s: load(pets, split_seed=s), half=lambda s: load(half, split_seed=s),
        whole=lambda s: load(whole, split_seed=s), npz=lambda s: load(npz, split_seed=s), pairs=lambda s: from_dataset(pairs, split_seed=s))


KINDS = ('digits', 'folder', 'half', 'whole', 'npz', 'pairs')


@pytest.mark.parametrize('kind', KINDS)
def test_trap_23_validation_and_test_never_mix(tmp_path, kind):
    "Fixed, disjoint index lists; the same seed gives the same ones; another seed another split where one is drawn"
    make = sources(tmp_path)[kind]
    data, again, other = make(0), make(0), make(1)
    held = [set(getattr(data, p).tolist()) for p in PARTS]
    assert not held[0] & held[1] and not held[1] & held[2] and not held[0] & held[2]
    assert all(torch.equal(getattr(data, p), getattr(again, p)) for p in PARTS) and data.split_hash == again.split_hash
    assert (data.split_hash == other.split_hash) == (kind == 'whole')


@pytest.mark.parametrize('largest,classes,ratio,total', [(5000, 10, 100, 12406), (500, 100, 100, 10847)])
def test_trap_35_counts_are_floors(largest, classes, ratio, total):
    counts = long_tail_counts(largest, classes, ratio)
    assert sum(counts) == total and sum(round(largest * ratio ** (-k / (classes - 1))) for k in range(classes)) != total


@pytest.mark.parametrize('kind', KINDS)
def test_trap_36_no_image_is_drawn_twice(tmp_path, kind):
    data = sources(tmp_path)[kind](0)
    together = torch.cat([getattr(data, p) for p in PARTS])
    assert len(together.unique()) == len(together)
    if kind != 'digits': assert len(together) == len(data.x)


@pytest.mark.parametrize('seed', range(3))
def test_trap_36_skipping_few_or_many(seed):
    "Two indices to skip are two indices, not a row and a column"
    g = torch.Generator().manual_seed(seed)
    for n in (1, 2, 3, 40):
        skip = torch.arange(n)
        assert not set(choose(torch.zeros(50, dtype=torch.long), [50 - n], g, skip).tolist()) & set(skip.tolist())


@pytest.mark.parametrize('as_test', [False, True])
def test_trap_38_an_ignored_label_is_no_class(as_test):
    "Label 255 means no label: in no part, in no prior"
    y = torch.arange(60) % 3
    y[::5] = 255
    pairs = TensorDataset(torch.rand(60, 1, 4, 4), y)
    data = from_dataset(pairs, test=pairs if as_test else None, ignore_index=255)
    assert data.num_classes == 3 and 255 not in data.y and len(data.x) == 48 * (1 + as_test)
    assert torch.allclose(data.priors, torch.full((3,), 1 / 3, dtype=torch.float64))
    with pytest.raises(InputError, match='12 labels, such as 255, are not among'): from_dataset(pairs)


@pytest.mark.parametrize('counts,message', [([4, 9], 'class 1 has 5 examples left, 9 are wanted'), ([6, 1], 'class 0 has 5 examples left, 6 are wanted')])
def test_trap_39_a_class_that_is_too_small_is_named(counts, message):
    with pytest.raises(InputError, match=message): choose(torch.arange(10) % 2, counts, torch.Generator())


def test_trap_39_in_a_folder(tmp_path):
    with pytest.raises(InputError, match="class 'dog' has 2 images in .*; it needs at least 3, one each for training, validation and test"):
        load(str(image_folder(tmp_path / 'pets', dict(cat=9, dog=2))))


class Bomb:
    def __reduce__(self): return (open, ('exploded', 'w'))


def test_trap_40_pickles_are_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('x_train', 'y_test', 'class_names'):
        archive(tmp_path / 'a.npz', **{name: np.array([Bomb()] * 18, object)})
        with pytest.raises(InputError, match='Object arrays cannot be loaded') as e: load('./a.npz')
        assert '\n' not in str(e.value) and not (tmp_path / 'exploded').exists()


@pytest.mark.parametrize('keep', [0, 10, .3, .7, .99])
def test_trap_40_a_truncated_archive_is_one_line(tmp_path, keep):
    whole = archive(tmp_path / 'a.npz').read_bytes()
    (tmp_path / 'a.npz').write_bytes(whole[:keep if keep > 1 else int(keep * len(whole))])
    with pytest.raises(InputError, match='a.npz cannot be read as an .npz') as e: load(str(tmp_path / 'a.npz'))
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('keep', [0, 8, 60, .5, .95])
@pytest.mark.parametrize('ending', ['png', 'jpg', 'tiff', 'webp', 'bmp'])
def test_trap_40_a_truncated_image_is_one_line(tmp_path, keep, ending):
    image_folder(tmp_path / 'pets')
    broken = tmp_path / f'pets/dog/x.{ending}'
    picture(broken)
    whole = broken.read_bytes()
    broken.write_bytes(whole[:keep if keep > 1 else int(keep * len(whole))])
    with pytest.raises(InputError, match=f'dog/x.{ending} ') as e: load(str(tmp_path / 'pets'))
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('mode', ['L', 'RGBA', 'P', 'LA', '1', 'CMYK', 'I;16'])
def test_trap_41_every_kind_of_image_becomes_rgb(tmp_path, mode):
    "The same picture, whatever it was saved as, to a few levels"
    ramp = np.linspace(0, 255, 16).astype(np.uint8)[None].repeat(16, 0)
    if mode == '1': ramp = np.where(ramp > 127, 255, 0).astype(np.uint8)
    plain = Image.fromarray(ramp)
    image = Image.fromarray(ramp.astype(np.uint16) * 257) if mode == 'I;16' else plain.convert(mode)
    for i in range(3):
        for c in 'ab': (tmp_path / c).mkdir(exist_ok=True)
        image.save(tmp_path / f'a/{i}.{"tiff" if mode == "CMYK" else "png"}')
        plain.save(tmp_path / f'b/{i}.png')
    data = load(str(tmp_path))
    assert data.x.shape == (6, 3, 16, 16) and data.x.dtype == torch.uint8
    assert (data.x[0].int() - data.x[3].int()).abs().max() <= 3


def test_trap_41_every_size_becomes_one(tmp_path):
    for i, size in enumerate([(33, 31), (64, 64), (20, 90), (16, 16), (32, 32)]):
        for c in 'ab': picture(tmp_path / c / f'{i}.png', i, size, 'RGBA' if i % 2 else 'L')
    assert load(str(tmp_path), image_size=24).x.shape == (10, 3, 24, 24)
    with pytest.warns(UserWarning, match='images of 5 sizes, the largest 64 x 64, become 31 x 31; give image_size'): data = load(str(tmp_path))
    assert data.x.shape == (10, 3, 31, 31)


def test_trap_41_proportions_are_kept(tmp_path):
    "A wide image is cropped in the middle, not squeezed: a circle stays one"
    y, x = np.mgrid[:40, :120]
    circle = np.where((y - 20) ** 2 + (x - 60) ** 2 < 15 ** 2, 255, 0).astype(np.uint8)
    for c in 'ab':
        (tmp_path / c).mkdir()
        for i in range(3): Image.fromarray(circle).save(tmp_path / c / f'{i}.png')
    white = load(str(tmp_path), image_size=40).x[0, 0] > 127
    height, width = white.any(1).sum(), white.any(0).sum()
    assert abs(height - width) <= 1 and abs(height - 30) <= 1


@pytest.mark.parametrize('sizes,image_size,wanted', [([(28, 20)] * 3, None, (28, 20)), ([(28, 20)] * 3, 64, (64, 64)), ([(256, 256)], None, (256, 256))])
def test_trap_41_the_common_size(sizes, image_size, wanted):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert common_size(sizes, image_size) == wanted


@pytest.mark.parametrize('sizes,side', [([(30, 20), (20, 30), (40, 40)], 20), ([(4000, 3000)] * 3, 224), ([(257, 257)], 224)])
def test_trap_41_the_common_size_said_aloud(sizes, side):
    with pytest.warns(UserWarning, match=f'become {side} x {side}'): assert common_size(sizes) == (side, side)


def test_photos_are_turned_upright(tmp_path):
    "A camera held sideways notes it in the file"
    half = np.zeros((16, 16, 3), np.uint8)
    half[:8] = 255
    for c in 'ab':
        (tmp_path / c).mkdir()
        for i in range(3):
            exif = Image.Exif()
            exif[0x112] = 6 if c == 'b' else 1
            Image.fromarray(np.rot90(half) if c == 'b' else half).save(tmp_path / c / f'{i}.png', exif=exif)
    data = load(str(tmp_path))
    assert torch.equal(data.x[0], data.x[3])


def test_names_counts_and_strays(tmp_path):
    "Alphabetical classes; nested images are found; hidden files are not looked at, others named in a warning"
    image_folder(tmp_path / 'pets', {'zebra': 5, 'Äffchen': 5, 'cat 2': 5, '10': 5})
    picture(tmp_path / 'pets/zebra/deep/deeper/1.PNG')
    for hidden in ('.git/config', '__MACOSX/x.png', 'zebra/._000.png', 'zebra/.ipynb_checkpoints/000.png'):
        (tmp_path / 'pets' / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / 'pets' / hidden).write_text('x')
    for stray in ('README.md', 'zebra/notes.txt'): (tmp_path / 'pets' / stray).write_text('x')
    with pytest.warns(UserWarning, match='2 files in .* are no images and are skipped: README.md, zebra/notes.txt$'): data = load(str(tmp_path / 'pets'))
    assert data.class_names == ('10', 'cat 2', 'zebra', 'Äffchen') and data.y.bincount().tolist() == [5, 5, 6, 5]


def test_stratified_fifths(tmp_path):
    data = load(str(image_folder(tmp_path / 'pets', dict(a=3, b=4, c=9, d=10, e=25))))
    counts = {p: data.part(p)[1].bincount().tolist() for p in PARTS}
    assert counts == dict(train=[1, 2, 7, 6, 15], validation=[1, 1, 1, 2, 5], test=[1, 1, 1, 2, 5])


def test_the_split_follows_the_content_not_the_place(tmp_path):
    a, b = [load(str(image_folder(tmp_path / name))) for name in ('here', 'there')]
    assert a.split_hash == b.split_hash and a.name != b.name
    picture(tmp_path / 'there/cat/000.png', 5)
    assert load(str(tmp_path / 'there')).split_hash != a.split_hash


def test_a_name_comes_before_a_folder(tmp_path, monkeypatch):
    image_folder(tmp_path / 'digits-lt')
    monkeypatch.chdir(tmp_path)
    assert load('digits-lt').num_classes == 10 and load('./digits-lt').class_names == tuple(COUNTS)


def test_vehicles(tmp_path):
    "A class called train is a class, unless validation or test stand beside it"
    assert load(str(image_folder(tmp_path / 'v', dict(bus=3, car=3, train=3)))).class_names == ('bus', 'car', 'train')


def test_splits_of_one_folder_share_their_images(tmp_path):
    "As members of a stack must"
    pets = str(image_folder(tmp_path / 'pets'))
    assert load(pets).x is load(pets, split_seed=1).x


def test_greyscale_archives(tmp_path):
    archive(tmp_path / 'a.npz', x_train=np.zeros((18, 7, 5), np.uint8), x_test=np.zeros((18, 7, 5), np.uint8))
    assert read_npz(tmp_path / 'a.npz')['x_test'].shape == (18, 7, 5, 1) and load(str(tmp_path / 'a.npz')).x.shape == (36, 1, 7, 5)


def test_odd_test_images_go_to_test(tmp_path):
    data = load(str(divided_folder(tmp_path / 'd', train=dict(a=4, b=4), test=dict(a=5, b=2))))
    assert [data.part(p)[1].bincount().tolist() for p in PARTS] == [[4, 4], [2, 1], [3, 1]]


class Pairs(Dataset):
    "Images and labels as they come"
    def __init__(self, images, labels): self.images, self.labels = images, labels
    def __len__(self): return len(self.labels)
    def __getitem__(self, i): return self.images[i], self.labels[i]


GREY, COLOUR = Image.new('L', (4, 5)), Image.new('RGBA', (4, 5))


@pytest.mark.parametrize('image,shape,dtype', [(GREY, (1, 5, 4), torch.uint8), (COLOUR, (3, 5, 4), torch.uint8), (np.zeros((3, 5, 4)), (3, 5, 4), torch.float32),
    (torch.zeros(5, 4), (1, 5, 4), torch.float32), (torch.zeros(3, 5, 4, dtype=torch.uint8), (3, 5, 4), torch.uint8)])
@pytest.mark.parametrize('label', [int, np.int64, torch.tensor])
def test_items_of_any_kind(image, shape, dtype, label):
    data = from_dataset(Pairs([image] * 12, [label(i % 3) for i in range(12)]))
    assert data.x.shape == (12, *shape) and data.x.dtype == dtype and data.class_names == ('0', '1', '2')


def test_given_data_sets_are_respected():
    parts = [TensorDataset(torch.full((n, 1, 2, 2), float(k)), torch.arange(n) % 2) for k, n in enumerate((10, 4, 6))]
    data = from_dataset(*parts, class_names=['no', 'yes'])
    assert all((data.part(p)[0] == k).all() and len(data.part(p)[0]) == n for k, (p, n) in enumerate(zip(PARTS, (10, 4, 6))))
    assert data.class_names == ('no', 'yes')


ROWS = torch.rand(12, 1, 4, 4)
LABELS = [i % 3 for i in range(12)]


@pytest.mark.parametrize('make,message', [
    (lambda: from_dataset(Pairs(ROWS, [0, 1.5] * 6)), 'the label of train item 1 is 1.5; it must be a class index'),
    (lambda: from_dataset(Pairs(ROWS, torch.rand(12, 3))), 'must be a class index'),
    (lambda: from_dataset(Pairs(ROWS, [-1, *LABELS[1:]])), '1 labels, such as -1'),
    (lambda: from_dataset(Pairs(ROWS, LABELS), class_names=['a', 'b']), '4 labels, such as 2, are not among 0..1'),
    (lambda: from_dataset(Pairs([*ROWS[:11], torch.rand(1, 5, 5)], LABELS)), r'item 11 is \(1, 5, 5\), others are \(1, 4, 4\); resize them in the transform'),
    (lambda: from_dataset(Pairs(['x'] * 12, LABELS)), 'the image of train item 0 is str'),
    (lambda: from_dataset(Pairs(torch.rand(12, 3), LABELS)), r'has shape \(3,\); it must be \(channels, height, width\)'),
    (lambda: from_dataset(Pairs(ROWS / 0, LABELS)), 'not finite'),
    (lambda: from_dataset(iter([])), 'has no length'),
    (lambda: from_dataset(Pairs(ROWS[:0], [])), 'the train data set has no labelled images'),
    (lambda: from_dataset(Pairs(ROWS, LABELS), test=Pairs(torch.rand(12, 1, 5, 5), LABELS)), 'the parts hold images of different kinds'),
    (lambda: from_dataset(Pairs(ROWS, [0] * 12)), "only one class, '0'"),
    (lambda: from_dataset(Pairs(ROWS, LABELS), test=Pairs(ROWS, [3] * 12)), "class '3' has 0 images in the train part")])
def test_data_sets_that_will_not_do(make, message):
    with pytest.raises(InputError, match=message) as e: make()
    assert '\n' not in str(e.value)
