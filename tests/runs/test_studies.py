"Studies take their parameters from the command line, papermill and settings.ini, and refuse what cannot be before anything trains"
import dataclasses, json, subprocess, sys, zipfile
from pathlib import Path
import papermill, pytest
from ncdo.gains import InputError
from ncdo.runs import PRESETS, Spec, read_record, ensemble_id, spec_of
from ncdo.studies import borrow, notebook_parameters, pack_records, settle, settled, studies, studies_at, study_runs
from ncdo.training import Recipe

ROOT = Path(__file__).parents[2]


def committed(preset):
    "The records behind the committed tables"
    with zipfile.ZipFile(ROOT / f'paper_figures/{preset}/runs.zip') as z:
        return [json.loads(z.read(n)) for n in z.namelist() if n.endswith('record.json')]


RECORDS = {preset: committed(preset) for preset in ('paper', 'paper-64px', 'beyond')}

WRONG = [ # chkstyle: ignore-node
    ('table2', 'seeds=abc', "seeds of table2 is 'abc'; give a whole number of at least 1, or one for each data set"),
    ('table2', 'seeds=1.5', 'seeds of table2 is 1.5; give a whole number'),
    ('table2', 'seeds=0', 'seeds of table2 is 0; give a whole number'),
    ('table2', 'seeds=-1', 'seeds of table2 is -1; give a whole number'),
    ('table2', 'seeds=true', 'seeds of table2 is True; give a whole number'),
    ('table2', 'seeds=[1,2]', 'seeds of table2 is [1, 2]; give a whole number'),
    ('table2', 'seeds={digits-lt: 0}', "seeds of table2 is {'digits-lt': 0}; give a whole number"),
    ('table2', 'seeds={cifar10-lt: 3}', 'seeds has no number for digits-lt'),
    ('table2', 'seeds={nothere: 3}', "unknown data set 'nothere'"),
    ('table2', 'seeds=', "parameter 'seeds' has no value"),
    ('table2', '=3', "parameter '=3' is not of the form NAME=VALUE"),
    ('table2', 'datasets=[]', 'datasets of table2 is []; give a list of data sets'),
    ('table2', 'datasets=digits-lt', "datasets of table2 is 'digits-lt'; give a list of data sets"),
    ('table2', 'datasets=[digits-lt, digits-lt]', 'each once'),
    ('table2', 'datasets=[cifar10-lt]', "unknown data set of preset 'smoke' 'cifar10-lt'"),
    ('table2', 'datasets=[3]', 'datasets of table2 is [3]; give a list of data sets'),
    ('table2', 'datasets=[digits-lt', 'is not YAML'),
    ('table2', 'preset=huge', "unknown preset 'huge'"),
    ('table2', 'preset=[smoke]', "preset of table2 is ['smoke']; give the name of a preset"),
    ('table4', 'iterations=x', "iterations of table4 is 'x'; give a whole number of at least 1"),
    ('table4', 'goals=[digits-lt]', "goals of table4 is ['digits-lt']; give a list of pairs"),
    ('table4', 'goals=[[digits-lt, both]]', 'give a list of pairs of a data set and class or head-tail'),
    ('table5', 'gammas=[]', 'gammas of table5 is []; give a list, each value once, of a number from 0 to 1'),
    ('table5', 'gammas=[0.1, 2]', 'gammas of table5 is [0.1, 2]; give a list'),
    ('table5', 'gammas=.1', 'gammas of table5 is 0.1; give a list'),
    ('figure1', 'weights=abc', "weights of figure1 is 'abc'; give a list, each value once, of a positive number"),
    ('figure1', 'weights=[4, 0]', 'weights of figure1 is [4, 0]; give a list'),
    ('figure1', 'weighted_class=-1', 'weighted_class of figure1 is -1; give a whole number of at least 0'),
    ('figure1', 'seeds={digits-balanced: 2}', 'give a whole number of at least 1'),
    ('table1', 'draws=0', 'draws of table1 is 0'),
    ('recipe', 'share=0', 'share of recipe is 0; give a positive number'),
    ('recipe', 'step_sizes=[.nan]', 'step_sizes of recipe is [nan]; give a list')]


@pytest.mark.parametrize('study,given,message', WRONG, ids=lambda v: v if '=' in v else '')
def test_wrong_values_are_refused_before_anything_trains(ncdo, tmp_path, study, given, message):
    status, _, err = ncdo('paper', study, '--preset', 'smoke', '-p', given, '--out', tmp_path / 'out')
    assert status == 2 and message in err and err.count('\n') == 1, err
    assert not (tmp_path / 'out').exists()


def test_weighted_class_is_one_of_the_data(ncdo, tmp_path):
    status, _, err = ncdo('paper', 'figure1', '--preset', 'smoke', '-p', 'weighted_class=10', '--out', tmp_path / 'out', '--compute-only')
    assert status == 2 and 'weighted_class is 10, outside the classes 0..9' in err


@pytest.mark.parametrize('study', list(studies()))
def test_settings_and_notebooks_agree(study):
    for preset in PRESETS:
        try: p, runs, shifts = study_runs(study, dict(preset=preset))
        except InputError as e: assert f'unknown preset of {study}' in str(e)
        else: assert p.preset == preset and p.out.name == preset and (runs or study == 'table1') and all(s in runs for s, _ in shifts)


def test_a_notebook_refuses_a_misspelt_parameter_itself():
    with pytest.raises(InputError, match="unknown parameter 'sedes' of table2; it has preset, datasets, seeds, out, data"):
        settle('table2', dict(preset='smoke', sedes=3, In=[], _=1, TABLE={}, settle=settle))
    with pytest.raises(InputError, match='seeds of table2 is 0'): settle('table2', dict(preset='smoke', seeds=0))
    with pytest.raises(InputError, match="unknown study 'table9'"): settled('table9', {})


@pytest.mark.parametrize('where', ['root', 'elsewhere'])
def test_plain_papermill(tmp_path, where):
    "As a person would call it: from the checkout's root, and from a folder of their own"
    (tmp_path / 'mine').mkdir()
    source, cwd = (Path('nbs'), ROOT) if where == 'root' else (ROOT / 'nbs', tmp_path / 'mine')
    told = ['-p', 'out', str(tmp_path / 'told')] if where == 'root' else [] # The root of the checkout that is tested stays clean
    kept = {p: p.stat().st_mtime_ns for p in (ROOT / 'paper_figures/quick').iterdir()}
    run = lambda *more: subprocess.run([sys.executable, '-m', 'papermill', str(source / '12_table2.ipynb'), str(tmp_path / 'out.ipynb'),
        '-p', 'preset', 'smoke', *told, *more, '--no-progress-bar'], cwd=cwd, capture_output=True, text=True)
    done = run()
    assert done.returncode == 0, done.stderr
    made = tmp_path / ('told' if told else 'mine/results/smoke')
    assert sorted(p.name for p in made.glob('table2.*')) == [f'table2.{e}' for e in ('csv', 'md', 'pdf', 'png', 'tex')]
    assert kept == {p: p.stat().st_mtime_ns for p in (ROOT / 'paper_figures/quick').iterdir()}
    done = run('-p', 'sedes', '3')
    assert done.returncode and "unknown parameter 'sedes' of table2" in done.stderr


def test_papermill_shows_the_parameters():
    for study, path in studies().items():
        found = papermill.inspect_notebook(str(path))
        assert {k: v['help'].partition(':')[0] for k, v in found.items()} == {k: kind for k, (kind, _) in notebook_parameters(study).items()}


@dataclasses.dataclass(frozen=True)
class LaterSpec(Spec):
    colour: str = 'grey' # A field of some later version


@pytest.mark.parametrize('record', sum(RECORDS.values(), []), ids=lambda r: r['id'])
def test_records_keep_their_ids(record):
    if 'members' in record: return check_id_of_ensemble(record)
    spec = spec_of(record)
    assert spec.id == record['id']
    fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    assert LaterSpec(**fields).id == record['id'] != LaterSpec(**fields, colour='red').id


def check_id_of_ensemble(record):
    assert ensemble_id('+'.join(record['members'])) == record['id']
    assert {r['id'] for r in RECORDS['beyond']} >= set(record['members'])


@pytest.mark.parametrize('preset,count', [('paper', 230), ('paper-64px', 7), ('beyond', 77)])
def test_the_committed_records_are_those_that_the_tables_want(tmp_path, preset, count):
    wanted = {s for study in studies() if study in studies_at(preset) for s in study_runs(study, dict(preset=preset))[1]}
    assert {s.id for s in wanted} <= {r['id'] for r in RECORDS[preset]} and len(RECORDS[preset]) == count
    borrow(wanted, tmp_path / 'runs', preset)
    assert all(read_record(tmp_path / 'runs' / s.id)['id'] == s.id for s in wanted)
    pack_records(tmp_path / 'runs', tmp_path / 'runs.zip')
    with zipfile.ZipFile(tmp_path / 'runs.zip') as ours, zipfile.ZipFile(ROOT / f'paper_figures/{preset}/runs.zip') as theirs:
        assert all(ours.read(n) == theirs.read(n) for n in ours.namelist())


def test_a_teacher_of_new_views_is_not_taken_over(tmp_path):
    "The checkout has its record, but not the network that is to label them"
    runs = study_runs('beyond', dict(preset='beyond', views=5))[1]
    pupils = [s for s in runs if getattr(s, 'views', 0)]
    teachers = {i for s in pupils for i in s.teacher.split('+')}
    borrow(runs, tmp_path, 'beyond')
    there = {p.parent.name for p in tmp_path.glob('*/record.json')}
    assert pupils and not teachers & there and there
    borrow([s for s in runs if s not in pupils], tmp_path, 'beyond')
    assert all((tmp_path / i / 'record.json').exists() for i in teachers)


def test_a_recipe_field_set_later_tells_runs_apart():
    assert Spec(max_multiplier=20.).id != Spec().id == Spec(max_multiplier=10).id == Spec(tolerance=.001).id
    assert Spec(step_size=1).id == Spec(step_size=1.).id and Spec(recipe=Recipe(learning_rate=1)).id == Spec(recipe=Recipe(learning_rate=1.)).id
