"TinyImageNet-LT: the real images if they are there, and small folders laid out like theirs"
import dataclasses, hashlib, os, shutil, numpy as np, pytest, torch
from PIL import Image
from ncdo import data as module
from ncdo.data import DATASETS, TINY_IMAGENET_COUNTS, load
from ncdo.gains import InputError

NAME, PARTS = 'tiny-imagenet-lt', ('train', 'validation', 'test')
COLOURS = dict(n01=(230, 20, 20), n02=(20, 230, 20), n03=(20, 20, 230)) # Their order is that of the classes
COUNTS = [4, 3, 2]


def jpeg(path, colour, size=(64, 64)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB' if len(colour) == 3 else 'L', size, colour if len(colour) == 3 else colour[0]).save(path, 'JPEG', quality=100)


def tiny_imagenet(root, per_class=6, images='images', held=50, words=None):
    "Three classes, one colour each, shaded so that no two images are alike; made and annotated in no particular order"
    folder, rows = root / 'tiny-imagenet-200', []
    for c in ('n03', 'n01', 'n02'):
        def shade(k): return tuple(v - 3 * k if v > 20 else v for v in COLOURS[c])
        for i in range(per_class): jpeg(folder / 'train' / c / images / f'{c}_{i}.JPEG', shade(i), (64, 64) if i else (50, 70))
        for i in range(held):
            file = f'val_{7 * len(rows) % 151}.JPEG'
            jpeg(folder / 'val/images' / file, shade(10 + i))
            rows.append(f'{file}\t{c}\t0\t0\t62\t62\n')
        (folder / 'train' / c / f'{c}_boxes.txt').write_text('0 0 1 1')
    (folder / 'val/val_annotations.txt').write_text(''.join(rows))
    if words: (folder / 'words.txt').write_text(words)
    return root


@pytest.fixture
def small(tmp_path, monkeypatch):
    "A small folder, under the real name"
    monkeypatch.setitem(DATASETS, NAME, dataclasses.replace(DATASETS[NAME], counts=COUNTS))
    return tiny_imagenet(tmp_path)


def test_counts():
    "The paper's total and ratio, and the formula itself in whole numbers: n is the least integer with n^199 >= 500^199 / 100^k"
    assert sum(TINY_IMAGENET_COUNTS) == 21748 and len(TINY_IMAGENET_COUNTS) == 200 and max(TINY_IMAGENET_COUNTS) / min(TINY_IMAGENET_COUNTS) == 500 / 6
    for k, n in enumerate(TINY_IMAGENET_COUNTS):
        assert n ** 199 * 100 ** k >= 500 ** 199 and (n == 6 or (n - 1) ** 199 * 100 ** k < 500 ** 199)


def test_parts_and_labels(small):
    "Counts, halves, and the colour of each image says that its label is right"
    d = load(NAME, small)
    assert d.x.shape == (sum(COUNTS) + 150, 3, 64, 64) and d.x.dtype == torch.uint8 and d.class_names == tuple(COLOURS)
    assert [torch.bincount(d.part(p)[1]).tolist() for p in PARTS] == [COUNTS, [25] * 3, [25] * 3]
    assert torch.equal(d.x.float().mean((2, 3)).argmax(1), d.y)
    together = torch.cat([getattr(d, p) for p in PARTS])
    assert len(together.unique()) == len(together) == len(d.x)


def test_no_image_is_drawn_twice(small):
    d = load(NAME, small)
    assert len({x.numpy().tobytes() for x in d.x}) == len(d.x)


def test_the_seed_says_which(small):
    a, b, c = load(NAME, small), load(NAME, small), load(NAME, small, split_seed=1)
    assert a.split_hash == b.split_hash != c.split_hash
    assert not torch.equal(a.part('train')[0], c.part('train')[0]) and not torch.equal(a.part('test')[0], c.part('test')[0])


def test_decoded_once_while_the_files_stay(small):
    a = load(NAME, small)
    assert load(NAME, small).x is a.x
    for f in (small / 'tiny-imagenet-200/val/images').iterdir():
        if f.name == 'val_7.JPEG':
            later = f.stat().st_mtime_ns + 10 ** 9 # Whatever the clock of the file system can tell apart
            jpeg(f, (250, 250, 250))
            os.utime(f, ns=(later, later))
    assert load(NAME, small).split_hash != a.split_hash


@pytest.mark.parametrize('change', ['no images folder', 'file system backwards', 'annotations sorted', 'words', 'wnids'])
def test_what_does_not_change_the_split(small, tmp_path, monkeypatch, change):
    wanted, folder = load(NAME, small).split_hash, small / 'tiny-imagenet-200'
    if change == 'no images folder':
        shutil.rmtree(folder)
        tiny_imagenet(tmp_path, images='')
    if change == 'file system backwards':
        def backwards(*a, walk=os.walk, **kw):
            for where, inside, names in walk(*a, **kw):
                inside.sort(reverse=True)
                names.sort(reverse=True)
                yield where, inside, names
        monkeypatch.setattr(module.os, 'walk', backwards)
    if change == 'annotations sorted':
        path = folder / 'val/val_annotations.txt'
        path.write_text('\n'.join(sorted(path.read_text().splitlines())))
    if change == 'words': (folder / 'words.txt').write_text('n03\ta fish\nn01\tz bird')
    if change == 'wnids': (folder / 'wnids.txt').write_text('n03\nn01\nn02\n')
    d = load(NAME, small)
    assert d.split_hash == wanted and torch.equal(d.x.float().mean((2, 3)).argmax(1), d.y)


def test_more_training_images_leave_the_held_out_ones_alone(small, tmp_path):
    few = load(NAME, small)
    many = load(NAME, tiny_imagenet(tmp_path / 'many', per_class=9))
    assert all(torch.equal(few.part(p)[0], many.part(p)[0]) for p in ('validation', 'test')) and few.split_hash != many.split_hash


@pytest.mark.parametrize('words,names', [('n01\tgoldfish, Carassius auratus\nn02\tcrane\nn03\tcrane, heron\nn99\tfrog\n', ('goldfish', 'n02', 'n03')),
    ('n02\tcat\n', ('n01', 'cat', 'n03')), ('nonsense\n\nn01\t\n', ('n01', 'n02', 'n03'))])
def test_names(small, words, names):
    (small / 'tiny-imagenet-200/words.txt').write_text(words)
    assert load(NAME, small).class_names == names


def test_grey_images(small):
    jpeg(small / 'tiny-imagenet-200/val/images/val_7.JPEG', (77,))
    d = load(NAME, small)
    assert d.x.shape[1] == 3 and ((d.x.int() - 77).abs().amax((1, 2, 3)) <= 1).sum() == 1


def rewrite(path, change): path.write_text(change(path.read_text()))


BROKEN = {
    'no folder': (shutil.rmtree, r'tiny-imagenet-200 is missing; torchvision does not download it, so unpack tiny-imagenet-200\.zip into '),
    'no train': (lambda f: shutil.rmtree(f / 'train'), 'tiny-imagenet-200/train is missing'),
    'no val': (lambda f: shutil.rmtree(f / 'val'), 'tiny-imagenet-200/val/images is missing'),
    'no annotations': (lambda f: (f / 'val/val_annotations.txt').unlink(), 'val/val_annotations.txt is missing'),
    'no class folder': (lambda f: shutil.rmtree(f / 'train/n02'), 'class n02 of val_annotations.txt has no folder in .*train; unpack'),
    'a class without images': (lambda f: shutil.rmtree(f / 'train/n02/images'), 'class folder .*n02 holds no images'),
    'a small class': (lambda f: [(f / f'train/n02/images/n02_{i}.JPEG').unlink() for i in range(4)], 'class n02 has 2 training images in .*; 3 are wanted'),
    'a class too many': (lambda f: jpeg(f / 'train/n04/images/0.JPEG', (0, 0, 0)), 'train has 4 class folders; it must have 3'),
    'a validation image that is not there': (lambda f: (f / 'val/images/val_7.JPEG').unlink(), 'val_annotations.txt names val_7.JPEG, which is not in .*images; unpack'),
    'too few validation images': (lambda f: rewrite(f / 'val/val_annotations.txt', lambda t: t.split('\n', 1)[1]), 'class n03 has 49 validation images in .*; 50 are wanted'),
    'one validation image twice': (lambda f: rewrite(f / 'val/val_annotations.txt', lambda t: t.replace('val_7.', 'val_0.')), 'class n03 has 49 validation images'),
    'no validation images of a class': (lambda f: rewrite(f / 'val/val_annotations.txt', lambda t: t.replace('n02', 'n01')), 'class n02 has 0 validation images'),
    'annotations that are none': (lambda f: (f / 'val/val_annotations.txt').write_bytes(b'\xff\x00\n\nval_0.JPEG\n'), 'class n01 has 0 validation images'),
    'a text file': (lambda f: (f / 'val/images/val_7.JPEG').write_text('not a picture'), 'val_7.JPEG is not an image that can be read'),
    'half a file': (lambda f: (f / 'val/images/val_7.JPEG').write_bytes((f / 'val/images/val_7.JPEG').read_bytes()[:-200]), 'val_7.JPEG cannot be read as an image')}


@pytest.mark.parametrize('case', BROKEN)
def test_what_is_wrong_is_one_line(small, case):
    spoil, message = BROKEN[case]
    spoil(small / 'tiny-imagenet-200')
    with pytest.raises(InputError, match=message) as e: load(NAME, small)
    assert '\n' not in str(e.value)


def test_fewer_classes(small, monkeypatch):
    monkeypatch.setitem(DATASETS, NAME, dataclasses.replace(DATASETS[NAME], counts=TINY_IMAGENET_COUNTS))
    with pytest.raises(InputError, match='train has 3 class folders; it must have 200'): load(NAME, small)


def test_roots(tmp_path, monkeypatch):
    monkeypatch.delenv('NCDO_DATA', raising=False)
    with pytest.raises(InputError, match=f'{NAME} needs a data root; give --data DIR or set NCDO_DATA'): load(NAME)
    with pytest.raises(InputError, match='is not a folder'): load(NAME, tmp_path / 'nothere')
    with pytest.raises(InputError, match='have one size already'): load(NAME, tmp_path, image_size=32)


@pytest.fixture(scope='module')
def real(tiny_root): return load(NAME, tiny_root)


def test_real_counts(real):
    assert real.x.shape == (31748, 3, 64, 64) and real.x.dtype == torch.uint8 and real.num_classes == len(set(real.class_names)) == 200
    assert torch.bincount(real.part('train')[1]).tolist() == TINY_IMAGENET_COUNTS
    assert all(torch.bincount(real.part(p)[1]).tolist() == [25] * 200 for p in ('validation', 'test'))
    assert torch.allclose(real.priors, torch.tensor(TINY_IMAGENET_COUNTS, dtype=torch.float64) / 21748)
    together = torch.cat([getattr(real, p) for p in PARTS])
    assert len(together.unique()) == len(together) == 31748


def test_real_labels(real, tiny_root):
    "Every held-out image, read anew, has the class of its annotation; every training image lies in its class's folder"
    folder = os.path.join(tiny_root, 'tiny-imagenet-200')
    wnids = sorted(os.listdir(os.path.join(folder, 'train')))
    def key(path): return hashlib.sha256(np.array(Image.open(path).convert('RGB')).transpose(2, 0, 1).tobytes()).digest()
    def keys(p): return [(hashlib.sha256(x.numpy().tobytes()).digest(), int(y)) for x, y in zip(*real.part(p))]
    with open(os.path.join(folder, 'val/val_annotations.txt')) as f: rows = [line.split('\t') for line in f]
    assert {(key(os.path.join(folder, 'val/images', r[0])), wnids.index(r[1])) for r in rows} == set(keys('validation')) | set(keys('test'))
    for c in (0, 3, 150, 199):
        there = {key(os.path.join(where, f)) for where, _, files in os.walk(os.path.join(folder, 'train', wnids[c])) for f in files if f.endswith('.JPEG')}
        assert {k for k, y in keys('train') if y == c} <= there


def test_real_split(real, tiny_root):
    "Held-out images are the same from any copy; which training images are drawn depends on how many the copy has"
    held = hashlib.sha256(b''.join(t.numpy().tobytes() for p in ('validation', 'test') for t in real.part(p))).hexdigest()[:16]
    assert held == 'e89f561914af9e32'
    there = sum(f.endswith('.JPEG') for _, _, files in os.walk(os.path.join(tiny_root, 'tiny-imagenet-200', 'train')) for f in files)
    if there == 22403: assert real.split_hash == '4507a65905462ba3'
    else: assert len(real.train) == 21748 < there
