"tools/build.py check says nothing of a clean tree, and names what is stale"
import json, shutil, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path):
    for name in ('nbs', 'ncdo', 'tools'): shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns('__pycache__'))
    for name in ('pyproject.toml', 'settings.ini', 'README.md'): shutil.copy(ROOT / name, tmp_path)
    (tmp_path / 'tests').mkdir()
    return tmp_path


def check(tree): return subprocess.run([sys.executable, 'tools/build.py', 'check'], cwd=tree, capture_output=True, text=True)


def test_a_clean_tree_passes(tree):
    done = check(tree)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('name,change', [('ncdo/gains.py', '\nx = 1\n'), ('README.md', 'more\n'), ('ncdo/orphan.py', 'x = 1\n'), ('nbs/00_gains.ipynb', ' \n')])
def test_what_is_stale_is_named(tree, name, change):
    with open(tree / name, 'a', encoding='utf-8') as f: f.write(change)
    done = check(tree)
    assert done.returncode == 1 and f'{name} is not what the notebooks give' in done.stderr


def test_a_line_that_no_page_holds_is_named(tree):
    path = tree / 'nbs/02a_first_run.ipynb'
    nb = json.loads(path.read_text(encoding='utf-8'))
    cell = next(c for c in nb['cells'] if c['cell_type'] == 'code' and not c['source'][0].startswith('#|'))
    cell['source'] = [*cell['source'], '\n', f'x = {"1" * 97}']
    path.write_text(json.dumps(nb, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
    done = check(tree)
    assert done.returncode == 1 and f'02a_first_run.ipynb, cell {cell["id"]}, line' in done.stderr and '101 characters; at most 100' in done.stderr
