"What happens after training: the report of a run, its predictions on image files, its ONNX file"
import csv, dataclasses, errno, html, importlib, io, json, math, os, shutil, sys
from html.parser import HTMLParser
import numpy as np, pytest, torch
from PIL import Image
from safetensors.torch import save_file
import ncdo.runs
from pathlib import Path
from ncdo.data import Data, load
from ncdo.images import read_image
from ncdo.runs import Spec, make_record, post_shift_run, read_record, read_scores, spec_of, write_record
from ncdo.schedule import compute, run_stack
from ncdo.gains import InputError, worst_case_recall
from ncdo.predict import Classifier, image_files
from ncdo.report import Run, alternatives, certificate, drawn_again, judge, percent, short_name, write_report
from ncdo.samples import certified_recall, lower_bounds
from ncdo.stacks import Stack, fit
from ncdo.training import Member, Recipe

RECIPE = Recipe(steps=20, batch_size=32, update_every=5)
GOALS = dict(plain=('accuracy', 'cross-entropy'), average=('average-recall', 'logit-adjusted'), worst=('worst-case-recall', 'logit-adjusted'), # chkstyle: ignore-node
    recall=('recall', 'logit-adjusted'), precision=('precision', 'hybrid-b'), coverage=('coverage', 'hybrid-b'), spread=('balanced-coverage', 'hybrid-b'),
    weighted=('weighted-accuracy', 'logit-adjusted'))


@pytest.fixture(scope='module')
def kept(tmp_path_factory):
    "A small run for each objective, and two for head and tail; never written to"
    root = tmp_path_factory.mktemp('kept')
    specs = {k: Spec(model='mlp-16', objective=o, loss=l, recipe=RECIPE) for k, (o, l) in GOALS.items()}
    specs |= {f'{k}-tail': dataclasses.replace(specs[k], groups='head-tail', tail=.3) for k in ('worst', 'spread')}
    run_stack(list(specs.values()), [root / k for k in specs], device='cpu', weights=True)
    return root


@pytest.fixture
def runs(kept, tmp_path): return shutil.copytree(kept, tmp_path / 'runs')


def change(folder, **values):
    "Change a record on disk"
    record = json.loads((folder / 'record.json').read_text())
    (folder / 'record.json').write_text(json.dumps(record | values))


class Loads(HTMLParser):
    "All that a page would fetch, and its tags"
    def __init__(self, page):
        super().__init__()
        self.found, self.tags, self.text = [], set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.found += [v for k, v in attrs if k in ('src', 'href', 'srcset', 'action', 'data', 'poster')]

    def handle_data(self, data): self.text.append(data)


# the page

@pytest.mark.parametrize('name', [*GOALS, 'worst-tail', 'spread-tail'])
def test_a_page_for_every_goal(runs, name):
    for k in {name, 'plain'} - {'spread-tail'}: (runs / k / 'scores.npz').unlink()
    page = write_report(runs / name, [runs / 'plain'] * (name == 'worst')).read_text()
    seen = Loads(page)
    assert 'http://' not in page and 'https://' not in page and 'url(' not in page and not seen.tags & {'script', 'iframe', 'object', 'base'}
    assert all(v.startswith('data:') for v in seen.found) and sum(v.startswith('data:image/png') for v in seen.found) == (3 if name in ('plain', 'average', 'weighted') else 4)
    assert set('0123456789') <= set(seen.text) and 'nan' not in ' '.join(seen.text)
    for figure in (runs / name).glob('report-*.png'): assert Image.open(figure).size[0] > 500
    assert ('Target by target' in page) == (name.split('-')[0] in ('recall', 'precision', 'coverage', 'spread'))


def test_class_names_cannot_break_the_page(runs):
    (runs / 'worst/scores.npz').unlink()
    names = ['<script>alert(1)</script>', 'a & b', '$x_1$', '"quoted"', "it's", '{{ 7 * 7 }}', 'x' * 80, 'Äpfel', '</td>', '9']
    change(runs / 'worst', class_names=names)
    page = write_report(runs / 'worst').read_text()
    seen = Loads(page)
    assert 'script' not in seen.tags and not any(n in page for n in ('<script', '</td></td>')) and set(names) <= set(map(html.unescape, seen.text))
    assert [short_name(n) for n in names[2:7:4]] == [r'\$x_1\$', 'x' * 15 + '…']


def test_the_same_run_gives_the_same_page(runs):
    (runs / 'worst/scores.npz').unlink()
    first = write_report(runs / 'worst').read_bytes()
    assert write_report(runs / 'worst').read_bytes() == first


def test_many_classes_and_no_scores(runs):
    "100 classes of 50 test images; without scores there is nothing to shift"
    m, rng = 100, np.random.default_rng(0)
    C = np.array([rng.multinomial(50, .4 * np.eye(m)[i] + .6 / m) for i in range(m)])
    record = json.loads((runs / 'spread/record.json').read_text())
    parts = {part: dict(record[part], confusion=C.tolist()) for part in ('validation', 'test')}
    history = [dict(h, multipliers=[.01] * m, violations=[0.] * m) for h in record['history']]
    change(runs / 'spread', class_names=[f'kind {i}' for i in range(m)], class_counts=[500 - 4 * i for i in range(m)], history=history, **parts)
    (runs / 'spread/scores.npz').unlink()
    seen = Loads(write_report(runs / 'spread').read_text())
    assert {f'kind {i}' for i in range(m)} <= set(seen.text) and len(alternatives(Run(runs / 'spread'))) == 1
    width, height = Image.open(runs / 'spread/report-confusion.png').size
    assert min(width, height) > 16 * m


# what it says

def by_hand(folder, C, objective, **spec):
    "A run whose confusion matrix is given"
    record = json.loads((folder / 'record.json').read_text())
    record['spec'] |= dict(objective=objective, **spec)
    parts = {p: dict(record[p], confusion=C) for p in ('validation', 'test')}
    history = [dict(h, multipliers=h['multipliers'][:3], violations=h['violations'][:3]) for h in record['history']]
    change(folder, spec=record['spec'], history=history, class_names=['cat', 'dog', 'owl'], class_counts=[60, 30, 10], **parts)
    return Run(folder)


SMALL = [[18, 2, 0], [4, 16, 0], [4, 4, 12]]
BY_HAND = [ # chkstyle: ignore-node
    ('recall', dict(tau=.7), [.9, .8, .6], .7, [True, True, False]),
    ('recall', dict(tau=.6), [.9, .8, .6], .6, [True, True, True]),
    ('precision', dict(tau=.8), [.54 / (.54 + .06 + .02), .24 / (.24 + .06 + .02), 1.], .8, [True, False, True]),
    ('coverage', dict(fraction=.95), [.62 / .6, .32 / .3, .06 / .1], .95, [True, True, False]),
    ('balanced-coverage', dict(fraction=.9), [26 / 60, 22 / 60, 12 / 60], .3, [True, True, False])]


@pytest.mark.parametrize('objective,spec,values,target,met', BY_HAND)
def test_verdicts_by_hand(runs, objective, spec, values, target, met):
    run = by_hand(runs / 'worst', SMALL, objective, **spec)
    verdict = judge(run)
    assert [r['test'] for r in verdict['rows']] == pytest.approx(values) and run.target == pytest.approx(target)
    assert [r['met']['test'] for r in verdict['rows']] == met and verdict['met']['test'] == all(met)
    assert f'{sum(met)} of 3 targets are met' in verdict['said']['test']
    assert (verdict['miss'] > 0) == (not all(met))


def test_goals_without_target_have_nothing_to_meet(runs):
    verdict = judge(by_hand(runs / 'worst', SMALL, 'worst-case-recall'))
    assert verdict['met'] is None and verdict['said']['test'] == 'the smallest recall is 60.0% (class owl), the average recall 76.7%'
    run = by_hand(runs / 'worst', SMALL, 'accuracy')
    assert run.total(run.confusion['test']).item() == pytest.approx(.6 * .9 + .3 * .8 + .1 * .6)


def test_head_and_tail_are_judged_as_groups(runs):
    run = by_hand(runs / 'worst', SMALL, 'worst-case-recall', groups='head-tail', tail=.34)
    assert run.units == ['head', 'tail'] and run.values(run.confusion['test']).tolist() == pytest.approx([.85, .6])


def test_a_class_absent_from_the_test_sample_is_a_dash(runs):
    run = by_hand(runs / 'worst', [[18, 2, 0], [4, 16, 0], [0, 0, 0]], 'recall', tau=.5, tail=.34)
    assert judge(run)['said']['test'].startswith('2 of 2 targets are met; the smallest recall is 80.0% (class dog)')
    (runs / 'worst/scores.npz').unlink()
    text = ' '.join(Loads(write_report(runs / 'worst').read_text()).text)
    assert 'nan' not in text.lower() and '–' in text


def test_what_the_test_images_prove(runs):
    "Two classes of 20 images at .9 and .6: 18 and 12 hits; head and tail are judged together where they are the goal"
    run = by_hand(runs / 'worst', SMALL, 'worst-case-recall')
    assert certificate(run) == [f'the recall of every class is at least {percent(lower_bounds(12, 20).item())} (measured: 60.0%)']
    (runs / 'worst/scores.npz').unlink()
    assert certificate(run)[0] in ' '.join(Loads(write_report(runs / 'worst').read_text()).text)
    run = by_hand(runs / 'worst', SMALL, 'worst-case-recall', groups='head-tail', tail=.34)
    assert certificate(run)[1:] == [f'the mean recall of head and of tail is at least {percent(lower_bounds(12, 20).item())} (measured: 60.0%)']


def test_many_classes_are_certified_by_their_worst_tenth_too(runs):
    C = 30 * torch.eye(40, dtype=torch.long) + 20 * torch.eye(40, dtype=torch.long).roll(1, 1)
    record = read_record(runs / 'worst')
    change(runs / 'worst', class_names=None, class_counts=list(range(50, 10, -1)), **{p: dict(record[p], confusion=C.tolist()) for p in ('validation', 'test')})
    assert certificate(Run(runs / 'worst'))[1:] == [f'the mean recall of the worst 4 classes is at least {percent(certified_recall(C, 4))} (measured: 60.0%)']


def test_errors_against_theory():
    C = torch.tensor([[30., 20], [5, 45]], dtype=torch.float64)
    again = drawn_again(C, 4000)
    assert (again.sum(2) == 50).all() and torch.allclose(again.mean(0), C, atol=.3)
    assert (again[:, 0, 0] / 50).std().item() == pytest.approx(math.sqrt(.6 * .4 / 50), rel=.05)


@pytest.mark.parametrize('v,text', [(.9, '90.0%'), (.0095, '0.950%'), (1., '100%'), (0., '0%'), (math.nan, '–'), (1.0333, '103%'), (.99999, '100%')])
def test_percentages(v, text): assert percent(v) == text


def test_alternatives_are_judged_by_the_goal_of_the_run(runs):
    points = alternatives(Run(runs / 'worst'), [runs / 'plain'])
    assert [p['shifted'] for p in points] == [False, True] * 2
    plain = read_record(runs / 'plain')['test']
    assert (points[2]['x'], points[2]['y']) == pytest.approx((plain['avg_recall'], plain['min_recall']))


def everything(folder): return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) if p.is_file() else None for p in folder.rglob('*')}


def test_a_report_writes_only_into_the_folder_of_its_run(runs):
    "Runs beside it may be somebody else's, or on a disk that is only read"
    before = {n: everything(runs / n) for n in (*GOALS, 'worst-tail', 'spread-tail')}
    write_report(runs / 'worst', [runs / 'plain', runs / 'spread'])
    after = {n: everything(runs / n) for n in before}
    made = after.pop('worst').keys() - before.pop('worst').keys()
    assert after == before and {p.split('-')[0] for p in made} == {'report.html', 'report', 'postshift'}


def test_runs_beside_are_shifted_each_by_its_own_scores(runs):
    "Also two of one goal; and again, if one is computed anew in between"
    shifted = lambda names: [p['y_validation'] for p in alternatives(Run(runs / 'worst'), [runs / n for n in names]) if p['shifted']]
    plain, average = [post_shift_run(shutil.copytree(runs / n, runs / f'{n}2'), 'worst-case-recall')['validation']['min_recall'] for n in ('plain', 'average')]
    assert shifted(['plain', 'average'])[1:] == pytest.approx([plain, average]) and plain != average
    shutil.copy(runs / 'average/scores.npz', runs / 'plain')
    assert shifted(['plain'])[1:] == pytest.approx([average])


# the network

NETS = '''
from torch import nn
def small(num_classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
'''


@pytest.fixture
def own_net(tmp_path, monkeypatch):
    "A run of a network in a module of one's own, the file of that module, and a function that forgets it"
    (tmp_path / 'nets').mkdir()
    path, folder = tmp_path / 'nets/nets_of_mine.py', tmp_path / 'run'
    path.write_text(NETS)
    monkeypatch.setattr('sys.dont_write_bytecode', True)
    def forget():
        sys.modules.pop('nets_of_mine', None)
        importlib.invalidate_caches()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(path.parent)
        run_stack([Spec(model='nets_of_mine:small', recipe=Recipe(steps=4, batch_size=16))], [folder], device='cpu', weights=True)
        Classifier(folder)
    forget()
    yield folder, path
    forget()


CHANGED = dict(moved=None, renamed=NETS.replace('small', 'large'), broken='import no_such_package', wider=NETS.replace('nn.Linear(64, num_classes)', 'nn.Linear(64, 8), nn.Linear(8, num_classes)'))


@pytest.mark.parametrize('how', CHANGED)
def test_a_network_that_is_gone_does_not_cost_the_run(ncdo, own_net, tmp_path, monkeypatch, how):
    "The advice is about the package; with the package back, all is well"
    folder, path = own_net
    if CHANGED[how]:
        monkeypatch.syspath_prepend(path.parent)
        path.write_text(CHANGED[how])
    before = everything(folder)
    why = dict(moved="No module named 'nets_of_mine'", renamed="has no attribute 'small'", broken="No module named 'no_such_package'", wider="another network than 'nets_of_mine:small' is here")[how]
    for command in (['predict', folder, tmp_path / 'x.png'], ['export', folder]):
        status, out, err = ncdo(*command)
        assert status == 2 and why in err and err.endswith("install the package of 'nets_of_mine:small' as it was in training, or put its folder on PYTHONPATH\n"), err
        assert err.count('\n') == 1 and 'remove' not in err and 'train' not in err.replace('in training', '') and everything(folder) == before
        sys.modules.pop('nets_of_mine', None)
    path.write_text(NETS)
    importlib.invalidate_caches()
    monkeypatch.syspath_prepend(path.parent)
    assert Classifier(folder).model == 'nets_of_mine:small'


def test_weights_that_may_not_be_read_are_not_given_up(runs, monkeypatch):
    path = runs / 'worst/weights.safetensors'
    def refuse(file, *args, open=open, **kw):
        if str(file) == str(path): raise PermissionError(errno.EACCES, 'Permission denied', str(file))
        return open(file, *args, **kw)
    monkeypatch.setattr('builtins.open', refuse)
    with pytest.raises(InputError, match='cannot be read .Permission denied.; mend its permissions') as e: Classifier(runs / 'worst')
    assert 'remove' not in str(e.value)


@pytest.mark.parametrize('problem', [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize('file,command', [('report-recall.png', ['report', '{}']), ('report.html', ['report', '{}']), ('model.onnx', ['export', '{}']), ('p.csv', ['predict', '{}', '{}/x.png', '--out', '{}/p.csv'])])
def test_a_disk_that_is_full_or_only_read_is_one_line_with_the_file(ncdo, runs, monkeypatch, problem, file, command):
    if file == 'model.onnx': pytest.importorskip('onnxruntime')
    folder = runs / 'worst'
    (folder / 'scores.npz').unlink()
    Image.new('L', (8, 8)).save(folder / 'x.png')
    before = set(everything(folder))
    def refuse(path, content, write=Path.write_bytes):
        if file in path.name: raise OSError(problem, os.strerror(problem), str(path))
        return write(path, content)
    monkeypatch.setattr(Path, 'write_bytes', refuse)
    status, out, err = ncdo(*(a.format(folder) for a in command))
    assert status == 2 and os.strerror(problem) in err and file in err and err.count('\n') == 1 and not out, err
    assert not {n for n in set(everything(folder)) - before if file in n}


def test_train_keeps_the_network_and_compute_does_not(tmp_path, kept):
    spec = Spec(model='mlp-16', recipe=Recipe(steps=4, batch_size=16))
    compute([spec], tmp_path, workers=1, device='cpu', quiet=True)
    assert not list(tmp_path.rglob('weights.safetensors')) and (kept / 'worst/weights.safetensors').exists()


def test_a_record_means_the_weights_are_there(tmp_path, monkeypatch):
    def full(*_): raise OSError('no space left')
    monkeypatch.setattr(ncdo.runs, 'write_weights', full)
    with pytest.raises(OSError): run_stack([Spec(model='mlp-16', recipe=Recipe(steps=4, batch_size=16))], [tmp_path / 'run'], device='cpu', weights=True)
    assert read_record(tmp_path / 'run') is None


@pytest.mark.parametrize('name', ['plain', 'worst', 'spread'])
def test_the_kept_network_says_what_the_run_said(kept, name):
    with torch.no_grad(): scores = Classifier(kept / name)(load('digits-lt').part('test')[0] * 255 / 16)
    assert torch.allclose(scores, read_scores(kept / name)['test'], atol=1e-4)


@pytest.fixture(scope='module', params=['resnet8-w8', 'resnet8-w8@16'])
def photos(request, tmp_path_factory):
    "A run on colour images of 12 x 10 pixels, member of a stack, and its test images as files"
    root, g = tmp_path_factory.mktemp('photos'), torch.Generator().manual_seed(0)
    y = torch.arange(180) % 3
    x = (torch.randint(0, 120, (180, 3, 12, 10), generator=g) + 60 * torch.nn.functional.one_hot(y, 3)[:, :, None, None]).byte()
    data = Data('photos', x, y, ('red', 'green, mostly', 'blue'), torch.arange(60), torch.arange(60, 120), torch.arange(120, 180))
    spec = Spec(model=request.param, objective='worst-case-recall', loss='logit-adjusted', tail=.34, recipe=Recipe(steps=20, batch_size=16, augment=True))
    members = [Member(data, worst_case_recall(data.priors), spec.loss, seed) for seed in (1, 0)]
    result = fit(Stack(members, spec.model, spec.recipe, 'cpu'))[1]
    write_record(root / 'run', make_record(spec, data, result, 0, torch.device('cpu')), data, result, weights=True)
    (root / 'files').mkdir()
    for i, image in enumerate(data.part('test')[0]): Image.fromarray(image.permute(1, 2, 0).numpy()).save(root / f'files/{i:03}.png')
    return root


def read(text):
    rows = list(csv.reader(io.StringIO(text)))
    return rows[0], [r[1] for r in rows[1:]], np.array([r[2:] for r in rows[1:]], float), [r[0] for r in rows[1:]]


def test_predicted_files_are_the_runs_own_scores(ncdo, photos):
    "Raw scores, no second adjustment (trap 2), and the classes in their order"
    status, out, err = ncdo('predict', photos / 'run', photos / 'files', '--device', 'cpu')
    assert status == 0, err
    head, predicted, p, files = read(out)
    scores = read_scores(photos / 'run')['test']
    assert head == ['file', 'predicted', 'p_red', 'p_green, mostly', 'p_blue'] and files == sorted(files) and len(files) == 60
    assert np.abs(p - scores.softmax(-1).numpy()).max() < 1e-4
    assert predicted == [('red', 'green, mostly', 'blue')[i] for i in scores.argmax(-1)] and len(set(predicted)) > 1


def test_hidden_files_are_not_predicted(ncdo, photos, tmp_path):
    "What training does not look at, prediction does not either"
    (tmp_path / 'in/.thumbnails').mkdir(parents=True)
    shutil.copy(photos / 'files/000.png', tmp_path / 'in/a.png')
    for hidden in ('in/._a.png', 'in/.thumbnails/b.png'): (tmp_path / hidden).write_text('no image')
    status, out, err = ncdo('predict', photos / 'run', tmp_path / 'in')
    assert status == 0 and len(read(out)[1]) == 1, err


def test_a_run_trained_again_loses_what_was_made_from_its_old_scores(kept, tmp_path):
    folder = shutil.copytree(kept / 'worst', tmp_path / 'worst')
    spec, old = spec_of(read_record(folder)), post_shift_run(folder, iterations=5)
    assert spec.id == read_record(folder)['id']
    (folder / 'record.json').unlink()
    run_stack([spec], [folder], device='cpu')
    assert not Path(old['path']).exists() and post_shift_run(folder, iterations=5)['test'] == old['test']


def test_predict_into_a_file(ncdo, photos, tmp_path):
    status, out, _ = ncdo('predict', photos / 'run', photos / 'files/003.png', photos / 'files', '--out', tmp_path / 'new/p.csv')
    assert status == 0 and not out and len((tmp_path / 'new/p.csv').read_text().splitlines()) == 62


@pytest.mark.parametrize('mode', ['RGB', 'RGBA', 'L', 'P', '1', 'CMYK', 'I;16', 'LA'])
@pytest.mark.parametrize('channels', [1, 3])
def test_any_kind_of_image_is_converted(tmp_path, mode, channels):
    picture = Image.fromarray(np.full((33, 31), 40_000, np.uint16)) if mode == 'I;16' else Image.new('L', (31, 33), 156).convert(mode)
    picture.save(tmp_path / ('x.tif' if mode in ('CMYK', 'I;16') else 'x.png'))
    pixels = read_image(next(tmp_path.iterdir()), (12, 10), channels)
    assert pixels.shape == (channels, 10, 12) and pixels.dtype == torch.uint8
    if mode != '1': assert (pixels.int() - 156).abs().max() <= 1


def test_images_are_turned_upright_and_not_stretched(tmp_path):
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 255
    Image.fromarray(wide).save(tmp_path / 'wide.png')
    assert (read_image(tmp_path / 'wide.png', (20, 20)) == 255).all()
    turned = Image.fromarray(np.tile(np.array([[0, 255]], np.uint8), (20, 1)).repeat(10, 1))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / 'turned.png', exif=exif)
    assert (read_image(tmp_path / 'turned.png', (20, 20), 1)[0, :, 0] > 128).tolist() == [False] * 10 + [True] * 10


def test_folders_expand_to_the_images_in_them(tmp_path):
    (tmp_path / 'a/b').mkdir(parents=True)
    for name in ('a/2.PNG', 'a/b/1.jpg', 'a/notes.txt'): (tmp_path / name).touch()
    assert [str(p.relative_to(tmp_path)) for p in image_files([tmp_path / 'a', tmp_path / 'a/notes.txt'])] == ['a/2.PNG', 'a/b/1.jpg', 'a/notes.txt']


# ONNX

@pytest.mark.parametrize('which', ['photos', 'worst'])
@pytest.mark.parametrize('n', [1, 2, 7])
def test_onnx_runtime_agrees_with_torch(ncdo, photos, runs, which, n):
    onnx, runtime = pytest.importorskip('onnx'), pytest.importorskip('onnxruntime')
    folder = photos / 'run' if which == 'photos' else runs / 'worst'
    if not (folder / 'model.onnx').exists():
        status, out, err = ncdo('export', folder)
        assert status == 0 and 'model.onnx' in out, err
    classifier = Classifier(folder)
    x = torch.randint(0, 256, (n, *classifier.shape), generator=torch.Generator().manual_seed(n)).float()
    session = runtime.InferenceSession(folder / 'model.onnx')
    with torch.no_grad(): expected = classifier(x).numpy()
    scores, = session.run(['scores'], dict(pixels=x.numpy()))
    assert scores.shape == expected.shape and np.abs(scores - expected).max() < 1e-4
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts['class_names']) == classifier.class_names and facts['prediction'] == 'argmax of scores, no further adjustment'
    onnx.checker.check_model(onnx.load(folder / 'model.onnx'))
    assert b'site-packages' not in (folder / 'model.onnx').read_bytes()


def test_export_without_its_libraries_says_what_to_install(ncdo, runs, monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None if name == 'onnxruntime' else name)
    status, _, err = ncdo('export', runs / 'worst')
    assert status == 2 and "export needs onnxruntime; pip install 'ncdo[onnx]'" in err and not (runs / 'worst/model.onnx').exists()


# mistakes

def no_record(folder): (folder / 'record.json').unlink()
def no_weights(folder): (folder / 'weights.safetensors').unlink()
def half_weights(folder): (folder / 'weights.safetensors').write_bytes((folder / 'weights.safetensors').read_bytes()[:5000])
def foreign_weights(folder): save_file(dict(w=torch.zeros(2)), folder / 'weights.safetensors')
def other_network(folder):
    path = folder / 'weights.safetensors'
    path.write_bytes(path.read_bytes().replace(b'mlp-16', b'mlp-32'))
def broken_record(folder): (folder / 'record.json').write_text('{"id":')
def old_record(folder): (folder / 'record.json').write_text('{"id": "x", "split_hash": "y", "spec": {"new": 1}}')
def other_classes(folder): change(folder.parent / 'plain', class_names=[f'k{i}' for i in range(10)])
def text_image(folder): (folder / 'x.png').write_text('no image')
def half_image(folder):
    Image.new('RGB', (100, 100)).save(folder / 'x.png')
    (folder / 'x.png').write_bytes((folder / 'x.png').read_bytes()[:60])
def empty_folder(folder): (folder / 'nothing').mkdir()
def nothing(folder): pass


WRONG = [ # chkstyle: ignore-node
    (['report', '{}/nothere'], nothing, 'holds no record of a finished run'),
    (['report', '{}'], no_record, 'holds no record of a finished run'),
    (['report', '{}'], broken_record, 'is not a record (broken JSON)'),
    (['report', '{}'], old_record, "is not a record of this version of ncdo (KeyError: 'recipe')"),
    (['report', '{}', '--beside', '{}/../nothere'], nothing, 'nothere holds no record of a finished run'),
    (['report', '{}', '--beside', '{}/../plain'], other_classes, 'about other classes'),
    (['report'], nothing, "Missing argument 'run'"),
    (['predict', '{}', '{}', '--device', 'tpu'], nothing, "unknown device 'tpu'"),
    (['predict', '{}', '{}', '--device', 'cpu:x'], nothing, "there is no device 'cpu:x' here"),
    (['predict', '{}', '{}/nothere.png'], nothing, 'nothere.png does not exist'),
    (['predict', '{}', '{}/nothing'], empty_folder, 'nothing holds no images'),
    (['predict', '{}', '{}/record.json'], nothing, 'record.json is not an image that can be read'),
    (['predict', '{}', '{}/x.png'], text_image, 'x.png is not an image that can be read'),
    (['predict', '{}', '{}'], half_image, 'x.png cannot be read as an image'),
    (['predict', '{}', '{}/x.png'], no_weights, 'weights.safetensors is missing; `ncdo train` leaves one'),
    (['predict', '{}', '{}/x.png'], half_weights, 'weights.safetensors is damaged ('),
    (['predict', '{}', '{}/x.png'], foreign_weights, 'is not the weights of a run of this version of ncdo (KeyError: '),
    (['predict', '{}', '{}/x.png'], other_network, "weights.safetensors is of another network than 'mlp-32' is here (Error(s) in loading state_dict for MLP"),
    (['predict', '{}'], nothing, "Missing argument 'images'"),
    (['export', '{}'], no_weights, 'weights.safetensors is missing'),
    (['export', '{}/nothere'], nothing, 'weights.safetensors is missing')]


@pytest.mark.parametrize('args,spoil,message', WRONG, ids=lambda v: ' '.join(v) if isinstance(v, list) else getattr(v, '__name__', ''))
def test_mistakes_are_one_line_status_2_and_nothing_written(ncdo, runs, args, spoil, message):
    folder = runs / 'worst'
    spoil(folder)
    before = sorted(runs.rglob('*'))
    more = ['--out', runs / 'p.csv'] if args[0] == 'predict' else []
    status, out, err = ncdo(*(a.format(folder) for a in args), *more)
    assert status == 2 and message in err and err.count('\n') == 1 and not out
    assert sorted(runs.rglob('*')) == before


@pytest.mark.parametrize('objective', ['geometric-mean', 'worst-case-recall'])
@pytest.mark.parametrize('constraint,target', [('balanced-coverage', 'that is 6.00%'), ('coverage', '60.0% of its share'), ('recall', '30.0%'), ('precision', '30.0%')])
def test_constraints_besides_are_told_with_their_own_target(objective, constraint, target, tmp_path):
    spec = Spec(model='mlp-16', objective=objective, constraint=constraint, fraction=.6, tau=.3, recipe=Recipe(steps=4, batch_size=32, update_every=2))
    run_stack([spec], [tmp_path / 'run'], device='cpu')
    wanted = Run(tmp_path / 'run').wanted
    besides = wanted.partition('; besides, ')[2]
    assert 'every class' in besides and target in besides, wanted
