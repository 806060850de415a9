"CONTRIBUTING.md does what it says: each door is opened once, through public names only"
import json, re, shutil, subprocess, sys
from pathlib import Path
import nbformat

ROOT = Path(__file__).resolve().parent
while not (ROOT / 'CONTRIBUTING.md').exists(): ROOT = ROOT.parent
BLOCKS = re.findall(r'```python\n(.*?)```', (ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8'), re.S)

CHECKS = '''
from ncdo.gains import InputError
from ncdo.losses import CostSensitiveLoss
from ncdo.reductions import SaddlePoint
from ncdo.report import write_report
from ncdo.runs import read_scores, spec_of
from ncdo.schedule import pack

problem = few_losses(torch.tensor([.5, .3, .2]).double())
moved = [SaddlePoint(p, .1) for p in (problem, ncdo.Problem(problem.A, problem.B, problem.b, problem.priors))]
for game in moved: game.update(torch.tensor([[.3, .2, 0], [0, .3, 0], [0, 0, .2]]).double())
assert 0 < moved[0].multipliers.item() == moved[1].multipliers.item() / 2

loss = CostSensitiveLoss(problem.gain([.5]), 'halfway')
s, y = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
assert torch.allclose(loss(s, y), table_loss(s, y, *loss_tables(problem.gain([.5]), 'hybrid-b', strength=.5)).mean())

assert [len(stack) for stack in pack(specs)] == [2]
for spec, record in records.items():
    assert record['spec']['objective'] == 'few-losses' and spec_of(record).id == record['id']
    multipliers = [h['multipliers'][0] for h in record['history']]
    alone = SaddlePoint(spec.problem(spec.data().priors), spec.step_size)
    assert len(multipliers) == 12 and multipliers[0] == alone.multipliers.item()
    assert min(record['test']['recall']) > .9 and record['class_names'] == ['low', 'middle', 'high']
    page = write_report(Path('results/mine') / spec.id).read_text()
    assert 'hardly an example of class 0 is lost' in page and 'few-losses on stripes' in page
uncut = Spec('stripes', 'row-means', 'few-losses', 'halfway', recipe=Recipe(steps=60, batch_size=20, update_every=5))
compute([uncut], 'results/mine', workers=1, device='cpu', quiet=True)
trained = [read_scores(Path('results/mine') / s.id)['train'] for s in (uncut, specs[0])]
assert uncut.id != specs[0].id and not torch.allclose(*trained)
for change in (dict(objective='few-loses'), dict(loss='half-way'), dict(dataset='stripe'), dict(model='row-mean')):
    try: Spec(**change)
    except InputError as e: assert any(name in str(e) for name in ('few-losses', 'halfway', 'stripes', 'unknown model')), e
    else: raise AssertionError(change)
try: Recipe(transform='cutout-a-bit')
except InputError as e: assert "unknown transform 'cutout-a-bit'; use one of trivial, mixup" in str(e), e
else: raise AssertionError('cutout-a-bit')
'''


def test_each_door_opens(tmp_path):
    code = '\n'.join(BLOCKS) + CHECKS
    done = subprocess.run([sys.executable, '-c', 'import torch; torch.set_num_threads(1)\n' + code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_study_is_a_notebook_and_a_section(tmp_path):
    "In a copy of the package: nothing but the two files that the page names"
    shutil.copytree(ROOT / 'ncdo', tmp_path / 'ncdo', ignore=shutil.ignore_patterns('__pycache__'))
    (tmp_path / 'paper_figures').mkdir()
    (tmp_path / 'nbs').mkdir()
    for name in ('settings.ini', 'paper_figures/reported.csv'): shutil.copy(ROOT / name, tmp_path / name)
    text = (ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8')
    parameters, runs, section = [re.sub('^    ', '', b, flags=re.M) for b in re.findall(r'(?:^    .*\n)+', text[text.index('## A study'):], re.M)[:3]]
    draw = ("import matplotlib.pyplot as plt\nfrom ncdo.schedule import compute\nfrom ncdo.tables import save_figure, save_table\nimport pandas as pd\n"
        "records = compute(wanted, p.out / 'runs')\nfig, ax = plt.subplots()\nax.plot([r['train_accuracy'] for r in records.values()])\nsave_figure(fig, p.out, 'name')\n"
        "t = pd.DataFrame(dict(steps=[p.steps]))\nsave_table(t, p.out, 'name', t.set_index('steps').assign(runs=len(records)))")
    cell = lambda source, *tags: nbformat.v4.new_code_cell(source, metadata=dict(tags=list(tags)))
    nb = nbformat.v4.new_notebook(cells=[cell(parameters, 'parameters'), cell(runs, 'runs'), cell(draw)])
    nb.metadata.kernelspec = dict(name='python3', language='python', display_name='python3')
    nbformat.write(nb, tmp_path / 'nbs/50_name.ipynb')
    with open(tmp_path / 'settings.ini', 'a') as f: f.write('\n' + section.replace('steps = 100', 'steps = 12'))
    done = subprocess.run([sys.executable, '-m', 'ncdo.cli', 'paper', 'name', '--workers', '1'], cwd=tmp_path, capture_output=True, text=True,
        env=dict(__import__('os').environ, PYTHONPATH=str(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert {'name.png', 'name.csv', 'name.md', '50_name.ipynb', 'runs'} <= {p.name for p in (tmp_path / 'results/quick').iterdir()}
    records = [json.loads(p.read_text()) for p in (tmp_path / 'results/quick/runs').glob('*/record.json')]
    assert [r['spec']['recipe']['steps'] for r in records] == [12, 12]
