"A grid on two Ray workers, one of them killed in the middle of a run"
import os, signal, threading, pytest
from collections import Counter
from pathlib import Path
from ncdo.adapters import compute_with_ray
from ncdo.runs import Spec, read_record
from ncdo.schedule import Job, compute
from ncdo.gains import InputError
from ncdo.training import Recipe
from waiting import FOR_EVER, steps_done, until

ray = pytest.importorskip('ray')
ROOT = Path(__file__).parents[2]
SHORT, LONG = Recipe(steps=60, batch_size=32), Recipe(steps=1500, batch_size=32, update_every=100) # A checkpoint every 75 steps
GOAL = dict(objective='worst-case-recall', loss='logit-adjusted')
SPECS = [Spec(model='held:net', recipe=LONG, **GOAL)] + [Spec(model='mlp-16', seed=s, recipe=SHORT, **GOAL) for s in range(1, 6)]
HELD = '''
import itertools, os, time, torch
from pathlib import Path
from torch import nn
here, count = Path(__file__).parent, itertools.count(1)

class Held(nn.Sequential):
    "Notes each step of training; in the 1000th the first process that comes so far waits to be killed"
    def forward(self, x):
        if torch.is_grad_enabled():
            with open(here / 'steps', 'a') as f: f.write(f'{os.getpid()}\\n')
            if next(count) == 1000 and not (here / 'held').exists():
                (here / 'now').write_text(str(os.getpid()))
                os.replace(here / 'now', here / 'held')
                while True: time.sleep(1)
        return super().forward(x)

def net(num_classes): return Held(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, num_classes))
'''


@pytest.fixture(scope='module')
def two_workers(tmp_path_factory):
    "The folder of the network `held:net`, which they can import"
    # Ray gives its agents 15 s to start (its issue 65983) unless told otherwise, and the first of them 30 s in any case, of which jsonschema
    # spends many on a grammar of web addresses that Jupyter brings along
    folder, patch = tmp_path_factory.mktemp('importable'), pytest.MonkeyPatch()
    (folder / 'rfc3987_syntax.py').write_text("raise ImportError('not needed here')")
    (folder / 'held.py').write_text(HELD)
    patch.setenv('PYTHONPATH', os.pathsep.join([str(folder), str(ROOT)]))
    for name, unit in dict(agent_register_timeout_ms=1000, gcs_server_request_timeout_seconds=1).items():
        patch.setenv(f'RAY_{name}', str(FOR_EVER * unit))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level='error')
    yield folder
    ray.shutdown()
    patch.undo()


def test_a_killed_worker_is_replaced_and_its_run_goes_on(two_workers, tmp_path, monkeypatch):
    "Killed in its 1000th step, when the other runs are done; its successor trains from the last checkpoint, at step 975, to the end"
    store, first, records = tmp_path / 'ray', SPECS[0], {}
    monkeypatch.syspath_prepend(two_workers)
    work = threading.Thread(target=lambda: records.update(compute_with_ray(SPECS, store)), daemon=True)
    work.start()
    until(lambda: not work.is_alive() or (two_workers / 'held').exists() and len(list(store.glob('*/record.json'))) == 5)
    assert work.is_alive() and read_record(store / first.id) is None and steps_done(Job([first], store).checkpoint) == 975
    os.kill(int((two_workers / 'held').read_text()), signal.SIGKILL)
    until(lambda: not work.is_alive())
    assert list(Counter((two_workers / 'steps').read_text().split()).values()) == [1000, 1500 - 975]
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
