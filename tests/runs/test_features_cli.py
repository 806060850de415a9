"A table from the command line: trained, resumed, reported, shifted, predicted by column name and served"
import json, sys, numpy as np, pandas as pd, pytest, torch
from pictures import image_folder
from ncdo.augment import TRANSFORMS, Transform
from ncdo.data import load
from ncdo.predict import Classifier, predict
from ncdo.runs import Spec, read_scores

FAST = ['--steps', 60, '--batch-size', 16]


def clouds(sizes=(120, 60, 24), seed=0, apart=2., names=('a', 'b', 'c')):
    "A cloud of points for each class, on a line; two columns of very different scale, and one that says nothing"
    rng, y = np.random.default_rng(seed), np.repeat(np.arange(len(sizes)), sizes)
    x = rng.normal(size=(len(y), 2)) + apart * y[:, None]
    columns = dict(height=x[:, 0], weight=1000 * x[:, 1] - 4000, batch=.1, member=rng.random(len(y)) > .5)
    return pd.DataFrame(columns | dict(kind=np.array(names)[y])).sample(frac=1, random_state=seed)


@pytest.fixture
def table(tmp_path):
    clouds().to_csv(tmp_path / 't.csv', index=False)
    return ['train', '--dataset', tmp_path / 't.csv', '--label', 'kind']


def record(folder): return json.loads((folder / 'record.json').read_text())


def refused(ncdo, *args):
    "The one line on standard error"
    status, out, err = ncdo(*args)
    assert status == 2 and not out and err.count('\n') == 1, err
    return err


def test_a_table_trains_by_its_own_recipe(ncdo, table, tmp_path):
    status, out, err = ncdo(*table, '--out', tmp_path / 'run')
    r = record(tmp_path / 'run')
    assert status == 0 and not err and 'by these test examples' in out, err
    assert r['spec']['model'] == 'mlp-128' and r['spec']['label'] == 'kind' and not r['spec']['recipe']['augment'] and r['features'] == 4
    assert r['class_names'] == ['a', 'b', 'c'] and r['class_counts'] == [72, 36, 16] and r['test']['min_recall'] > .5


def test_an_interrupted_run_goes_on(ncdo, table, tmp_path):
    args = [*table, '--steps', 520, '--batch-size', 16]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('ncdo.schedule.make_record', lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        assert ncdo(*args, '--out', tmp_path / 'a')[0] == 130
    assert 'add --resume' in refused(ncdo, *args, '--out', tmp_path / 'a')
    assert ncdo(*args, '--out', tmp_path / 'a', '--resume')[0] == 0 and ncdo(*args, '--out', tmp_path / 'b')[0] == 0
    a, b = record(tmp_path / 'a'), record(tmp_path / 'b')
    assert a['test'] == b['test'] and a['history'] == b['history'] and a['id'] == b['id']
    assert 'nothing was trained' in ncdo(*args, '--out', tmp_path / 'a')[2]


def test_report_and_shift(ncdo, table, tmp_path):
    run = tmp_path / 'run'
    assert ncdo(*table, *FAST, '--out', run)[0] == 0
    status, out, err = ncdo('postshift', '--run', run)
    assert status == 0 and 'shifted, test' in out, err
    assert ncdo('report', run)[0] == 0
    page = (run / 'report.html').read_text()
    assert 'Test examples' in page and '124 training examples' in page and ' images' not in page
    assert {f'report-{n}.png' for n in ('recall', 'confusion', 'history', 'alternatives')} <= {p.name for p in run.iterdir()}


def test_what_else_trains_on_images_trains_on_a_table(ncdo, table, tmp_path):
    "Ensembles, students, views of blended rows, another goal and loss, a start from an earlier run"
    assert ncdo(*table, *FAST, '--mixup', 1, '--ensemble', 2, '--shared', '--out', tmp_path / 'two')[0] == 0
    assert Classifier(tmp_path / 'two').feature_names == ['height', 'weight', 'batch', 'member']
    student = [*table, *FAST, '--teacher', tmp_path / 'two', '--loss', 'hybrid-distilled']
    assert ncdo(*student, '--out', tmp_path / 'student')[0] == 0
    assert ncdo(*student, '--mixup', 1, '--views', 2, '--out', tmp_path / 'viewer')[0] == 0
    status, out, err = ncdo('train', '--dataset', tmp_path / 't.csv', '--teacher', tmp_path / 'two', *FAST, '--out', tmp_path / 'heir')
    assert status == 0 and record(tmp_path / 'heir')['spec']['label'] == 'kind', err
    assert ncdo(*table, *FAST, '--objective', 'coverage', '--swapped', '--out', tmp_path / 'covered')[0] == 0
    weights = tmp_path / 'student/weights.safetensors'
    assert ncdo(*table, *FAST, '--weights', weights, '--freeze', '--out', tmp_path / 'tuned')[0] == 0


def test_a_transform_of_ones_own_sees_rows_as_they_are(ncdo, table, tmp_path, monkeypatch):
    "Not divided by the white of an image; and so in views"
    seen = []
    def looked(x, y): return (seen.append(x), (x, y))[1]
    monkeypatch.setitem(TRANSFORMS, 'look', lambda: Transform(lambda g, steps, n: (), looked))
    assert ncdo(*table, *FAST, '--transform', 'look', '--out', tmp_path / 'run')[0] == 0
    x, _ = load(tmp_path / 't.csv', label='kind').part('train')
    rows = {tuple(row) for row in x.flatten(1).tolist()}
    assert len(seen) == 60 and {tuple(row) for row in seen[0][0].flatten(1).tolist()} <= rows
    student = [*table, *FAST, '--transform', 'look+mixup-1', '--teacher', tmp_path / 'run', '--views', 2]
    assert ncdo(*student, '--out', tmp_path / 'student')[0] == 0
    assert {tuple(row) for row in seen[-1][0].flatten(1).tolist()} <= rows


@pytest.mark.parametrize('model', ['linear', 'mlp-16'])
def test_columns_are_found_by_name(ncdo, table, tmp_path, model):
    run, new, odd = tmp_path / 'run', tmp_path / 'new.csv', tmp_path / 'odd.csv'
    assert ncdo(*table, *FAST, '--model', model, '--out', run)[0] == 0
    frame = clouds(seed=1)
    frame.drop(columns='kind').to_csv(new, index=False)
    frame.iloc[:, [4, 3, 0, 2, 1]].assign(note='said').to_csv(odd, index=False)
    status, _, err = ncdo('predict', run, new, '--out', tmp_path / 'a.csv')
    assert status == 0 and ncdo('predict', run, odd, '--out', tmp_path / 'b.csv')[0] == 0, err
    a, b = [pd.read_csv(tmp_path / f'{n}.csv') for n in 'ab']
    assert list(a.columns) == ['file', 'row', 'predicted', 'p_a', 'p_b', 'p_c'] and a.row.tolist() == list(range(204))
    assert a.drop(columns='file').equals(b.drop(columns='file')) and np.allclose(a.filter(like='p_').sum(axis=1), 1, atol=1e-5)
    both = predict(run, [new, odd])
    assert len(both) == 408 and both.file.tolist() == [str(new)] * 204 + [str(odd)] * 204
    frame.drop(columns=['weight', 'kind']).to_csv(new, index=False)
    assert "new.csv has no column 'weight', on which the run was trained; it has height, batch, member" in refused(ncdo, 'predict', run, new)
    frame.assign(height=np.where(frame.height > 0, frame.height, np.nan)).to_csv(new, index=False)
    assert "column 'height'" in (err := refused(ncdo, 'predict', run, new)) and 'has no value in row' in err
    assert 'is no table, but the run was trained on one' in refused(ncdo, 'predict', run, image_folder(tmp_path / 'pets'))
    assert 'does not exist' in refused(ncdo, 'predict', run, tmp_path / 'gone.csv')


@pytest.mark.parametrize('model', ['linear', 'mlp-16'])
def test_the_served_file_gives_the_same_numbers(ncdo, table, tmp_path, model):
    onnxruntime = pytest.importorskip('onnxruntime')
    run = tmp_path / 'run'
    assert ncdo(*table, *FAST, '--model', model, '--out', run)[0] == 0
    assert ncdo('export', run)[0] == 0
    session = onnxruntime.InferenceSession(run / 'model.onnx')
    said, (taken,) = session.get_modelmeta().custom_metadata_map, session.get_inputs()
    names = json.loads(said['feature_names'])
    assert taken.name == 'features' and taken.shape[1:] == [4] and names == ['height', 'weight', 'batch', 'member']
    x = clouds(seed=2)[names].to_numpy(np.float32)
    served, = session.run(['scores'], dict(features=x))
    with torch.no_grad(): scores = Classifier(run)(torch.from_numpy(x))
    assert scores.shape == (204, 3) and np.allclose(served, scores, atol=1e-4 * max(1, scores.abs().max()))
    x, _ = load(tmp_path / 't.csv', label='kind').part('test')
    with torch.no_grad(): assert torch.allclose(Classifier(run)(x), read_scores(run)['test'], atol=1e-4)


def test_a_linear_model_is_about_as_right_as_logistic_regression(ncdo, tmp_path):
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression
    iris = load_iris(as_frame=True)
    iris.frame.assign(target=iris.target_names[iris.target]).to_csv(tmp_path / 'iris.csv', index=False)
    status, _, err = ncdo('train', '--dataset', tmp_path / 'iris.csv', '--label', 'target', '--model', 'linear', '--objective', 'accuracy', '--out', tmp_path / 'run')
    assert status == 0, err
    data = load(tmp_path / 'iris.csv', label='target')
    (x, y), (x_test, y_test) = [(x.flatten(1).numpy(), y.numpy()) for x, y in map(data.part, ('train', 'test'))]
    mean, std = x.mean(0), x.std(0)
    logistic = LogisticRegression().fit((x - mean) / std, y)
    ours = read_scores(tmp_path / 'run')
    right = lambda part, truth: (ours[part].argmax(1).numpy() == truth).mean()
    assert right('train', y) > logistic.score((x - mean) / std, y) - .05
    assert right('test', y_test) > logistic.score((x_test - mean) / std, y_test) - .1


def test_the_worst_class_is_raised(ncdo, tmp_path):
    "One class in twenty, half under the largest: accuracy gives it up, worst-case recall does not"
    clouds((1000, 300, 60), apart=1.).to_csv(tmp_path / 't.csv', index=False)
    worst = {}
    for objective in ('accuracy', 'worst-case-recall'):
        args = ['--objective', objective, '--model', 'linear', '--steps', 400, '--out', tmp_path / objective]
        assert ncdo('train', '--dataset', tmp_path / 't.csv', '--label', 'kind', *args)[0] == 0
        worst[objective] = record(tmp_path / objective)['validation']['min_recall']
    assert worst['worst-case-recall'] > worst['accuracy'] + .1, worst


def test_a_column_that_is_constant_or_huge_does_no_harm(ncdo, tmp_path):
    clouds().assign(flat=3.3, zero=0, far=lambda t: t.height + 1e4).to_csv(tmp_path / 't.csv', index=False)
    for model in ('linear', 'mlp-16'):
        assert ncdo('train', '--dataset', tmp_path / 't.csv', '--label', 'kind', '--model', model, *FAST, '--out', tmp_path / model)[0] == 0
        assert all(z.isfinite().all() for z in read_scores(tmp_path / model).values())
        assert record(tmp_path / model)['train_accuracy'] > .8


def test_the_label_counts_and_so_do_the_names(ncdo, tmp_path):
    "Same numbers, other names: another sample, and its table is refused by the run"
    frame = clouds().assign(batch=lambda t: t.index % 2)
    frame.to_csv(tmp_path / 't.csv', index=False)
    frame.rename(columns=dict(height='weight', weight='height')).to_csv(tmp_path / 'u.csv', index=False)
    ids = [Spec(str(tmp_path / f), 'linear', label='kind').id for f in ('t.csv', 'u.csv')]
    hashes = [load(tmp_path / f, label='kind').split_hash for f in ('t.csv', 'u.csv')]
    assert ids[0] != ids[1] and hashes[0] != hashes[1]
    args = ['train', '--model', 'linear', *FAST, '--label']
    assert ncdo(*args, 'kind', '--dataset', tmp_path / 't.csv', '--out', tmp_path / 'run')[0] == 0
    assert 'holds a run on other examples' in refused(ncdo, *args, 'kind', '--dataset', tmp_path / 't.csv', '--split-seed', 0, '--out', _changed(tmp_path))
    weights = tmp_path / 'run/weights.safetensors'
    assert 'are of a table with the columns height, weight' in refused(ncdo, *args, 'kind', '--dataset', tmp_path / 'u.csv', '--weights', weights, '--out', tmp_path / 'v')
    pets = image_folder(tmp_path / 'pets')
    assert 'are of a table with the columns' in refused(ncdo, 'train', '--dataset', pets, '--weights', weights, '--out', tmp_path / 'v')
    assert 'are of a table of features' in refused(ncdo, 'embed', pets, '--weights', weights, '--out', tmp_path / 'f.npz')
    assert not (tmp_path / 'v').exists()


def _changed(folder):
    "The run's folder, once the table has another row"
    clouds(sizes=(121, 60, 24)).assign(batch=0).to_csv(folder / 't.csv', index=False)
    return folder / 'run'


def test_what_embed_writes_trains(ncdo, tmp_path):
    pets = image_folder(tmp_path / 'pets', size=(16, 16))
    assert ncdo('train', '--dataset', pets, '--model', 'resnet8-w8', '--steps', 20, '--batch-size', 8, '--out', tmp_path / 'net')[0] == 0
    assert ncdo('embed', pets, '--weights', tmp_path / 'net/weights.safetensors', '--out', tmp_path / 'f.npz')[0] == 0
    status, _, err = ncdo('train', '--dataset', tmp_path / 'f.npz', '--model', 'linear', *FAST, '--out', tmp_path / 'run')
    assert status == 0, err
    r = record(tmp_path / 'run')
    assert r['class_names'] == sorted(p.name for p in pets.iterdir()) and r['features'] == 32
    table = predict(tmp_path / 'run', [tmp_path / 'f.npz'])
    assert len(table) == sum(1 for _ in pets.rglob('*.png')) and set(table.predicted) <= set(r['class_names'])
    np.savez(tmp_path / 'wide.npz', X=np.zeros((3, 33)))
    assert 'X has 33 columns without names' in refused(ncdo, 'predict', tmp_path / 'run', tmp_path / 'wide.npz')


REFUSED = { # chkstyle: ignore-node
    'no label': (['--model', 'linear'], 't.csv is a table; give label, the column with the classes: one of height, weight, batch, member, kind'),
    'unknown label': (['--label', 'Kinds'], "t.csv has no column 'Kinds'; perhaps 'kind' is meant"),
    'label far off': (['--label', 'species'], "t.csv has no column 'species'; it has height, weight, batch, member, kind"),
    'continuous label': (['--label', 'height'], "column 'height' of {}/t.csv has 204 different values in 204 rows"),
    'crops': (['--label', 'kind', '--augment', 'crop-flip'], 'augment is for images, and {}/t.csv is a table; leave it out'),
    'trivial': (['--label', 'kind', '--augment', 'trivial'], 'augment is for images'),
    'transform': (['--label', 'kind', '--transform', 'mixup-1+trivial'], "transform 'trivial' is for images"),
    'resnet': (['--label', 'kind', '--model', 'resnet20'], "model 'resnet20' is for images, and {}/t.csv is a table; give mlp-128, linear"),
    'torchvision': (['--label', 'kind', '--model', 'mobilenet_v3_small'], "model 'mobilenet_v3_small' is for images"),
    'enlarged': (['--label', 'kind', '--model', 'mlp-16@32'], "model 'mlp-16@32' is for images"),
    'size': (['--label', 'kind', '--image-size', 32], 'image_size is for folders of images; {}/t.csv is a table'),
    'preset': (['--label', 'kind', '--preset', 'quick'], 'your own data have a recipe of their own')}


@pytest.mark.parametrize('case', REFUSED)
def test_what_is_not_for_tables_is_one_line(ncdo, table, tmp_path, case):
    args, message = REFUSED[case]
    assert message.format(tmp_path) in refused(ncdo, *table[:3], *args, '--out', tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_a_label_is_not_for_images(ncdo, tmp_path):
    for dataset in (image_folder(tmp_path / 'pets'), 'digits-lt'):
        assert 'label is for tables, .csv and .parquet' in refused(ncdo, 'train', '--dataset', dataset, '--label', 'kind', '--out', tmp_path / 'run')


def test_a_network_of_ones_own_takes_the_rows(ncdo, table, tmp_path, monkeypatch):
    (tmp_path / 'ncdo_row_net.py').write_text('from torch import nn\n'
        'def small(num_classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    status, _, err = ncdo(*table, '--model', 'ncdo_row_net:small', *FAST, '--out', tmp_path / 'run')
    assert status == 0 and Classifier(tmp_path / 'run')(torch.zeros(5, 4)).shape == (5, 3), err


def test_parquet(ncdo, tmp_path, monkeypatch):
    clouds().to_csv(tmp_path / 't.csv', index=False)
    pq, args = tmp_path / 't.parquet', ['--label', 'kind', '--model', 'linear', *FAST]
    pq.write_bytes(b'')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'pyarrow', None)
        assert "pyarrow is not installed; pip install 'ncdo[parquet]'" in refused(ncdo, 'train', '--dataset', pq, *args, '--out', tmp_path / 'run')
    pytest.importorskip('pyarrow')
    assert 'cannot be read as a table' in refused(ncdo, 'train', '--dataset', pq, *args, '--out', tmp_path / 'run')
    clouds().assign(kind=lambda t: t.kind.astype('category')).set_index(pd.Index(range(1000, 1204), name='case')).to_parquet(pq)
    status, _, err = ncdo('train', '--dataset', pq, *args, '--out', tmp_path / 'run')
    assert status == 0 and record(tmp_path / 'run')['split_hash'] == load(tmp_path / 't.csv', label='kind').split_hash, err
    assert predict(tmp_path / 'run', [pq]).row.tolist() == list(range(1000, 1204))
