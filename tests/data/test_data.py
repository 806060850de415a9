"Long tails, splits, and archives that are not what they should be"
import math, numpy as np, pytest, torch
from ncdo.data import DATASETS, choose, from_dataset, load, long_tail_counts, toy_distribution
from ncdo.gains import InputError


@pytest.mark.parametrize('largest,classes,ratio,total', [(5000, 10, 100, 12406), (500, 100, 100, 10847), (80, 10, 20, 269), (7, 3, 1, 21)])
def test_counts_are_floors(largest, classes, ratio, total):
    counts = long_tail_counts(largest, classes, ratio)
    assert sum(counts) == total and counts[0] == largest and counts == sorted(counts, reverse=True)


@pytest.mark.parametrize('largest,ratio', [(5000, 100), (500, 50), (300, 10), (1000, 1000)])
def test_smallest_class_is_exact(largest, ratio): assert long_tail_counts(largest, 10, ratio)[-1] == largest // ratio


@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('name', ['digits-lt', 'digits-balanced'])
def test_parts_are_disjoint_without_repeats(name, seed):
    d = load(name, split_seed=seed)
    parts = [getattr(d, p) for p in ('train', 'validation', 'test')]
    together = torch.cat(parts)
    assert len(together.unique()) == len(together)
    assert [torch.bincount(d.y[p]).tolist() for p in parts] == [DATASETS[name].counts, [48] * 10, [50] * 10]


def test_hash_follows_content():
    a, b = load('digits-lt'), load('digits-lt', split_seed=1)
    assert a.split_hash == load('digits-lt').split_hash != b.split_hash
    assert load('digits-lt').split_hash == '5f140ddc26ebaa3a'


SPLIT = dict( # chkstyle: ignore-node
    load=lambda s: load('digits-lt', split_seed=s).split_hash, swapped=lambda s: load('digits-lt', split_seed=s, swapped=True).split_hash,
    from_dataset=lambda s: from_dataset([(torch.full((1, 2, 2), float(i)), i % 2) for i in range(20)], split_seed=s).split_hash,
    toy=lambda s: toy_distribution(9, seed=s)[0].tolist())


@pytest.mark.parametrize('by', SPLIT)
def test_a_seed_is_a_number_of_any_library(by):
    assert SPLIT[by](np.int64(1)) == SPLIT[by](torch.tensor(1)) == SPLIT[by](1) != SPLIT[by](0) and SPLIT[by](2 ** 31 - 1)
    for seed in (True, '1', None, 1.5, -1, 2 ** 31, 2 ** 64, torch.ones(2)):
        with pytest.raises(InputError, match='seed is .*; give a whole number from 0 to 2147483647'): SPLIT[by](seed)


@pytest.mark.parametrize('given,message', [(dict(image_size='1'), "image_size is '1'; it must be a whole number"), (dict(image_size=8.5), 'image_size is 8.5'), (dict(image_size=0), 'image_size is 0'),
    (dict(image_size=np.array(1)), 'image_size is for folders'), (dict(name=1), 'dataset is 1; use one of digits-lt'), (dict(name=None), 'dataset is None'), (dict(name=[]), r'dataset is \[\]'),
    (dict(name='cifar10-lt', root=1), 'data root 1 is not a folder')])
def test_what_cannot_be_loaded_is_one_line(given, message):
    with pytest.raises(InputError, match=message) as error: load(**dict(name='digits-lt') | given)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('given,message', [((5, 1, 2), 'num_classes is 1'), ((0, 3, 2), 'largest is 0'), ((5, 3, math.nan), 'imbalance_ratio is nan'), ((5, 3, .5), 'imbalance_ratio is 0.5')])
def test_counts_that_cannot_be(given, message):
    with pytest.raises(InputError, match=message): long_tail_counts(*given)
    assert long_tail_counts(*map(np.int64, (50, 3, 10))) == long_tail_counts(50, 3, 10)


def test_choosing_more_than_there_are_names_the_class():
    with pytest.raises(InputError, match='class 1 has 2 examples left, 3 are wanted'):
        choose(torch.tensor([0, 0, 0, 1, 1]), [1, 3], torch.Generator())


def small_archive(path, classes=10, per_class=4, **changes):
    rng = np.random.default_rng(0)
    y = np.arange(classes).repeat(per_class)
    x = rng.integers(0, 255, (len(y), 32, 32, 3), dtype=np.uint8)
    np.savez(path, **(dict(x_train=x, y_train=y, x_test=x, y_test=y) | changes))


@pytest.mark.parametrize('spoil,message', [
    (lambda p: p.write_bytes(b'PK\x03\x04 truncated'), 'cannot be read'),
    (lambda p: p.write_bytes(b''), 'cannot be read'),
    (lambda p: small_archive(p, y_test=np.array([object()] * 40)), 'cannot be read'),
    (lambda p: np.savez(p, x_train=np.zeros(3)), "has no array 'y_train'"),
    (lambda p: small_archive(p, x_train=np.zeros((40, 32, 32, 3))), 'must be uint8'),
    (lambda p: small_archive(p, y_train=np.zeros(7, int)), 'shape'),
    (lambda p: small_archive(p), 'class 0 has 4 examples left, 5000 are wanted'),
    (lambda p: small_archive(p, classes=3), '10 classes; the data')])
def test_bad_archives_are_named(tmp_path, spoil, message):
    spoil(tmp_path / 'cifar10.npz')
    with pytest.raises(InputError, match=message) as e: load('cifar10-lt', tmp_path)
    assert '\n' not in str(e.value)


def test_missing_roots(tmp_path, monkeypatch):
    monkeypatch.delenv('NCDO_DATA', raising=False)
    with pytest.raises(InputError, match='needs a data root'): load('cifar10-lt')
    with pytest.raises(InputError, match='is not a folder'): load('cifar10-lt', tmp_path / 'nothere')


def test_toy_probabilities_are_those_of_the_labels():
    x, y, p = toy_distribution(20000, seed=3)
    assert torch.allclose(p.sum(1), torch.ones(20000, dtype=torch.float64))
    confident = p.max(1).values > .9
    hit = (p.argmax(1) == y)[confident].double().mean()
    assert math.isclose(hit, p.max(1).values[confident].mean(), abs_tol=.01)


def test_real_cifar10(data_root):
    d = load('cifar10-lt', data_root)
    assert torch.bincount(d.y[d.train]).tolist() == long_tail_counts(5000, 10, 100) and len(d.train) == 12406
    assert all(torch.bincount(d.y[getattr(d, p)]).tolist() == [500] * 10 for p in ('validation', 'test'))
    assert not set(d.validation.tolist()) & set(d.test.tolist())
