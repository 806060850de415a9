"The study of goals: which runs it wants, and that its numbers are those of the records, worked out by other libraries"
import dataclasses, json, numpy as np, pytest
from scipy.stats import gmean
from sklearn.metrics import f1_score
from ncdo.gains import InputError
from ncdo.runs import Spec, read_record, recipe_spec
from ncdo.stacks import check_members
from ncdo.studies import archived, goal_specs, settled, study_runs, table4_specs, table_specs
from ncdo.tables import LEAD, draw_square, judged, lead_signs, square, square_table, verdicts, wide_square
from ncdo.training import Member

GOALS = ['geometric-mean', 'macro-f1']


def at_training_mix(record):
    "Labels, predictions and weights that stand for a record's test sample at the class mix of its training sample"
    C, counts = np.array(record['test']['confusion']), np.array(record['class_counts'])
    y, predicted = np.indices(C.shape).reshape(2, -1)
    return y, predicted, (C * (counts / C.sum(1))[:, None]).ravel()


def macro_f1(record):
    y, predicted, weight = at_training_mix(record)
    return f1_score(y, predicted, sample_weight=weight, average='macro')


def test_its_runs():
    p, wanted, shifts = study_runs('goals', dict(preset='smoke', goals=GOALS))
    assert [(s.objective, s.loss, s.seed) for s in wanted] == [(g, loss, seed) for g, loss in
        (('accuracy', 'cross-entropy'), ('geometric-mean', 'auto'), ('macro-f1', 'auto')) for seed in (0, 1)]
    assert {s.groups for s in wanted} == {'class'} and not shifts and {s.dataset for s in wanted} == {'digits-lt'}
    assert len(study_runs('goals', dict(preset='quick'))[1]) == 60


def test_nothing_that_the_tables_have_is_computed_again():
    cells = goal_specs('paper', ['cifar10-lt', 'cifar100-lt'], 3, ['worst-case-recall', 'macro-f1'])
    shared = [s for (_, goal), specs in cells.items() for s in specs if goal != 'macro-f1']
    assert len(shared) == 12 and {s.id for s in shared} <= set(archived('paper'))
    assert cells['cifar10-lt', 'accuracy'] == table_specs('table2', 'paper', ['cifar10-lt'], 3)['cifar10-lt', 'ERM']
    tables = table4_specs('paper', [['cifar100-lt', 'class']], 3)
    assert cells['cifar100-lt', 'worst-case-recall'] == tables['cifar100-lt per class', 'CSL [Logit-adjusted]']
    assert all(s.groups == 'class' and s.loss == 'auto' for s in cells['cifar100-lt', 'macro-f1'])


@pytest.mark.parametrize('goal', settled('goals', dict(preset='quick')).goals)
def test_every_goal_has_a_loss_that_fits(goal):
    "Looked at before training: micro-F1's gain from values that no classifier has fits none"
    spec = recipe_spec('smoke', 'digits-lt', goal, 'auto')
    data = spec.data()
    member = Member(data, spec.problem(data.priors), spec.loss)
    check_members([member], spec.recipe)
    if goal.endswith(('f1', 'iou')):
        with pytest.raises(InputError): check_members([dataclasses.replace(member, loss='logit-adjusted')], spec.recipe)


@pytest.mark.parametrize('given,message', [('goals=[macro-f2]', "unknown goal 'macro-f2'; use one of"), ('goals=macro-f1', 'give a list, each value once, of the name of a goal'),
    ('goals=[coverage]', "goal 'coverage' has constraints"), ('goals=[recall-at-precision]', "goal 'recall-at-precision' has constraints")])
def test_goals_it_refuses(ncdo, tmp_path, given, message):
    status, _, err = ncdo('paper', 'goals', '--preset', 'smoke', '-p', given, '--out', tmp_path / 'out')
    assert status == 2 and message in err and not (tmp_path / 'out').exists()


def test_its_numbers_are_those_of_the_records(ncdo, tmp_path):
    status, _, err = ncdo('paper', 'goals', '--preset', 'smoke', '--out', tmp_path, '-p', f'goals={json.dumps(GOALS)}', '--compute-only', '--workers', 1)
    assert status == 0, err
    cells = goal_specs('smoke', ['digits-lt'], 2, GOALS)
    records = {cell: [read_record(tmp_path / 'runs' / s.id) for s in specs] for cell, specs in cells.items()}
    goals = {g: specs[0] for (_, g), specs in cells.items()}
    table = square_table({cell: [judged(r, goals) for r in these] for cell, these in records.items()})
    assert list(table) == ['dataset', 'method', 'metric', 'mean', 'se', 'n', 'paper'] and set(table.n) == {2} and len(table) == 3 * 3 + 3 * 2
    own, plain = [np.array([macro_f1(r) for r in records['digits-lt', g]]) for g in ('macro-f1', 'accuracy')]
    row = table[(table.method == 'accuracy')].set_index('metric')
    assert np.allclose(row.loc['macro-f1', ['mean', 'se']].astype(float), [plain.mean(), plain.std(ddof=1) / 2 ** .5])
    lead = own - plain
    assert np.allclose(row.loc[LEAD + 'macro-f1', ['mean', 'se']].astype(float), [lead.mean(), lead.std(ddof=1) / 2 ** .5])
    for r in records['digits-lt', 'geometric-mean']:
        y, predicted, weight = at_training_mix(r)
        assert np.isclose(judged(r, goals)['test']['accuracy'], weight[y == predicted].sum() / weight.sum())


def test_a_goal_is_judged_at_its_mix():
    record = dict(class_counts=[70, 20, 10], test=dict(confusion=[[18, 1, 1], [3, 15, 2], [4, 4, 12]]))
    values = judged(record, {g: Spec(objective=g) for g in GOALS})['test']
    assert np.isclose(values['geometric-mean'], gmean([.9, .75, .6])) and np.isclose(values['macro-f1'], macro_f1(record))


def test_what_is_said_of_a_square():
    values = dict(a=[(.8, .5), (.7, .4)], b=[(.6, .7), (.5, .4)])
    runs = {('digits-lt', g): [dict(test=dict(a=x, b=y)) for x, y in seeds] for g, seeds in values.items()}
    table = square_table(runs)
    assert lead_signs(table, 'digits-lt').loc[['a', 'b'], ['a', 'b']].values.tolist() == [[0, 0], [1, 0]]
    assert verdicts(table, 'digits-lt') == ['a: its own model is ahead of b', 'b: its own model is level with a']
    assert np.allclose(square(table, 'digits-lt')[0].values, [[.75, .45], [.55, .55]])
    wide = wide_square(table)
    assert wide.loc['digits-lt, trained for a', 'a'] == '[0.750 ± 0.050]' and wide.loc['digits-lt, own model less b', 'a'] == '+0.200 ± 0.000'
    marks = [t.get_text() for t in draw_square(table).axes[0].texts]
    assert marks == ['0.750', '0.450', '0.550 ▼', '0.550']
    one = square_table({cell: these[:1] for cell, these in runs.items()})
    assert not lead_signs(one, 'digits-lt').values.any() # A single seed has no error to be beyond
