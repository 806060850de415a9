"Every chapter runs from top to bottom; the studies run through papermill in test_paper.py"
from pathlib import Path
import pytest
from nbdev.test import test_nb as run_notebook

ROOT = Path(__file__).parents[2]
CHAPTERS = [p for p in sorted((ROOT / 'nbs').glob('*.ipynb')) if '"parameters"' not in p.read_text(encoding='utf-8')]


@pytest.mark.parametrize('path', CHAPTERS, ids=lambda p: p.stem)
def test_chapter(path):
    passed, _ = run_notebook(path, basepath=ROOT)
    assert passed, f'{path.name} failed; its traceback is above'
