"Traps of data, each named by its number: what bit people elsewhere, and what happens here"
import errno, os, warnings, numpy as np, pytest, torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset
from pictures import COUNTS, archive, divided_folder, image_folder, picture
from ncdo.data import choose, from_dataset, load, long_tail_counts
from ncdo.images import common_size, read_image, read_npz
from ncdo.gains import InputError
from ncdo.predict import image_files

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


@pytest.mark.parametrize('names', [None, list('abc')])
@pytest.mark.parametrize('by', ['archive', 'archive of cifar10', 'data set', 'three data sets'])
def test_labels_that_count_from_1_are_told_and_not_shifted(tmp_path, by, names):
    "With as many names as there are labels, or none; whatever they come from"
    y, what = np.arange(18) // 6 + 1, r'labels of .*\.npz' if 'archive' in by else 'the labels'
    pairs = TensorDataset(torch.rand(18, 1, 4, 4), torch.from_numpy(y))
    path = archive(tmp_path / ('cifar10.npz' if 'cifar' in by else 'a.npz'), y_train=y, y_test=y, **{} if names is None else dict(class_names=names))
    make = {'archive': lambda: load(str(path)), 'archive of cifar10': lambda: load('cifar10-lt', tmp_path), 'data set': lambda: from_dataset(pairs, class_names=names),
        'three data sets': lambda: from_dataset(pairs, pairs, pairs, class_names=names)}[by]
    with pytest.raises(InputError, match=f'^{what} run from 1 to 3, but classes are numbered from 0; subtract 1 from all of them$'): make()


def test_a_class_0_that_is_merely_absent_is_no_shift(tmp_path):
    "Its name is there, so the others keep theirs; and a label of no name is one to leave out"
    y = np.arange(18) // 6 + 1
    with pytest.raises(InputError, match="class 'none' has 0 images in the train part of .*; add some, or leave the class out everywhere$"):
        load(str(archive(tmp_path / 'a.npz', y_train=y, y_test=y, class_names=['none', 'a', 'b', 'c'])))
    pairs = TensorDataset(torch.rand(18, 1, 4, 4), torch.from_numpy(y))
    with pytest.raises(InputError, match="class 'none' has 0 images in own"): from_dataset(pairs, class_names=['none', 'a', 'b', 'c'])
    x, y = pairs.tensors
    with pytest.raises(InputError, match='6 labels, such as 3, are not among 0..2'): from_dataset(TensorDataset(x, y.where(y > 1, 0)), class_names=list('abc'))


def test_splits_are_those_of_before(tmp_path):
    "What records were made on, whatever is checked on the way"
    pairs = TensorDataset(torch.arange(40.).view(40, 1, 1, 1).expand(-1, 1, 4, 4), torch.arange(40) % 4)
    found = dict(archive=load(str(archive(tmp_path / 'a.npz'))), named=load(str(archive(tmp_path / 'b.npz', class_names=list('xyz'))), split_seed=3), pairs=from_dataset(pairs),
        folder=load(str(image_folder(tmp_path / 'pets'))), numbered=load(str(image_folder(tmp_path / 'n', {'1': 5, '2': 4, '10': 6}))),
        divided=load(str(divided_folder(tmp_path / 'd', train=dict(a=6, b=5), test=dict(a=6, b=5)))))
    assert {k: d.split_hash for k, d in found.items()} == dict(archive='add597f1282fac01', named='80978c2e3dab4ccd', pairs='38770e2e7a68b479',
        folder='6189da28377a30e4', numbered='179b84e36a7f17d8', divided='d3f7a0ddf815ae2f')


def test_folders_called_by_numbers_are_in_the_order_of_text(tmp_path):
    "As torchvision has them; names go with their images"
    from torchvision.datasets import ImageFolder
    folder = image_folder(tmp_path / 'n', {'1': 5, '2': 4, '10': 6})
    data = load(str(folder))
    assert data.class_names == ('1', '10', '2') == tuple(ImageFolder(folder).classes) and data.y.bincount().tolist() == [5, 6, 4]
    assert image_folder(tmp_path / 'm', {'01': 3, '02': 3, '10': 3}) and load(str(tmp_path / 'm')).class_names == ('01', '02', '10')


PARTLY = dict(train=dict(a=6, b=6), val=dict(a=3, b=3), test=dict(a=3, b=3))


@pytest.mark.parametrize('part,parts,need', [('test', ('train', 'test'), 'at least 2, one for validation and one for test'), ('val', ('train', 'val'), 'at least 2, one for'),
    ('test', ('train', 'val', 'test'), 'at least 1'), ('val', ('train', 'val', 'test'), 'at least 1')])
@pytest.mark.parametrize('how', ['empty', 'missing', 'no images in it'])
def test_a_class_without_held_out_images_cannot_be_measured(tmp_path, part, parts, need, how):
    "An empty folder says what a missing one says"
    folder = divided_folder(tmp_path / 'd', **{p: PARTLY[p] for p in parts})
    for f in (folder / part / 'b').iterdir(): f.unlink()
    if how == 'missing': (folder / part / 'b').rmdir()
    if how == 'no images in it': (folder / part / 'b/notes.txt').write_text('x')
    name = dict(val='validation').get(part, part)
    with warnings.catch_warnings(), pytest.raises(InputError, match=f"class 'b' has 0 images in the {name} part of .*/d; it needs {need}.* or it cannot be measured; add some, or leave the class out everywhere$"):
        warnings.simplefilter('ignore')
        load(str(folder))


def test_a_class_without_training_images_names_its_folder(tmp_path):
    folder = divided_folder(tmp_path / 'd', **PARTLY)
    for f in (folder / 'train/b').iterdir(): f.unlink()
    with pytest.raises(InputError, match='class folder .*/d/train/b holds no images .*; add some, or take the folder out$'): load(str(folder))


def folder_called_image(path): path.mkdir()
def folder_called_image_with_texts(path): path.mkdir(), (path / 'notes.txt').write_text('x')
def empty_file(path): path.touch()
def link_to_nowhere(path): path.symlink_to(path.with_name('gone.png'))
def pipe(path): os.mkfifo(path)
def forbidden(path): picture(path), path.chmod(0)


NO_IMAGES = [ # chkstyle: ignore-node
    (folder_called_image, 'x.jpg is a folder, not an image; take it out, or give it another name'),
    (folder_called_image_with_texts, 'x.jpg is a folder, not an image'),
    (empty_file, 'x.jpg is not an image but an empty file; mend it or take it out'),
    (pipe, 'x.jpg is not an image but an empty file'),
    (link_to_nowhere, r'x.jpg cannot be read( as an image)? \(.*No such file'),
    (forbidden, r'x.jpg cannot be read \(Permission denied\); mend its permissions, or take it out')]


@pytest.fixture
def barred(monkeypatch):
    "Permissions count, even for the superuser"
    def careful(path, mode='r', *args, open=open, **kw):
        if 'r' in mode and isinstance(path, (str, os.PathLike)) and os.path.isfile(path) and not os.stat(path).st_mode & 0o400:
            raise PermissionError(errno.EACCES, 'Permission denied', str(path))
        return open(path, mode, *args, **kw)
    monkeypatch.setattr('builtins.open', careful)


@pytest.mark.parametrize('spoil,message', NO_IMAGES, ids=lambda v: getattr(v, '__name__', ''))
@pytest.mark.parametrize('where', ['undivided', 'train', 'test', 'predict'])
def test_what_only_calls_itself_an_image_is_one_line(tmp_path, barred, spoil, message, where):
    folder = divided_folder(tmp_path / 'd', train=dict(a=6, b=6), test=dict(a=3, b=3))
    spoil(folder / ('test' if where == 'test' else 'train') / 'b/x.jpg')
    with pytest.raises(InputError, match=f'd/t.*/b/{message}') as e:
        if where == 'predict': [read_image(f, (8, 8)) for f in image_files([folder])]
        else: load(str(folder / 'train' if where == 'undivided' else folder))
    assert '\n' not in str(e.value)


def test_a_folder_called_like_an_image_may_hold_images(tmp_path):
    image_folder(tmp_path / 'pets', dict(cat=3, dog=3))
    picture(tmp_path / 'pets/cat/more.png/1.png', 9)
    data = load(str(tmp_path / 'pets'))
    assert data.y.bincount().tolist() == [4, 3] and len(image_files([tmp_path / 'pets'])) == 7


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
    (lambda: from_dataset(Pairs(ROWS, LABELS), ignore_index='2'), "ignore_index is '2'; it must be"),
    (lambda: from_dataset(Pairs(ROWS, LABELS), test=Pairs(ROWS, [3] * 12)), "class '3' has 0 images in the train part")])
def test_data_sets_that_will_not_do(make, message):
    with pytest.raises(InputError, match=message) as e: make()
    assert '\n' not in str(e.value)
