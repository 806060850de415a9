"Killed at drawn moments, by SIGKILL: nothing is lost but the steps since the checkpoint"
import contextlib, dataclasses, itertools, json, os, random, signal, subprocess, sys, types, pytest, torch
from filelock import FileLock
from safetensors.torch import save
from ncdo.runs import Spec, recipe_spec
from ncdo.schedule import Busy, Job, claim, compute, jobs_for, most_together, pack_for_gpus, run_stack
from ncdo.gains import InputError
from ncdo.common import write_atomically
from ncdo.stacks import Stack
from ncdo.training import Member, Recipe
from waiting import WITH_TESTS, steps_done, until

TRAIN = ['train', '--model', 'mlp-16', '--steps', '2000', '--batch-size', '64', '--update-every', '50'] # A checkpoint every 100 steps
KILLER = '''
import json, os, sys, torch
torch.set_num_threads(1)
from pathlib import Path
from ncdo.cli import main
from waiting import die_at, steps_done
for death in json.loads(sys.argv[2]) + [None]:
    child = os.fork()
    if not child:
        sys.stdout = sys.stderr = open(os.devnull, 'w')
        if death: die_at(*death)
        main([*sys.argv[3:], '--out', sys.argv[1], '--resume'])
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), steps_done(Path(sys.argv[1], 'checkpoint.safetensors')))
'''


def twenty_deaths():
    "Moments, counted in steps or files since the start or restart; and where the checkpoint is after each"
    draw = random.Random(0)
    deaths = [d for _ in range(5) for d in (('step', draw.randint(1, 100)), ('step', draw.randint(101, 200)), ('half', draw.randint(1, 2)), ('unmoved', draw.randint(1, 2)))]
    draw.shuffle(deaths)
    deaths = [('step', 50), *deaths[:18]] # The first before there is any checkpoint
    steps = itertools.accumulate(100 * ((n - 1) // (100 if moment == 'step' else 1)) for moment, n in deaths)
    return [*deaths, ('record', 1)], [*steps, 2000]


def test_twenty_kills(ncdo, tmp_path):
    "Before the first checkpoint since a restart, after it, halfway through writing one, before it is in its place, and in the end before the record is"
    deaths, steps = twenty_deaths()
    assert len(deaths) == 20 and steps[0] == 0 and steps[18] < 2000 and {m for m, _ in deaths} == {'step', 'half', 'unmoved', 'record'}
    done = subprocess.run([sys.executable, '-c', KILLER, str(tmp_path / 'a'), json.dumps(deaths), *TRAIN], capture_output=True, text=True, env=WITH_TESTS)
    assert done.stdout.splitlines() == [f'{int(signal.SIGKILL)} {n}' for n in steps] + ['0 0'], done.stderr
    assert ncdo(*TRAIN, '--out', tmp_path / 'b')[0] == 0
    a, b = [json.loads((tmp_path / d / 'record.json').read_text()) for d in 'ab']
    assert {k: v for k, v in a.items() if k != 'seconds'} == {k: v for k, v in b.items() if k != 'seconds'}
    left = [n for n in os.listdir(tmp_path / 'a') if not n.startswith('.')] # But for the files that a kill has left half written
    assert sorted(left) == sorted(os.listdir(tmp_path / 'b'))


def some_runs(steps=600):
    "A stack of four with multipliers, and one of two without"
    recipe = Recipe(steps=steps, batch_size=32, update_every=50)
    goals = [dict(objective='worst-case-recall', loss=loss) for loss in ('logit-adjusted', 're-weighted')] + [{}]
    return [Spec(model='mlp-16', seed=seed, split_seed=seed if goal else 0, recipe=recipe, **goal) for goal in goals for seed in (0, 1)]


BATCH = '''
import sys
from test_killed import compute, some_runs
from waiting import stay_at
stay_at({{4: 70, 2: 320}}, {said!r})
if __name__ == '__main__': compute(some_runs(), {store!r}, workers=2, quiet=True)
'''


@contextlib.contextmanager
def a_batch(tmp_path, store):
    "A session of its own that computes `some_runs` in two workers, of which one has come to step 70 and one to step 320, and both train on for ever"
    (said := tmp_path / 'said').mkdir()
    (tmp_path / 'batch.py').write_text(BATCH.format(said=str(said), store=str(store)))
    process = subprocess.Popen([sys.executable, str(tmp_path / 'batch.py')], start_new_session=True, env=WITH_TESTS)
    try:
        until(lambda: process.poll() is not None or len(os.listdir(said)) == 2)
        assert process.poll() is None
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError): os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_killed_batch_of_stacks(tmp_path):
    "Two processes, two stacks; killed together after some checkpoints, then started again"
    store = tmp_path / 'runs'
    with a_batch(tmp_path, store) as process: os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not list(store.glob('*/record.json'))
    assert sorted(map(steps_done, store.glob('*.checkpoint.safetensors'))) == [60, 300]
    resumed = compute(some_runs(), store, workers=1, quiet=True)
    whole = compute(some_runs(), tmp_path / 'whole', workers=1, quiet=True)
    for spec, record in whole.items(): assert {k: v for k, v in record.items() if k != 'seconds'} == {k: v for k, v in resumed[spec].items() if k != 'seconds'}
    assert not list(store.glob('*.checkpoint.safetensors')) and not list(store.glob('*/.lock'))


def test_trap_53_one_run_is_never_computed_twice(tmp_path):
    spec, = some_runs(20)[:1]
    folder = tmp_path / spec.id
    folder.mkdir()
    with FileLock(folder / '.lock'):
        with pytest.raises(Busy, match='another process is computing the run'): run_stack([spec], [folder])
        assert Job([spec], tmp_path).run('cpu', print) is False
    run_stack([spec], [folder])
    assert sorted(os.listdir(folder)) == ['record.json', 'scores.npz']


def test_a_claim_leaves_no_trace(tmp_path):
    with claim(tmp_path / 'run'): assert (tmp_path / 'run/.lock').exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('workers', [1, 2])
def test_one_stack_that_fails_does_not_take_the_others_along(tmp_path, workers):
    good, bad = some_runs(20)[0], Spec(model='mlp-16', recipe=Recipe(steps=20, batch_size=32, learning_rate=1e30))
    with pytest.raises(InputError, match='diverged'): compute([good, bad], tmp_path, workers=workers, quiet=True)
    assert (tmp_path / good.id / 'record.json').exists() and not (tmp_path / bad.id).exists()


def test_trap_52_the_last_good_checkpoint_stays(tmp_path):
    from ncdo.data import load
    from ncdo.gains import worst_case_recall
    from ncdo.stacks import Stack, fit
    from ncdo.training import Member
    data, path = load('digits-lt'), tmp_path / 'checkpoint.safetensors'
    make = lambda: Stack([Member(data, worst_case_recall(data.priors), 'logit-adjusted')], 'mlp-16', Recipe(steps=60, batch_size=32), 'cpu')
    stack = make()
    for _ in range(30): stack.train_step()
    stack.save(path, 'x')
    kept = path.read_bytes()
    stack.weights.vector.mul_(torch.nan)
    with pytest.raises(InputError, match='diverged at step 30'):
        while stack.step < 60:
            stack.train_step()
            stack.save(path, 'x')
    assert path.read_bytes() == kept and fit(make(), checkpoint=path, name='x')[0].test.isfinite().all()


def test_checkpoints_that_share_a_run_are_not_both_gone_on_with(tmp_path):
    specs = [recipe_spec('smoke', 'digits-lt', seed=s) for s in range(3)]
    for pair in (specs[:2], specs[1:]):
        stack = Job(pair, tmp_path)
        write_atomically(stack.checkpoint, save({}, dict(name=' '.join(f'{s.id} on images x' for s in pair))))
    for order in (specs, specs[::-1]): # As wanted; a stack keeps the order of its checkpoint
        jobs = jobs_for(order, tmp_path, None, ['cpu'], 12)
        assert sorted(s.seed for j in jobs for s in j.specs) == [0, 1, 2] and sum(j.checkpoint.exists() for j in jobs) == 1


def test_a_run_on_record_is_not_written_again(tmp_path):
    specs = [recipe_spec('smoke', 'digits-lt', seed=0, split_seed=0, objective=o) for o in ('worst-case-recall', 'coverage')]
    first, = run_stack(specs[:1], [tmp_path / specs[0].id], device='cpu')
    before = (tmp_path / specs[0].id / 'record.json').read_bytes()
    both = run_stack(specs, [tmp_path / s.id for s in specs], device='cpu')
    assert (tmp_path / specs[0].id / 'record.json').read_bytes() == before and both[0]['test'] == first['test'] and both[1]['id'] == specs[1].id


def test_seconds_before_a_checkpoint_count(tmp_path, monkeypatch):
    "By a clock that moves only when it is told to"
    spec, now = recipe_spec('smoke', 'digits-lt'), types.SimpleNamespace(seconds=1000.)
    monkeypatch.setattr('ncdo.stacks.time', types.SimpleNamespace(time=lambda: now.seconds))
    start = lambda: Stack([Member(data := spec.data(), spec.problem(data.priors), spec.loss)], spec.model, spec.recipe, 'cpu')
    stack = start()
    now.seconds += 100
    stack.save(tmp_path / 'c', 'x')
    now.seconds += 5000
    (again := start()).load(tmp_path / 'c', 'x')
    assert again.spent == 100
    now.seconds += 20
    again.save(tmp_path / 'c', 'x')
    (last := start()).load(tmp_path / 'c', 'x')
    assert last.spent == 120


def test_stacks_fill_the_gpus():
    specs = [recipe_spec('paper', 'cifar10-lt', *how, seed) for seed in range(3) for how in (('accuracy', 'cross-entropy'),
        ('average-recall', 'logit-adjusted'), ('worst-case-recall', 're-weighted'), ('worst-case-recall', 'logit-adjusted'))]
    sizes = {n: [len(s) for s in pack_for_gpus(specs, n)] for n in (1, 2, 4)}
    assert sizes == {1: [12], 2: [6, 6], 4: [3] * 4}


HALFWAY = '''
import sys, torch
from ncdo.common import write_atomically
from waiting import die_at
write_atomically(sys.argv[1], b'first')
die_at(sys.argv[2], 1)
write_atomically(sys.argv[1], b'second')
'''


@pytest.mark.parametrize('moment', ['half', 'unmoved'])
def test_trap_51_killed_while_a_checkpoint_is_written(tmp_path, moment):
    path = tmp_path / 'checkpoint'
    done = subprocess.run([sys.executable, '-c', HALFWAY, str(path), moment], env=WITH_TESTS)
    assert done.returncode == -signal.SIGKILL and path.read_bytes() == b'first' and len(list(tmp_path.iterdir())) == 2


def test_trap_37_training_never_looks_at_the_test_sample():
    "Other test images, other test labels: the same weights, multipliers and history"
    from ncdo.data import load
    from ncdo.gains import worst_case_recall
    from ncdo.stacks import Stack, fit
    from ncdo.training import Member
    data, results = load('digits-lt'), []
    for spoiled in (False, True):
        x, y = data.x.clone(), data.y.clone()
        if spoiled: x[data.test], y[data.test] = 0, 3
        other = dataclasses.replace(data, x=x, y=y)
        results += fit(Stack([Member(other, worst_case_recall(other.priors), 'logit-adjusted')], 'mlp-16', Recipe(steps=30, batch_size=32), 'cpu'))
    a, b = results
    assert a.history == b.history and torch.equal(a.reduction.multipliers, b.reduction.multipliers) and not torch.equal(a.test, b.test)
    for name, weight in a.weights.items(): assert torch.equal(weight, b.weights[name])


@pytest.mark.skipif(not os.path.exists('/proc/self/stat'), reason='looks for processes in /proc')
def test_workers_leave_with_a_parent_that_is_killed(tmp_path):
    "Alone, by SIGKILL: its two workers, which would train for ever, must not do so beside a batch that is started again"
    with a_batch(tmp_path, tmp_path / 'runs') as process:
        alive_now = lambda: [p for p in os.listdir('/proc') if p.isdecimal() and alive(p, process.pid)]
        assert set(os.listdir(tmp_path / 'said')) < set(alive_now())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        until(lambda: not alive_now())


def alive(pid, group):
    "Is a process of this group alive?"
    try: state, _, pgrp = open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[:3]
    except OSError: return False
    return int(pgrp) == group and state not in 'ZX'


def test_a_checkpoint_whose_runs_are_on_record_goes(ncdo, tmp_path):
    "Killed between its last record and the removal: `ncdo train` shows the record, a batch tidies up"
    args = ['train', '--model', 'mlp-16', '--steps', 10, '--batch-size', 32, '--out', tmp_path / 'run']
    assert ncdo(*args)[0] == 0
    (tmp_path / 'run/checkpoint.safetensors').write_bytes(b'left')
    status, out, _ = ncdo(*args)
    assert status == 0 and 'record:' in out and not (tmp_path / 'run/checkpoint.safetensors').exists()
    spec = recipe_spec('smoke', 'digits-lt')
    compute([spec], tmp_path / 'runs', workers=1, quiet=True)
    write_atomically(left := Job([spec], tmp_path / 'runs').checkpoint, save({}, dict(name=f'{spec.id} on images x')))
    compute([spec], tmp_path / 'runs', workers=1, quiet=True)
    assert not left.exists()


@pytest.mark.parametrize('count,mend', [(1, '--batch-size'), (2, '--largest')])
def test_too_little_memory_is_told(count, mend, tmp_path, monkeypatch):
    def full(*args, **kwargs): raise torch.OutOfMemoryError('CUDA out of memory')
    monkeypatch.setattr('ncdo.schedule.fit', full)
    with pytest.raises(InputError, match=f'cpu ran out of memory with {count} × mlp-16 in training; .*{mend}'):
        compute([recipe_spec('smoke', 'digits-balanced', seed=s, split_seed=0) for s in range(count)], tmp_path, workers=1, quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('memory,most', [(80e9, 48), (40e9, 48), (16e9, 21), (8e9, 10), (.5e9, 1)])
def test_smaller_cards_take_fewer_runs(memory, most, monkeypatch):
    monkeypatch.setattr('ncdo.schedule.gpu_memory', lambda device: memory if device == 'cuda:1' else 80e9)
    assert most_together(['cuda:0', 'cuda:1']) == most and most_together(['cpu']) == 12
    specs = [recipe_spec('paper', 'cifar10-lt', seed=s) for s in range(60)]
    assert max(map(len, pack_for_gpus(specs, 1, most))) <= most


def test_pieces_that_killed_writers_left_are_cleared(tmp_path):
    "Only old ones, of the same file"
    pieces = ['.a[1].json.17', '.a[1].json.18', '.a[1].json.lock', '.b.json.17']
    for name in pieces: (tmp_path / name).write_text('half')
    for name in pieces:
        if not name.endswith('18'): os.utime(tmp_path / name, (0, 0))
    write_atomically(tmp_path / 'a[1].json', 'whole')
    assert sorted(os.listdir(tmp_path)) == ['.a[1].json.18', '.a[1].json.lock', '.b.json.17', 'a[1].json']
