"What stands beside the code agrees with it"
import re, subprocess, sys
from configparser import ConfigParser
from importlib.metadata import metadata, version
from pathlib import Path
import pytest, yaml
from ncdo.common import lighter
from ncdo.studies import notebook_parameters, settled, studies

ROOT = Path(__file__).parents[2]


def settings():
    parser = ConfigParser(default_section=None)
    parser.optionxform = str
    parser.read(ROOT / 'settings.ini', encoding='utf-8')
    return parser


def test_packaging_reads_settings():
    facts = settings()['DEFAULT']
    assert version('ncdo') == facts['version'] and metadata('ncdo')['Summary'] == facts['description']


def test_citation_has_the_version(): assert yaml.safe_load((ROOT / 'CITATION.cff').read_text())['version'] == version('ncdo')


def test_every_module_has_a_notebook():
    made = {re.search(r'default_exp (\w+)', p.read_text(encoding='utf-8')) for p in (ROOT / 'nbs').glob('*.ipynb')}
    assert {p.stem for p in (ROOT / 'ncdo').glob('*.py')} - {'__init__', '_modidx'} == {m[1] for m in made if m}


def test_computing_needs_no_jupyter():
    code = '''
import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.split('.')[0] in {'nbdev', 'papermill', 'IPython', 'nbformat', 'jupyter_client', 'execnb'}: raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import ncdo.cli
'''
    subprocess.run([sys.executable, '-c', code], check=True, cwd=ROOT)


@pytest.mark.parametrize('study', list(studies()))
@pytest.mark.parametrize('preset', ['smoke', 'quick', 'paper'])
def test_each_study_has_each_preset(study, preset):
    if (study, preset) == ('beyond', 'paper'): preset = 'beyond' # Not the paper's protocol
    chosen = vars(settled(study, dict(preset=preset)))
    assert chosen.keys() == notebook_parameters(study).keys() and chosen['preset'] == preset


def test_no_path_of_a_machine_is_committed():
    listed = subprocess.run(['git', 'grep', '-InE', r'/(work|farm|root|tmp)/[A-Za-z0-9_.-]+'], cwd=ROOT, capture_output=True, text=True)
    assert not [line for line in listed.stdout.splitlines() if not line.startswith('tests/')]


def test_the_tree_is_light():
    "Under 15 MB are tracked; pictures have palettes"
    listed = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode: pytest.skip('not a checkout')
    files = [ROOT / name for name in listed.stdout.split('\0') if name]
    assert sum(f.stat().st_size for f in files if f.exists()) < 15e6
    pictures = [f for f in files if f.suffix == '.png' and f.exists()]
    assert pictures and not [f for f in pictures if lighter(f.read_bytes()) != f.read_bytes()]
