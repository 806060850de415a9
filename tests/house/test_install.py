"Built as people get it, sdist and wheel, and used from an environment elsewhere"
import os, subprocess, sys, sysconfig, venv
from pathlib import Path
import pytest

ROOT = Path(__file__).parents[2]


def run(*command, cwd, **more): return subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, **more)


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    "sdist, and the wheel made from it, of a copy of what is tracked"
    folder = tmp_path_factory.mktemp('built')
    tracked = run('git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard', cwd=ROOT).stdout.split('\0')
    for name in filter(None, tracked):
        if name.startswith('paper_figures/') and name.count('/') > 1 or not (ROOT / name).exists(): continue
        (folder / 'source' / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / 'source' / name).write_bytes((ROOT / name).read_bytes())
    done = run(sys.executable, '-m', 'build', '--no-isolation', '--outdir', folder / 'dist', cwd=folder / 'source')
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder / 'dist'


@pytest.fixture(scope='module')
def installed(built, tmp_path_factory):
    "Python of an environment with the wheel; what it depends on is lent by this one, without its own ncdo"
    folder = tmp_path_factory.mktemp('elsewhere')
    venv.create(folder / 'venv', with_pip=True)
    python = folder / 'venv/bin/python'
    site = Path(run(python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))', cwd=folder).stdout.strip())
    wheel, = built.glob('*.whl')
    done = run(python, '-m', 'pip', 'install', '--no-deps', '--no-index', wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    (site / 'lent.pth').write_text(sysconfig.get_path('purelib') + '\n')
    return python


def elsewhere(installed, tmp_path, *command):
    environment = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'NCDO_DATA')}
    return run(*command, cwd=tmp_path, env=environment | dict(OMP_NUM_THREADS='1'))


def test_both_forms_are_built(built): assert len(list(built.glob('*.whl'))) == len(list(built.glob('*.tar.gz'))) == 1


def test_the_package_is_the_wheels(installed, tmp_path):
    done = elsewhere(installed, tmp_path, installed, '-c', 'import ncdo; from ncdo.studies import HOME; print(ncdo.__file__, HOME)')
    assert all(Path(p).is_relative_to(Path(installed).parent.parent) for p in done.stdout.split()), done.stdout + done.stderr


def test_the_smoke_preset_outside_any_checkout(installed, tmp_path):
    done = elsewhere(installed, tmp_path, installed.with_name('ncdo'), 'paper', '--preset', 'smoke')
    assert done.returncode == 0, done.stderr
    made = {p.name for p in (tmp_path / 'results/smoke').iterdir()}
    assert {f'table{i}.csv' for i in range(1, 6)} | {'figure1.png', 'recipe.png', '12_table2.ipynb', 'runs'} <= made
    assert 'LA with class priors' in done.stdout and sorted(os.listdir(tmp_path)) == ['results']


BARE = '''
import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.split('.')[0] in {refused}: raise ImportError(name)
sys.meta_path.insert(0, Refuse())
'''
OTHERS = {'pandas', 'matplotlib', 'seaborn', 'torchvision', 'PIL', 'safetensors', 'filelock', 'rich', 'tqdm', 'yaml', 'jinja2', 'papermill', 'nbformat', 'nbdev'}


@pytest.mark.parametrize('module', ['gains', 'losses', 'reductions', 'postshift', 'distillation', 'adapters'])
def test_the_core_needs_the_core_requirements_alone(module):
    "A loop of one's own: no library for images, tables, pictures or the command line"
    code = BARE.format(refused=OTHERS | {'typer'}) + f'import ncdo.{module}'
    done = run(sys.executable, '-c', code, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_readmes_loop_has_its_digits_with_the_core_alone():
    code = BARE.format(refused=OTHERS | {'typer'}) + "import ncdo; assert len(ncdo.load('digits-lt').train) == 269"
    done = run(sys.executable, '-c', code, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_command_says_what_a_bare_install_lacks():
    done = run(sys.executable, '-c', BARE.format(refused=OTHERS | {'typer'}) + 'import ncdo.cli', cwd=ROOT)
    assert done.returncode and done.stderr == "ncdo: the command line needs more than the core; pip install 'ncdo[train]'\n"


@pytest.mark.parametrize('missing,module,extra', [('typer', 'ncdo.cli', 'train'), ('matplotlib', 'ncdo.report', 'report'), ('papermill', 'ncdo.studies', 'paper')])
def test_what_is_missing_is_named_with_its_extra(missing, module, extra, tmp_path):
    use = {'ncdo.cli': 'from ncdo.cli import main; main(["--help"])', 'ncdo.report': f'from ncdo.cli import main; main(["report", {str(tmp_path)!r}])',
        'ncdo.studies': f'from ncdo.cli import main; main(["paper", "table1", "--preset", "smoke", "--out", {str(tmp_path / "out")!r}])'}[module]
    done = run(sys.executable, '-c', BARE.format(refused={missing}) + use, cwd=ROOT)
    assert done.returncode and done.stderr.count('\n') == 1 and f"pip install 'ncdo[{extra}]'" in done.stderr, done.stderr
