"Killed at random moments, by SIGKILL: nothing is lost but the steps since the checkpoint"
import dataclasses, json, os, signal, subprocess, sys, time, pytest, torch
from filelock import FileLock
from safetensors.torch import save
from ncdo.experiments import Busy, Job, Spec, claim, compute, jobs_for, most_together, pack_for_gpus, recipe_spec, run_stack
from ncdo.gains import InputError
from ncdo.training import Member, Recipe, Stack, write_atomically

TRAIN = ['train', '--model', 'mlp-16', '--steps', '5000', '--batch-size', '64', '--update-every', '50']
KILLER = '''
import os, random, signal, sys, time, torch
torch.set_num_threads(1)
from ncdo.cli import main
draw, kills = random.Random(0), 0
while True:
    child = os.fork()
    if not child:
        sys.stdout = sys.stderr = open(os.devnull, 'w')
        main([*sys.argv[2:], '--out', sys.argv[1], '--resume'])
        os._exit(0)
    time.sleep(draw.uniform(.1, 1.2))
    if kills < 20: os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status): kills += 1
    else: break
print(kills, os.WEXITSTATUS(status))
'''


def test_twenty_kills(ncdo, tmp_path):
    done = subprocess.run([sys.executable, '-c', KILLER, str(tmp_path / 'a'), *TRAIN], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ['20', '0'], done.stderr
    assert ncdo(*TRAIN, '--out', tmp_path / 'b')[0] == 0
    a, b = [json.loads((tmp_path / d / 'record.json').read_text()) for d in 'ab']
    assert {k: v for k, v in a.items() if k != 'seconds'} == {k: v for k, v in b.items() if k != 'seconds'}
    assert sorted(os.listdir(tmp_path / 'a')) == sorted(os.listdir(tmp_path / 'b'))


def some_runs(steps=1500):
    "A stack with multipliers, and one without"
    recipe = Recipe(steps=steps, batch_size=32, update_every=50)
    goals = [dict(objective='worst-case-recall', loss=loss) for loss in ('logit-adjusted', 're-weighted')] + [{}]
    return [Spec(model='mlp-16', seed=seed, split_seed=seed if goal else 0, recipe=recipe, **goal) for goal in goals for seed in (0, 1)]


def start_batch(tmp_path, store, steps=1500):
    "A session of its own that computes `some_runs` in two workers"
    code = f'import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\nfrom test_killed import compute, some_runs\nif __name__ == "__main__": compute(some_runs({steps}), sys.argv[1], workers=2, quiet=True)'
    (tmp_path / 'batch.py').write_text(code)
    return subprocess.Popen([sys.executable, str(tmp_path / 'batch.py'), str(store)], start_new_session=True)


def test_a_killed_batch_of_stacks(tmp_path):
    "Two processes, two stacks; killed together once a checkpoint lies there, then started again"
    store = tmp_path / 'runs'
    process = start_batch(tmp_path, store)
    while process.poll() is None and not list(store.glob('*.checkpoint.safetensors')): time.sleep(.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL and not list(store.glob('*/record.json'))
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
    from ncdo.training import Member, Stack, fit
    data, path = load('digits-lt'), tmp_path / 'checkpoint.safetensors'
    make = lambda: Stack([Member(data, worst_case_recall(data.priors), 'logit-adjusted')], 'mlp-16', Recipe(steps=60, batch_size=32), 'cpu')
    stack = make()
    for _ in range(30): stack.train_step()
    stack.save(path, 'x')
    kept = path.read_bytes()
    stack.vector.mul_(torch.nan)
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


def test_seconds_before_a_checkpoint_count(tmp_path):
    spec = recipe_spec('smoke', 'digits-lt')
    start = lambda: Stack([Member(data := spec.data(), spec.problem(data.priors), spec.loss)], spec.model, spec.recipe, 'cpu')
    stack = start()
    stack.born -= 100
    stack.save(tmp_path / 'c', 'x')
    (again := start()).load(tmp_path / 'c', 'x')
    assert 100 <= again.spent < 200


def test_stacks_fill_the_gpus():
    specs = [recipe_spec('paper', 'cifar10-lt', *how, seed) for seed in range(3) for how in (('accuracy', 'cross-entropy'),
        ('average-recall', 'logit-adjusted'), ('worst-case-recall', 're-weighted'), ('worst-case-recall', 'logit-adjusted'))]
    sizes = {n: [len(s) for s in pack_for_gpus(specs, n)] for n in (1, 2, 4)}
    assert sizes == {1: [12], 2: [6, 6], 4: [3] * 4}


HALFWAY = '''
import os, signal, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from ncdo.training import write_atomically
path = Path(sys.argv[1])
write_atomically(path, b'first')
if sys.argv[2] == 'before the move': os.replace = lambda a, b: os.kill(os.getpid(), signal.SIGKILL)
else: Path.write_bytes = lambda self, content: (open(self, 'wb', 0).write(content[:3]), os.kill(os.getpid(), signal.SIGKILL))
write_atomically(path, b'second')
'''


@pytest.mark.parametrize('moment', ['halfway through the file', 'before the move'])
def test_trap_51_killed_while_a_checkpoint_is_written(tmp_path, moment):
    path = tmp_path / 'checkpoint'
    done = subprocess.run([sys.executable, '-c', HALFWAY, str(path), moment])
    assert done.returncode == -signal.SIGKILL and path.read_bytes() == b'first' and len(list(tmp_path.iterdir())) == 2


def test_trap_37_training_never_looks_at_the_test_sample():
    "Other test images, other test labels: the same weights, multipliers and history"
    from ncdo.data import load
    from ncdo.gains import worst_case_recall
    from ncdo.training import Member, Stack, fit
    data, results = load('digits-lt'), []
    for spoiled in (False, True):
        x, y = data.x.clone(), data.y.clone()
        if spoiled: x[data.test], y[data.test] = 0, 3
        other = dataclasses.replace(data, x=x, y=y)
        results += fit(Stack([Member(other, worst_case_recall(other.priors), 'logit-adjusted')], 'mlp-16', Recipe(steps=30, batch_size=32), 'cpu'))
    a, b = results
    assert a.history == b.history and torch.equal(a.reduction.multipliers, b.reduction.multipliers) and not torch.equal(a.test, b.test)
    for name, weight in a.weights.items(): assert torch.equal(weight, b.weights[name])


def test_workers_leave_with_a_parent_that_is_killed(tmp_path):
    "Alone, by SIGKILL: its two workers must not train on beside a batch that is started again"
    process = start_batch(tmp_path, tmp_path / 'runs', 10 ** 6)
    workers = lambda: [p for p in os.listdir('/proc') if p.isdecimal() and alive(p, process.pid)]
    try:
        while process.poll() is None and not (len(list(tmp_path.glob('runs/*/.lock'))) and len(workers()) > 2): time.sleep(.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.time() + 60
        while workers() and time.time() < deadline: time.sleep(.1)
        assert not workers()
    finally:
        if workers(): os.killpg(process.pid, signal.SIGKILL)


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
    monkeypatch.setattr('ncdo.experiments.fit', full)
    with pytest.raises(InputError, match=f'cpu ran out of memory with {count} × mlp-16 in training; .*{mend}'):
        compute([recipe_spec('smoke', 'digits-balanced', seed=s, split_seed=0) for s in range(count)], tmp_path, workers=1, quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('memory,most', [(80e9, 48), (40e9, 48), (16e9, 21), (8e9, 10), (.5e9, 1)])
def test_smaller_cards_take_fewer_runs(memory, most, monkeypatch):
    monkeypatch.setattr('ncdo.experiments.gpu_memory', lambda device: memory if device == 'cuda:1' else 80e9)
    assert most_together(['cuda:0', 'cuda:1']) == most and most_together(['cpu']) == 12
    specs = [recipe_spec('paper', 'cifar10-lt', seed=s) for s in range(60)]
    assert max(map(len, pack_for_gpus(specs, 1, most))) <= most
