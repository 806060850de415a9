"The command line: what it prints, what it refuses, what it leaves behind"
import json, os, signal, subprocess, sys, pytest
from waiting import WITH_TESTS, steps_done

QUICK = ['train', '--model', 'mlp-16', '--steps', 20, '--batch-size', 32]


def test_train_leaves_a_record_and_a_summary(ncdo, tmp_path):
    status, out, _ = ncdo(*QUICK, '--out', tmp_path / 'run')
    assert status == 0 and 'worst class' in out and 'record.json' in out
    record = json.loads((tmp_path / 'run/record.json').read_text())
    assert f"every class is at least {record['test']['certified_recall']:.3f}" in out
    assert record['spec']['objective'] == 'worst-case-recall' and len(record['test']['recall']) == 10 and record['split_hash']
    assert sorted(os.listdir(tmp_path / 'run')) == ['record.json', 'scores.npz', 'weights.safetensors']


def test_a_plan_says_what_certifies_and_what_it_takes(ncdo):
    status, out, err = ncdo('plan', '--classes', 10, '--per-class', 500, '--target', .75, '--recall', .8)
    assert status == 0 and not err and '0.784 (392 of 500)' in out and '220 images' in out and '1088 images' in out
    out = ncdo('plan', '--classes', 100, '--per-class', 50, '--target', .5)[1]
    assert 'the mean of the worst 10 classes' in out and 'give --recall' in out
    assert ncdo('plan', '--classes', 10, '--per-class', 500, '--target', .75, '--delta', .005)[1].count('0.800 (400 of 500)') == 1
    assert '(confidence 0.9999999999)' in ncdo('plan', '--classes', 10, '--per-class', 500, '--target', .75, '--delta', 1e-10)[1]


@pytest.mark.parametrize('changes,message', [({'--classes': 0}, 'classes is 0; it must be a whole number'), ({'--per-class': 0}, 'per-class is 0; it must be a whole number'), # chkstyle: ignore-node
    ({'--per-class': 5}, 'give at least 11 of each class'), ({'--target': 1.5}, 'target is 1.5; it must lie between 0 and 1'), ({'--target': 'high'}, "Invalid value for '--target'"),
    ({'--delta': 0}, 'delta is 0.0; it must lie between 1e-15 and 1'), ({'--recall': .75}, 'a recall of 0.75 is not above the target 0.75'), ({'--recall': 2}, 'ncdo: recall is 2.0'),
    ({'--recall': .7501}, 'more than a million images'), ({'--recall': 'nan'}, 'ncdo: recall is nan'),
    ({'--classes': 10 ** 20}, 'classes is 100000000000000000000; it must be a whole number from 1 to 1048576'), ({'--per-class': 10 ** 9}, 'per-class is 1000000000; it must be'),
    ({'--target': .9999999999999}, 'a recall of 0.9999999999999; ask for less'), ({'--delta': 1e-17}, 'delta is 1e-17')])
def test_a_plan_that_cannot_be_is_refused_in_one_line(ncdo, changes, message):
    given = {'--classes': 10, '--per-class': 500, '--target': .75} | changes
    status, out, err = ncdo('plan', *(x for pair in given.items() for x in pair))
    assert status == 2 and not out and err.count('\n') == 1 and message in err


def test_same_seed_same_metrics(ncdo, tmp_path):
    records = []
    for name, seed in (('a', 0), ('b', 0), ('c', 1)):
        assert ncdo(*QUICK, '--seed', seed, '--out', tmp_path / name)[0] == 0
        records.append(json.loads((tmp_path / name / 'record.json').read_text()))
    same = lambda r: {k: v for k, v in r.items() if k != 'seconds'}
    assert same(records[0]) == same(records[1]) and records[0]['test'] != records[2]['test']


def test_constraints_are_reported(ncdo, tmp_path):
    _, out, _ = ncdo(*QUICK, '--objective', 'balanced-coverage', '--loss', 'hybrid-b', '--out', tmp_path / 'run')
    assert 'constraints on validation data' in out


@pytest.mark.parametrize('objective,loss,more', [('accuracy', 'cross-entropy', []), ('average-recall', 'auto', []), ('recall', 'logit-adjusted', ['--tau', '.6']),
    ('precision', 'hybrid-b', ['--tau', '.6']), ('precision', 'softmax-shifted', []), ('coverage', 'softmax-shifted', []), ('coverage', 'hybrid-a', []),
    ('worst-case-recall', 'auto', ['--groups', 'head-tail', '--tail', '.3']), ('balanced-coverage', 'hybrid-b', ['--groups', 'head-tail'])])
def test_every_objective_trains(ncdo, tmp_path, objective, loss, more):
    status, _, err = ncdo(*QUICK, '--objective', objective, '--loss', loss, *more, '--out', tmp_path / 'run')
    assert status == 0, err


PAPER = [ # chkstyle: ignore-node
    (['table9'], "unknown study 'table9'"),
    (['table2', '--preset', 'huge'], "unknown preset 'huge'"),
    (['table2', '-p', 'sedes=3'], "unknown parameter 'sedes' of table2; it has"),
    (['table2', '-p', 'seeds'], 'not of the form NAME=VALUE'),
    (['table2', '--seeds', '0'], 'seeds of table2 is 0'),
    (['table2', '--workers', '0'], 'workers is 0'),
    (['table2', '--largest', '0'], 'largest is 0'),
    (['table2', '-p', 'datasets=[nothere]'], "unknown data set 'nothere'"),
    (['table2', '--no-compute'], 'runs are not on record'),
    (['table2', '--no-compute', '--compute-only'], 'nothing to do'),
    (['table2', '--preset', 'paper', '--seeds', '9'], 'needs a data root')]


@pytest.mark.parametrize('args,message', PAPER, ids=lambda v: ' '.join(v) if isinstance(v, list) else '')
def test_paper_mistakes(ncdo, tmp_path, monkeypatch, args, message):
    monkeypatch.delenv('NCDO_DATA', raising=False)
    status, out, err = ncdo('paper', *args, '--out', tmp_path / 'out')
    assert status == 2 and message in err and err.count('\n') == 1 and not (tmp_path / 'out').exists()


def test_a_folder_with_another_run_is_left_alone(ncdo, tmp_path):
    ncdo(*QUICK, '--out', tmp_path / 'run')
    before = (tmp_path / 'run/record.json').read_bytes()
    status, _, err = ncdo(*QUICK, '--seed', 1, '--out', tmp_path / 'run')
    assert status == 2 and 'the record of another run' in err and (tmp_path / 'run/record.json').read_bytes() == before
    status, out, err = ncdo(*QUICK, '--out', tmp_path / 'run')
    assert status == 0 and 'worst class' in out and 'nothing was trained' in err and (tmp_path / 'run/record.json').read_bytes() == before


def test_a_students_split_is_its_teachers(ncdo, tmp_path):
    assert ncdo(*QUICK, '--split-seed', 1, '--out', tmp_path / 'teacher')[0] == 0
    student = [*QUICK, '--teacher', tmp_path / 'teacher', '--out', tmp_path / 'student']
    status, _, err = ncdo(*student, '--split-seed', 2)
    assert status == 2 and "--split-seed is 2, the teacher's 1" in err and not (tmp_path / 'student').exists()
    assert ncdo(*student)[0] == 0 and json.loads((tmp_path / 'student/record.json').read_text())['spec']['split_seed'] == 1


def test_a_class_never_predicted_is_named(ncdo, tmp_path):
    status, out, _ = ncdo(*QUICK, '--steps', 1, '--objective', 'precision', '--loss', 'hybrid-b', '--out', tmp_path / 'run')
    record = json.loads((tmp_path / 'run/record.json').read_text())
    never = [name for name, share in zip(record['class_names'], record['test']['coverage']) if share == 0]
    assert status == 0 and never and f"never predicted on test data: {', '.join(never)}\n" in out


KILLED = '''
import torch
torch.set_num_threads(1)
from ncdo.cli import main
from waiting import die_at
die_at('step', 400)
main()
'''


def test_killed_and_resumed(ncdo, tmp_path):
    "SIGKILL after the second checkpoint; --resume ends with the metrics of an uninterrupted run"
    args = [str(a) for a in ('train', '--model', 'mlp-16', '--steps', 3000, '--batch-size', 64, '--update-every', 50)]
    done = subprocess.run([sys.executable, '-c', KILLED, *args, '--out', str(tmp_path / 'a')], capture_output=True, env=WITH_TESTS)
    assert done.returncode == -signal.SIGKILL and steps_done(tmp_path / 'a/checkpoint.safetensors') == 300 and not (tmp_path / 'a/record.json').exists()
    status, _, err = ncdo(*args, '--out', tmp_path / 'a')
    assert status == 2 and 'add --resume' in err
    status, _, err = ncdo(*args, '--learning-rate', '.01', '--out', tmp_path / 'a')
    assert status == 2 and 'has other options than these' in err and '--resume' not in err and err.count('\n') == 1
    assert ncdo(*args, '--out', tmp_path / 'a', '--resume')[0] == 0 and ncdo(*args, '--out', tmp_path / 'b')[0] == 0
    a, b = [json.loads((tmp_path / d / 'record.json').read_text()) for d in 'ab']
    assert a['test'] == b['test'] and a['history'] == b['history'] and not (tmp_path / 'a/checkpoint.safetensors').exists()


def test_real_images(ncdo, tmp_path, data_root):
    status, out, err = ncdo('train', '--dataset', 'cifar10-lt', '--data', data_root, '--model', 'resnet8-w8', '--steps', 6, '--update-every', 3, '--out', tmp_path / 'run')
    assert status == 0 and 'airplane' in out, err
