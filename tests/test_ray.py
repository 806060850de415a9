"A grid on two Ray workers, one of them killed in the middle of a run"
import json, os, signal, threading, time
from pathlib import Path
import pytest
from ncdo.adapters import compute_with_ray
from ncdo.experiments import Job, Spec, compute, read_record
from ncdo.gains import InputError
from ncdo.training import Recipe

ray = pytest.importorskip('ray')
ROOT = Path(__file__).parent.parent
SHORT, LONG = Recipe(steps=60, batch_size=32), Recipe(steps=5000, batch_size=32, update_every=100)
SPECS = [Spec(model='mlp-16', objective='worst-case-recall', loss='logit-adjusted', seed=s, recipe=LONG if s == 0 else SHORT) for s in range(6)]


@pytest.fixture(scope='module')
def two_workers(tmp_path_factory):
    # Ray gives its agents 15 s to start (its issue 65983), of which jsonschema spends many on a grammar of web addresses that Jupyter brings along
    folder, patch = tmp_path_factory.mktemp('without'), pytest.MonkeyPatch()
    (folder / 'rfc3987_syntax.py').write_text("raise ImportError('not needed here')")
    patch.setenv('PYTHONPATH', os.pathsep.join([str(folder), str(ROOT)]))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level='error')
    yield
    ray.shutdown()
    patch.undo()


def steps_done(checkpoint):
    "Step of the checkpoint; 0 without one"
    try: content = checkpoint.read_bytes()
    except FileNotFoundError: return 0
    header = content[8:8 + int.from_bytes(content[:8], 'little')]
    return int(json.loads(header)['__metadata__']['step'])


def process_of(task):
    "Ids of the processes that Ray has named after a task at work"
    names = {p.parent.name: p.read_bytes() for p in Path('/proc').glob('[0-9]*/cmdline')}
    return [int(pid) for pid, name in names.items() if name.startswith(b'ray::' + task.encode())]


@pytest.mark.skipif(not Path('/proc/self/cmdline').exists(), reason='finds the worker to kill in /proc')
def test_a_killed_worker_is_replaced_and_its_run_goes_on(two_workers, tmp_path):
    store, first, seen, records = tmp_path / 'ray', SPECS[0], [], {}
    checkpoint = Job([first], store).checkpoint
    work, deadline = threading.Thread(target=lambda: records.update(compute_with_ray(SPECS, store)), daemon=True), time.time() + 240
    work.start()
    while work.is_alive() and time.time() < deadline and (steps_done(checkpoint) < 1000 or len(list(store.glob('*/record.json'))) < 5): time.sleep(.05)
    assert work.is_alive() and read_record(store / first.id) is None
    victim, = process_of('_run_job')
    os.kill(victim, signal.SIGKILL)
    while work.is_alive() and time.time() < deadline:
        if step := steps_done(checkpoint): seen.append(step)
        time.sleep(.02)
    assert not work.is_alive() and seen and seen == sorted(seen) and seen[0] >= 1000
    assert list(records) == SPECS and all(records.values()) and not list(store.glob('*.checkpoint*'))
    alone = compute(SPECS, tmp_path / 'alone', workers=1, quiet=True)
    for spec in SPECS:
        for what in ('history', 'multipliers', 'validation', 'test', 'train_accuracy'): assert records[spec][what] == alone[spec][what]
    times = {p: p.stat().st_mtime_ns for p in store.glob('*/*')}
    assert compute_with_ray(SPECS, store) == records and {p: p.stat().st_mtime_ns for p in store.glob('*/*')} == times


def test_a_mistake_in_a_task_is_told_in_a_line(two_workers, tmp_path):
    broken = tmp_path / SPECS[1].id / 'record.json'
    broken.parent.mkdir()
    broken.write_text('{')
    with pytest.raises(InputError, match='is not a record'): compute_with_ray([SPECS[1]], tmp_path)


def test_runs_may_share_a_task(two_workers, tmp_path):
    records = compute_with_ray(SPECS[1:], tmp_path, largest=3)
    assert len(records) == 5 and all(records[s]['id'] == s.id for s in SPECS[1:])
