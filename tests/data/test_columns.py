"What the columns of a table become, and every table that is refused"
import numpy as np, pandas as pd, pytest, torch
from decimal import Decimal
from ncdo.columns import classes_in, new_rows, numbers_of, read_table
from ncdo.data import load
from ncdo.gains import InputError

ROWS = ''.join(f'{i % 7},{i * .5},{c}\n' for i, c in enumerate('abc' * 8))


def csv(folder, text, name='t.csv'):
    (folder / name).write_text(text, encoding='utf-8')
    return folder / name


def npz(folder, **arrays):
    np.savez(folder / 't.npz', **arrays)
    return folder / 't.npz'


def shown(data, part='train'):
    "Rows as tuples, with the names of their classes"
    x, y = data.part(part)
    return {(*row, data.class_names[c]) for row, c in zip(x.flatten(1).tolist(), y.tolist())}


def test_rows_stay_with_their_classes(tmp_path):
    data = load(csv(tmp_path, 'u,v,kind\n' + ROWS), label='kind')
    assert data.feature_names == ('u', 'v') and data.x.shape == (24, 2, 1, 1) and data.x.dtype == torch.float32
    found = set.union(*(shown(data, p) for p in ('train', 'validation', 'test')))
    assert found == {(float(i % 7), i * .5, c) for i, c in enumerate('abc' * 8)}
    assert [data.y[getattr(data, p)].bincount().tolist() for p in ('train', 'validation', 'test')] == [[6] * 3, [1] * 3, [1] * 3]


def test_the_label_may_be_anywhere_and_other_forms_give_the_same(tmp_path):
    first = load(csv(tmp_path, 'u,v,kind\n' + ROWS), label='kind')
    frame = pd.read_csv(tmp_path / 't.csv')
    frame[['kind', 'u', 'v']].to_csv(tmp_path / 'front.CSV', index=False)
    for name in ('front.CSV', 'bom.csv', 'spaced.csv'):
        if name == 'bom.csv': (tmp_path / name).write_bytes(b'\xef\xbb\xbf' + (tmp_path / 't.csv').read_bytes())
        if name == 'spaced.csv': csv(tmp_path, 'u, v, kind\n' + ROWS.replace(',', ', '), name)
        assert load(tmp_path / name, label='kind').split_hash == first.split_hash, name
    arrays = load(npz(tmp_path, X=frame[['u', 'v']].to_numpy(), y=frame.kind.to_numpy(str), feature_names=['u', 'v']))
    assert arrays.split_hash == first.split_hash and arrays.class_names == ('a', 'b', 'c')


@pytest.mark.parametrize('values,names', [('2,10,2,10', ['2', '10']), ('b,a,b,a', ['a', 'b']), ('1.0,2,1,2.0', ['1', '2']), ('.5,2,.5,2', ['0.5', '2']), # chkstyle: ignore-node
    ('True,False,True,False', ['False', 'True']), ('10,a,10,a', ['10', 'a']), ('01,1,01,1', ['01', '1']), ('02,01,02,01', ['01', '02']), ('0.5,0,0.5,0', ['0', '0.5']), ('nan,inf,nan,inf', ['inf', 'nan']), ('1_0,2,1_0,2', ['1_0', '2']), ('-1,1,-1,1', ['-1', '1']),
    (f'{2**60},{2**60 + 1},{2**60},{2**60 + 1}', [str(2**60), str(2**60 + 1)])])
def test_names_of_classes(values, names):
    texts = values.split(',')
    y, found = classes_in(texts, 'it')
    assert found == names and sorted(set(y)) == list(range(len(names))) and y.tolist() == y.tolist()[:2] * 2


def test_numbers_and_truth_values_as_labels():
    assert classes_in(np.array([3., 1., 3., 1.]), 'it')[1] == ['1', '3']
    assert classes_in(np.array([True, False] * 2), 'it')[1] == ['False', 'True']


def test_a_class_may_be_called_none(tmp_path):
    "And NA is a region; neither is missing, but an empty field is"
    text = 'u,region\n' + ''.join(f'{i},{r}\n' for i, r in enumerate(['NA', 'None', '01'] * 4))
    assert load(csv(tmp_path, text), label='region').class_names == ('01', 'NA', 'None')
    with pytest.raises(InputError, match="column 'region' of .* has no class in row 12; fill it in, or leave the row out$"):
        load(csv(tmp_path, text + '5,\n'), label='region')


def test_spaces_around_names_and_classes_are_dropped(tmp_path):
    "On either side: 'a ' is no class beside 'a', and a new table need not have the spaces"
    data = load(csv(tmp_path, ' u ,v, kind \n' + ROWS.replace('a\n', ' a \n', 3)), label='kind')
    assert data.feature_names == ('u', 'v') and data.class_names == ('a', 'b', 'c')
    assert data.split_hash == load(csv(tmp_path, 'u,v,kind\n' + ROWS), label='kind').split_hash
    assert new_rows(csv(tmp_path, 'v ,u \n1,2\n'), ['u', 'v'])[0].tolist() == [[2, 1]]
    with pytest.raises(InputError, match="has 2 columns 'u'"): read_table(csv(tmp_path, 'u,u ,kind\n1,2,a\n'))


def test_decimals_are_numbers_and_lists_no_classes():
    "As Parquet has them"
    prices = pd.Series([Decimal('1.5'), Decimal('2')])
    assert numbers_of(prices, 'price', 't').tolist() == [1.5, 2]
    with pytest.raises(InputError, match="column 'price' of t has no value in row 2"): numbers_of(pd.Series([*prices, None]), 'price', 't')
    values = np.empty(4, object)
    values[:] = [[1], [1, 2], [1], [1, 2]]
    with pytest.raises(InputError, match='it holds lists; a label is one value'): classes_in(values, 'it')


def test_truth_values_are_numbers(tmp_path):
    data = load(csv(tmp_path, 'u,kind\n' + ''.join(f'{i % 2 == 0},{c}\n' for i, c in enumerate('ab' * 5))), label='kind')
    assert set(data.x.flatten().tolist()) == {0., 1.}


HEAD = 'u,v,kind\n'
CSV = { # chkstyle: ignore-node
    'text': (HEAD + ROWS + '1,red,a\n', r"column 'v' of .*t.csv is not numeric \(row 24: 'red'\); leave it out, or turn it into numbers"),
    'a mark for missing': (HEAD + '?,1,a\n' + ROWS, r"column 'u' of .* is not numeric \(row 0: '\?'\)"),
    'dates': (HEAD + ROWS.replace(',', ',2020-01-0', 1), "column 'v' of .* is not numeric"),
    'missing': (HEAD + ROWS + '1,,a\n1,NA,a\n', r"column 'v' of .*t.csv has no value in row 24 \(2 in all\); fill in such values first"),
    'truth with gaps': ('u,kind\n' + 'True,a\nFalse,b\n,a\n' * 5, "column 'u' of .* has no value in row 2"),
    'infinite': (HEAD + ROWS + 'inf,1,a\n', "column 'u' of .* is inf in row 24, which is not finite"),
    'huge': (HEAD + ROWS + '1,-1e300,a\n', r"column 'v' of .* is -1e\+300 in row 24, which is not finite in 32 bits"),
    'empty column': (HEAD + ''.join(f'1,,{c}\n' for c in 'abc' * 5), "column 'v' of .* (is empty|has no value in row 0)"),
    'twice': ('u,u,kind\n' + ROWS, "has 2 columns 'u'; give each a name of its own"),
    'no name': (',v,kind\n' + ROWS, r'column 1 of .*t.csv has no name; name it, or leave it out if it only numbers the rows \(in pandas: index=False\)'),
    'a field too many': (HEAD + ROWS + '1,2,a,b\n', r't.csv cannot be read as a table \(ParserError'),
    'a field too many from the start': (HEAD + ROWS.replace('\n', ',9\n'), r't.csv cannot be read as a table \(ParserWarning'),
    'a field too few': (HEAD + ROWS + '1\n', "column 'kind' of .* has no class in row 24"),
    'no rows': (HEAD, 't.csv has no rows, only the names of its columns'),
    'nothing': ('', r't.csv cannot be read as a table \(EmptyDataError'),
    'another separator': (HEAD.replace(',', ';') + ROWS.replace(',', ';'), "t.csv has ';' between its columns; write it again with commas"),
    'tabs': (HEAD.replace(',', '\t') + ROWS.replace(',', '\t'), r"t.csv has '\\t' between its columns"),
    'no features': ('kind\n' + 'a\nb\n' * 5, "t.csv has no column but 'kind'; add features"),
    'one class': ('u,kind\n' + '1,a\n2,a\n' * 5, "has only one class, 'a'"),
    'a small class': (HEAD + ROWS + '1,2,d\n', "class 'd' has 1 examples in .*t.csv; it needs at least 3, one each for training, validation and test"),
    'a measurement': (''.join(['u,kind\n', *(f'{i},{i / 3}\n' for i in range(40))]), "column 'kind' of .* has 40 different values in 40 rows"),
    'fractions': (''.join(['u,kind\n', *(f'{i},{i % 25 / 3}\n' for i in range(200))]), "column 'kind' of .* has 25 different values in 200 rows"),
    'quotes': ('u,kind\n"1,a\n' + '1,b\n' * 5, 'cannot be read as a table')}


@pytest.mark.parametrize('case', CSV)
def test_a_csv_that_cannot_be(tmp_path, case):
    text, message = CSV[case]
    with pytest.raises(InputError, match=message) as e: load(csv(tmp_path, text), label='kind')
    assert '\n' not in str(e.value)


@pytest.mark.parametrize('content', [b'u,kind\n\xff\xfe\x00,a\n', 'größe,kind\n1,ä\n'.encode('latin-1'), 'u,kind\n1,a\n'.encode('utf-16')])
def test_a_file_in_another_encoding(tmp_path, content):
    (tmp_path / 't.csv').write_bytes(content)
    with pytest.raises(InputError, match='t.csv is not written in UTF-8; save it anew'): load(tmp_path / 't.csv', label='kind')


def test_a_file_that_is_no_table(tmp_path):
    with pytest.raises(InputError, match='does not exist'): load(tmp_path / 'gone.csv', label='kind')
    with pytest.raises(InputError, match='t.csv.gz is neither a folder of images .* nor a table: .csv, .parquet'): load(csv(tmp_path, 'zipped', 't.csv.gz'), label='kind')
    (tmp_path / 'folder.csv').mkdir()
    with pytest.raises(InputError, match='label is for tables'): load(tmp_path / 'folder.csv', label='kind')


X, Y = np.arange(48.).reshape(24, 2), np.array(list('abc') * 8)
NPZ = { # chkstyle: ignore-node
    'no y': (dict(X=X), "has no array 'y'; training needs X and y, the classes"),
    'lengths': (dict(X=X, y=Y[:-1]), r'y has shape \(23,\) for 24 rows of X'),
    'columns as y': (dict(X=X, y=X), r'y has shape \(24, 2\) for 24 rows of X'),
    'flat': (dict(X=X[:, 0], y=Y), r'X is float64 \(24,\); it must be numbers, \(n, d\)'),
    'images': (dict(X=np.zeros((24, 3, 8, 8)), y=Y), r'X is float64 \(24, 3, 8, 8\)'),
    'empty': (dict(X=X[:0], y=Y[:0]), r'X is float64 \(0, 2\)'),
    'text': (dict(X=X.astype(str), y=Y), 'it must be numbers'),
    'complex': (dict(X=X * 1j, y=Y), 'it must be numbers'),
    'pickles': (dict(X=X.astype(object), y=Y), 'cannot be read as an .npz of plain arrays'),
    'not finite': (dict(X=np.where(X == 7, np.nan, X), y=Y), "column 'x1' of .* has no value in row 3"),
    'infinite': (dict(X=np.where(X == 7, np.inf, X), y=Y), "column 'x1' of .* is inf in row 3"),
    'missing labels': (dict(X=X, y=np.where(X[:, 0] == 4, np.nan, 1)), 'y is float64; it must be numbers or text, none of them missing'),
    'names': (dict(X=X, y=Y, feature_names=['u']), 'X has 2 columns for 1 feature_names'),
    'equal names': (dict(X=X, y=Y, feature_names=['u', 'u']), "has 2 columns 'u'"),
    'indices beyond': (dict(X=X, y=np.arange(24) % 3, class_names=['a', 'b']), r'labels, such as 2, are not among 0\.\.1'),
    'names beyond': (dict(X=X, y=Y, class_names=['a', 'b']), "y holds 'c', which is not one of class_names"),
    'one number': (dict(X=np.array(3.), y=Y), r'X is float64 \(\); it must be numbers, \(n, d\)'),
    'equal class names': (dict(X=X, y=np.arange(24) % 3, class_names=['a', 'b', 'a']), "class_names holds 'a' twice"),
    'nothing to train on': (dict(X_validation=X, y_validation=Y, X_test=X, y_test=Y), "has no array 'X_train'; training needs it and y_train"),
    'a test part alone': (dict(X_test=X, y_test=Y), "has no array 'X_train'"),
    'other columns': (dict(X_train=X, y_train=Y, X_test=X[:, :1], y_test=Y), 'X_test has 1 columns, X_train has 2'),
    'no class in a part': (dict(X_train=X, y_train=Y, X_test=X[:4], y_test=Y[:4]), "class 'b' has 1 examples in the test part of .*; it needs at least 2"),
    'a part without labels': (dict(X_train=X, y_train=Y, X_test=X), "has no array 'y_test'; training needs X_test and y_test")}


@pytest.mark.parametrize('case', NPZ)
def test_arrays_that_cannot_be(tmp_path, case):
    arrays, message = NPZ[case]
    with pytest.raises(InputError, match=message) as e: load(npz(tmp_path, **arrays))
    assert '\n' not in str(e.value)


def test_arrays_divided_already(tmp_path):
    order = np.random.default_rng(0).permutation(24)
    train, held, last = np.split(order, [12, 18])
    while any(len(set(Y[part])) < 3 for part in (train, held, last)): train, held, last = np.split(np.random.default_rng(1).permutation(24), [12, 18])
    given = {f'{a}_{p}': v[i] for p, i in dict(train=train, validation=held, test=last).items() for a, v in dict(X=X, y=Y).items()}
    data = load(npz(tmp_path, **given))
    assert data.feature_names == ('x0', 'x1')
    for part, i in dict(train=train, validation=held, test=last).items(): assert shown(data, part) == {(*X[j].tolist(), Y[j]) for j in i}


def test_class_names_beside_indices_or_text(tmp_path):
    names = np.array(['z', 'y', 'x'])
    index = np.arange(24) % 3
    by_index, by_name = [load(npz(tmp_path, X=X, y=y, class_names=names)) for y in (index, names[index])]
    assert by_index.class_names == by_name.class_names == ('z', 'y', 'x') and torch.equal(by_index.y, by_name.y)
    numbers = np.array(['02', '10', '1'])
    data = load(npz(tmp_path, X=X, y=numbers[index], class_names=numbers))
    assert data.class_names == ('02', '10', '1') and torch.equal(data.y, by_index.y)
    assert load(npz(tmp_path, X=X.astype(int), y=index + 1)).class_names == ('1', '2', '3')
    with pytest.raises(InputError, match='run from 1 to 3, but classes are numbered from 0'): load(npz(tmp_path, X=X, y=index + 1, class_names=names))


def test_a_file_that_changed_is_read_again(tmp_path):
    path = csv(tmp_path, 'u,v,kind\n' + ROWS)
    first = load(path, label='kind')
    assert load(path, label='kind').split_hash == first.split_hash
    csv(tmp_path, 'u,v,kind\n' + ROWS + '9,9,c\n')
    assert load(path, label='kind').split_hash != first.split_hash


def test_new_rows_by_name(tmp_path):
    x, rows = new_rows(csv(tmp_path, 'kind,v,note,u\n,2,hm,1\n,4,NA,3\n'), ['u', 'v'])
    assert x.tolist() == [[1, 2], [3, 4]] and rows == [0, 1]
    x, _ = new_rows(npz(tmp_path, X=X, feature_names=['v', 'u']), ['u', 'v'])
    assert x.tolist() == X[:, ::-1].tolist()
    assert new_rows(npz(tmp_path, X=X), ['x0', 'x1'])[0].tolist() == X.tolist()
    for arrays, message in ((dict(X=X), "has no column 'u' .nor 1 others., on which"), (dict(X=X[:, :1]), 'X has 1 columns without names'), (dict(y=Y), "has no array 'X'")):
        with pytest.raises(InputError, match=message): new_rows(npz(tmp_path, **arrays), ['u', 'v'])
    with pytest.raises(InputError, match="column 'v' of .* is not numeric"): new_rows(csv(tmp_path, 'u,v\n1,two\n'), ['u', 'v'])
    with pytest.raises(InputError, match="has 2 columns 'u'"): new_rows(csv(tmp_path, 'u,u,v\n1,1,2\n'), ['u', 'v'])


def test_images_are_told_where_tables_go(tmp_path):
    with pytest.raises(InputError, match=r'x_train is float64 \(24, 2\).*numbers of a table are called X_train'):
        load(npz(tmp_path, x_train=X, y_train=np.arange(24) % 3, x_test=X, y_test=np.arange(24) % 3))


@pytest.mark.parametrize('first', [10**12, 10**17, 2**63])
def test_case_numbers_too_large_for_32_bits_are_told(tmp_path, first):
    text = 'number,v,kind\n' + ''.join(f'{first + i},{i / 7},{c}\n' for i, c in enumerate('abc' * 20))
    with pytest.warns(UserWarning, match="column 'number' of .* has 60 different values, of which 32 bits tell 1 apart"): load(csv(tmp_path, text), label='kind')
