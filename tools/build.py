"""Keep what is made from the notebooks in step with them.

    python tools/build.py export    run the chapters, keep their outputs, export ncdo/, write README.md
    python tools/build.py check     say what is out of date or against the style; changes nothing
"""
import base64, re, shutil, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MADE = ['nbs/*.ipynb', 'nbs/images/*.png', 'ncdo/*.py', 'README.md']


def run(command, *args, cwd=ROOT):
    "Run a command of this environment, activated or not"
    subprocess.run([str(Path(sys.executable).with_name(command)), *args], cwd=cwd, check=True)


def is_study(path): return '"parameters"' in path.read_text(encoding='utf-8')


def shown_alone(cell, directives, images):
    "Markdown cells of what a cell without its code shows; a picture becomes a file named by the cell's `label`, with its `fig-alt`"
    from nbformat.v4 import new_markdown_cell
    for data in (o.get('data', {}) for o in cell.outputs):
        if 'text/markdown' in data: yield new_markdown_cell(data['text/markdown'])
        elif 'image/png' in data:
            images.mkdir(exist_ok=True)
            (images / f"{directives['label']}.png").write_bytes(base64.b64decode(data['image/png']))
            yield new_markdown_cell(f"![{directives['fig-alt']}](../nbs/images/{directives['label']}.png)")


def write_readme(root):
    "README.md and its pictures from nbs/index.ipynb: no hidden cells, no directives, links relative to the root"
    import nbformat
    from nbconvert import MarkdownExporter
    nb, cells = nbformat.read(root / 'nbs/index.ipynb', 4), []
    for cell in nb.cells:
        lines = cell.source.splitlines()
        directives = dict(re.match(r'#\| *([\w-]+):? *(.*)', line).groups() for line in lines if line.startswith('#|'))
        cell.source = '\n'.join(line for line in lines if not line.startswith('#|'))
        if directives.get('echo') == 'false': cells += shown_alone(cell, directives, root / 'nbs/images')
        elif 'hide' not in directives: cells.append(cell)
    nb.cells, nb.metadata.language_info = cells, dict(name='python')
    text, _ = MarkdownExporter().from_notebook_node(nb)
    text = re.sub(r'\n{3,}', '\n\n', text.strip().replace('](../', ']('))
    (root / 'README.md').write_text(text + '\n', encoding='utf-8')


def lighten_pictures(path):
    "Give the pictures of a notebook palettes, so that the tree stays small"
    from fastcore.nbio import read_nb, write_nb
    from ncdo.common import lighten
    nb = read_nb(path)
    lighten(nb)
    write_nb(nb, path)


def export():
    chapters = [p for p in sorted((ROOT / 'nbs').glob('*.ipynb')) if not is_study(p)]
    run('nbdev-export')
    for path in chapters: run('nbdev-test', str(path), '--save', '--flags', '')
    run('nbdev-clean')
    for path in chapters: lighten_pictures(path)
    write_readme(ROOT)


def long_lines(folder, most=100):
    "Lines of code that a page of the book does not hold, a sentence each"
    import nbformat
    for path in sorted(folder.glob('*.ipynb')):
        for cell in nbformat.read(path, 4).cells:
            lines = cell.source.splitlines() if cell.cell_type == 'code' else []
            for n, line in enumerate(lines, 1):
                if len(line) > most: yield f'{path.name}, cell {cell.id}, line {n} has {len(line)} characters; at most {most}'


def check():
    "Problems, one line each"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ('nbs', 'ncdo'): shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns('__pycache__', '.ipynb_checkpoints'))
        for name in ('pyproject.toml', 'settings.ini', 'README.md'): shutil.copy(ROOT / name, copy)
        for path in (copy / 'ncdo').glob('[!_]*.py'): path.unlink()
        for command in ('nbdev-export', 'nbdev-clean'): run(command, cwd=copy)
        write_readme(copy)
        files = {p.relative_to(r) for r in (ROOT, copy) for pattern in MADE for p in r.glob(pattern)}
        content = lambda path: path.read_bytes() if path.exists() else None
        problems = [f'{f} is not what the notebooks give; run `make export`' for f in sorted(files) if content(ROOT / f) != content(copy / f)]
    style = subprocess.run([Path(sys.executable).with_name('chkstyle'), '--show-rule', 'nbs', 'tests', 'tools'], cwd=ROOT, capture_output=True, text=True)
    return [*problems, *long_lines(ROOT / 'nbs'), *([style.stdout.strip()] if style.returncode else [])]


if __name__ == '__main__':
    if sys.argv[1:] == ['export']: export()
    elif sys.argv[1:] == ['check']: sys.exit('\n'.join(check()) or 0)
    else: sys.exit(__doc__)
