"Targets for each class: on the command line, in a run's id and record, after post-shift, on the page"
import html, json, re, pytest, torch
from pictures import image_folder
from ncdo.gains import InputError
from ncdo.report import Run, judge, write_report
from ncdo.runs import GOALS, Spec, post_shift_run, spec_of

FAST = ['--model', 'mlp-16', '--steps', 4, '--batch-size', 8]
RECALL = ['--objective', 'recall', '--dataset', 'data']


@pytest.fixture
def pets(tmp_path, monkeypatch):
    "Beside a folder of cats, dogs and emus"
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / 'data')
    return tmp_path


def record(folder): return json.loads((folder / 'record.json').read_text())


def test_a_target_of_its_own_trains_resumes_and_round_trips(ncdo, pets):
    targets = ['--tau', '.5', '--tau', 'cat=.9', '--tau', 'dog=.8']
    status, _, err = ncdo('train', *RECALL, *FAST, *targets, '--out', 'run')
    r = record(pets / 'run')
    assert status == 0 and r['spec']['tau'] == [.5, [['cat', .9], ['dog', .8]]], err
    spec = spec_of(r)
    assert spec.tau == (.5, (('cat', .9), ('dog', .8))) and spec.id == r['id'] and hash(spec) == hash(spec_of(record(pets / 'run')))
    assert spec.problem(torch.tensor([.5, .3, .2]), names=['cat', 'dog', 'emu']).b.tolist() == pytest.approx([.9, .8, .5])
    assert 'nothing was trained' in ncdo('train', *RECALL, *FAST, '--tau', 'dog=.8', '--tau', 'cat=.9', '--out', 'run')[2]
    status, _, err = ncdo('train', *RECALL, *FAST, '--tau', 'cat=.9', '--out', 'run')
    assert status == 2 and 'another run (tau 0.5 cat=0.9 dog=0.8, not 0.5 cat=0.9)' in err


def test_one_goal_has_one_id(ncdo, pets):
    "However it is written: what is the same for most is the rest"
    names, ids = ['cat', 'dog', 'emu'], set()
    for tau in ({None: .8, 'cat': .9}, dict(cat=.9, dog=.8, emu=.8), {None: .9, 'dog': .8, 'emu': .8}, (.8, (('dog', .8), ('cat', .9)))):
        ids.add(Spec(objective='recall', tau=tau).settled(names).id)
    assert len(ids) == 1 and Spec(objective='recall', tau={c: .7 for c in names}).settled(names) == Spec(objective='recall', tau=.7)
    assert Spec(objective='recall', tau={'cat': .9}) == Spec(objective='recall', tau=[.5, [['cat', .9]]]) != Spec(objective='recall')


def test_ids_of_runs_with_one_target_are_what_they_were():
    assert [Spec(objective='recall', tau=t).id for t in (.5, .9, 1)] == ['0bcc640b5a11', '919ed7f40036', '695b2861ca80']
    assert Spec(objective='balanced-coverage', groups='head-tail', fraction=.8).id == '3674eec55b5c'


@pytest.mark.parametrize('objective,field,own', [('recall', 'tau', {'3': .9}), ('precision', 'tau', {3: .9}), ('coverage', 'fraction', {'3': .5}), ('balanced-coverage', 'fraction', {'3': .5})])
def test_every_such_goal_takes_them(objective, field, own):
    goal, p = GOALS[objective], torch.full((5,), .2).double()
    spec = Spec(objective=objective, **{field: own})
    rest = getattr(Spec, field)
    there = spec.at(range(5))
    assert getattr(there, field).tolist() == [rest, rest, rest, own[next(iter(own))], rest]
    assert torch.as_tensor(goal.target(there, 5)).shape == (5,) and spec.problem(p).k == 5
    uneven = spec.problem(p).gain(torch.ones(5)) - Spec(objective=objective).problem(p).gain(torch.ones(5))
    assert uneven.any() == (objective == 'precision') and (objective == 'precision' or len(set(spec.problem(p).b.tolist())) == 2)


def test_head_and_tail_have_targets_by_their_names(ncdo, tmp_path):
    args = ['train', *FAST, '--objective', 'balanced-coverage', '--groups', 'head-tail', '--loss', 'hybrid-b']
    assert ncdo(*args, '--fraction', 'tail=.8', '--out', tmp_path / 'run')[0] == 0
    run = Run(tmp_path / 'run')
    assert run.spec.fraction == (.8, (('head', .95),)) and run.targets == pytest.approx([.095, .08]) and run.target is None
    assert run.problem.b.tolist() == pytest.approx([.095, .08])
    assert 'at least 80.0% (head: 95.0%) of an equal share of the predictions, that is 8.00% (head: 9.50%)' in run.wanted
    status, _, err = ncdo(*args, '--fraction', '3=.8', '--out', tmp_path / 'other')
    assert status == 2 and "fraction names '3', which is not one of head, tail" in err and not (tmp_path / 'other').exists()


BAD = [ # chkstyle: ignore-node
    (['--tau', 'cow=.9'], "tau names 'cow', which is not one of cat, dog, emu; give tau for these"),
    (['--tau', 'cow=.5'], "tau names 'cow', which is not one of cat, dog, emu"),
    (['--tau', '0=.5'], "tau names '0', which is not one of cat, dog, emu"),
    (['--tau', '=.5'], "tau names '', which is not one of"),
    (['--tau', 'cat=.9', '--tau', 'cat=.8'], "--tau gives 'cat' two numbers; give one"),
    (['--tau', '.9', '--tau', '.8'], '--tau gives all classes two numbers; give one'),
    (['--tau', 'cat=1.5'], 'tau of cat is 1.5; give a number from 0 to 1'),
    (['--tau', 'cat=-.5'], 'tau of cat is -0.5; give a number from 0 to 1'),
    (['--tau', 'cat=nan'], 'tau of cat is nan; give'),
    (['--tau', '1.5', '--tau', 'cat=.5'], 'tau is 1.5; give a number from 0 to 1'),
    (['--tau', 'cat=x'], "--tau cat=x: 'x' is not a number; write --tau .5, and --tau cat=.9 for one class"),
    (['--tau', 'cat'], "--tau cat: 'cat' is not a number"),
    (['--fraction', 'cat=.9'], '--fraction is for coverage and balanced-coverage, not for recall')]


@pytest.mark.parametrize('args,message', BAD, ids=lambda v: ' '.join(v) if isinstance(v, list) else '')
def test_mistakes_are_one_line_status_2_and_nothing_written(ncdo, pets, args, message):
    status, out, err = ncdo('train', *RECALL, *FAST, *args, '--out', 'run')
    assert status == 2 and message in err and err.count('\n') == 1 and not out and [p.name for p in pets.iterdir()] == ['data'], err


@pytest.mark.parametrize('value', ['much', [.5, .9], [.5], [.5, [['cat']]], [.5, 3], {'cat': 'x'}, {'cat': 2}, {None: 2, 'cat': .5}, [.5, [['cat', .5], ['cat', .6]]], True, None])
def test_a_spec_refuses_what_is_no_target(value):
    with pytest.raises(InputError, match='^tau .*; give (a|one) number'): Spec(objective='recall', tau=value)


def test_post_shift_takes_them_and_keeps_the_rest_of_the_record(ncdo, pets):
    assert ncdo('train', *RECALL, *FAST, '--tau', '.3', '--tau', 'emu=.6', '--out', 'run')[0] == 0
    before = {p.name for p in (pets / 'run').iterdir()}
    for args, message in ((['--tau', 'cow=.9'], "tau names 'cow'"), (['--tau', 'cat=2'], 'tau of cat is 2.0'), (['--tau', 'cat=.1', '--tau', 'cat=.2'], "'cat' two numbers")):
        status, _, err = ncdo('postshift', '--run', 'run', '--objective', 'recall', *args)
        assert status == 2 and message in err and err.count('\n') == 1 and {p.name for p in (pets / 'run').iterdir()} == before
    status, out, err = ncdo('postshift', '--run', 'run', '--objective', 'recall', '--tau', 'cat=.9')
    path = out.split('result: ')[1].strip()
    assert status == 0 and json.loads(open(path).read())['settings']['tau'] == [.3, [['cat', .9], ['emu', .6]]], err # The others as on record
    assert post_shift_run('run', 'recall')['settings']['tau'] == (.3, (('emu', .6),)) # As on record
    assert post_shift_run('run', 'recall', tau={None: .3, 'cat': .9, 'emu': .6})['path'] == path
    assert post_shift_run('run', 'recall', tau={None: .3, 'cat': .9})['settings']['tau'] == (.3, (('cat', .9),))
    assert post_shift_run('run', 'recall', tau=.4)['settings']['tau'] == .4


def test_the_page_says_which_class_has_which_target(ncdo, pets):
    "Judged by hand: recalls .9, .8 and .6"
    assert ncdo('train', *RECALL, *FAST, '--tau', '.6', '--tau', 'cat=.95', '--out', 'run')[0] == 0
    r = record(pets / 'run')
    for part in ('validation', 'test'): r[part]['confusion'] = [[18, 2, 0], [4, 16, 0], [4, 4, 12]]
    (pets / 'run/record.json').write_text(json.dumps(r))
    run = Run('run')
    verdict = judge(run)
    assert [row['target'] for row in verdict['rows']] == [.95, .6, .6] and [row['met']['test'] for row in verdict['rows']] == [False, True, True]
    assert verdict['said']['test'].startswith('2 of 3 targets are met') and verdict['miss'] == pytest.approx(.05 / verdict['rows'][0]['error'])
    assert run.least(run.confusion['test']).item() == pytest.approx(-.05) and run.uneven
    text = re.sub(r'\s+', ' ', html.unescape(re.sub('<[^>]+>', ' ', write_report('run').read_text())))
    assert 'while the recall of every class is at least 60.0% (cat: 95.0%).' in text and 'wanted: recall of at least 60.0% (cat: 95.0%)' in text
    assert 'cat 95.0% ✗ 90.0% ✗ 90.0%' in text and 'smallest recall less its target, test' in text and '-5.00%' in text
