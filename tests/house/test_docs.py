"The pages of `make docs`: nothing of the notebooks is lost on them, nothing is fetched from elsewhere, every link leads somewhere"
import importlib, inspect, json, os, re, shutil, subprocess, sys
from collections import namedtuple
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit
import nbformat, pytest
from markdown_it import MarkdownIt
import ncdo

ROOT = Path(__file__).parents[2]
Page = namedtuple('Page', 'html article text ids')


@pytest.fixture(scope='session')
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp('site')
    built = subprocess.run([sys.executable, '-m', 'mkdocs', 'build', '--quiet', '--site-dir', str(folder)], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | dict(NO_MKDOCS_2_WARNING='1', PYTHONPATH=str(ROOT)))
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope='session')
def pages(site):
    "{path on the site: Page}"
    def read(path):
        html = path.read_text(encoding='utf-8')
        article = html[html.index('<article'):html.index('</article>')]
        return Page(html, article, unescape(re.sub(r'<[^>]+>', '', article)), set(re.findall(r'\bid="?([^"\s>]+)', html)))
    return {p.relative_to(site).as_posix(): read(p) for p in sorted(site.rglob('*.html')) if p.name != '404.html'}


def notebooks():
    "Those that are pages: each chapter, and each study where it was executed"
    executed = sorted(ROOT.glob('paper_figures/*/*.ipynb'))
    studies = {p.name for p in executed}
    return [p for p in sorted(ROOT.glob('nbs/[0-9]*.ipynb')) if p.name not in studies] + executed


def page_of(notebook, pages): return pages[notebook.relative_to(ROOT).with_suffix('.html').as_posix()]


def prose(notebook):
    "Markdown cells, without code"
    cells = [c.source for c in nbformat.read(notebook, 4).cells if c.cell_type == 'markdown']
    return re.sub(r'```.*?```|`[^`\n]*`', '', '\n\n'.join(cells), flags=re.S)


def test_every_notebook_is_a_page_with_a_title(pages):
    for notebook in notebooks(): page_of(notebook, pages)
    for name, page in pages.items():
        assert re.search(r'<title>[^<]*\w[^<]*</title>', page.html), name
        assert len(re.findall(r'<h1\b', page.article)) == 1, name


def test_every_link_leads_somewhere(site, pages):
    broken = []
    for name, page in pages.items():
        for target in re.findall(r'<(?:a|img|script|link)\b[^>]*?\b(?:href|src)="?([^"\s>]+)', page.html):
            parts = urlsplit(unescape(target))
            if parts.scheme or parts.netloc: continue
            file = (site / name).parent / unquote(parts.path) if parts.path else site / name
            known = pages.get(file.resolve().relative_to(site.resolve()).as_posix()) if file.exists() else None
            if not file.is_file() or parts.fragment and known and not parts.fragment.startswith('__') and unquote(parts.fragment) not in known.ids: broken.append(f'{name}: {target}')
    assert not broken, '\n'.join(broken)


def test_no_formula_is_lost(pages):
    for notebook in notebooks():
        text = prose(notebook).replace('\\$', '')
        in_source = len(re.findall(r'\$\$.+?\$\$|\$[^$\n]+\$', text, re.S))
        page = page_of(notebook, pages)
        assert len(re.findall(r'<math\b', page.article)) >= in_source, notebook


def test_no_list_and_no_table_is_lost(pages):
    "What CommonMark, the Markdown of notebooks, sees"
    for notebook in notebooks():
        html = MarkdownIt('commonmark').enable('table').render(prose(notebook))
        for tag in ('<li', '<table', '<h2', '<h3', '<blockquote', '<details'):
            assert page_of(notebook, pages).article.count(tag) >= html.count(tag), (notebook, tag)


def test_no_directive_and_no_hidden_cell_shows(pages):
    for notebook in notebooks():
        page, hidden, shown = page_of(notebook, pages), set(), ''
        for cell in nbformat.read(notebook, 4).cells:
            if cell.cell_type != 'code': shown += cell.source
            elif re.search(r'(?m)^#\| *(hide$|echo: false)', cell.source): hidden |= set(cell.source.splitlines())
            else: shown += cell.source
        assert '#| ' not in page.text, notebook
        assert not [line for line in hidden if len(line) > 20 and line not in shown and line in page.text], notebook


def test_figures_are_shown(pages):
    for notebook in notebooks():
        cells = [c for c in nbformat.read(notebook, 4).cells if c.cell_type == 'code' and '#| hide' not in c.source]
        assert page_of(notebook, pages).article.count('<img') >= sum('image/png' in o.get('data', {}) for c in cells for o in c.outputs), notebook


def test_every_public_name_has_its_entry(pages):
    for path in sorted((ROOT / 'ncdo').glob('[!_]*.py')):
        page = pages[f'api/{path.stem}.html']
        assert not [n for n in importlib.import_module(f'ncdo.{path.stem}').__all__ if n.lower() not in page.ids]
    for name in ncdo.__all__: # With each parameter, which help() also explains
        x = getattr(ncdo, name)
        page = pages[f"api/{x.__module__.rpartition('.')[2]}.html"]
        for text in re.findall(r'(?m)^\w+(?: : .*)?\n    (.+)$', inspect.getdoc(x) or ''): assert text.replace('`', '').split(';')[0] in page.text, (name, text)


def test_api_pages_say_what_comes_out_and_show_no_address(pages):
    "Of every function whose signature says so in a comment; and no object by its place in memory"
    for path in sorted((ROOT / 'ncdo').glob('[!_]*.py')):
        page, module = pages[f'api/{path.stem}.html'], importlib.import_module(f'ncdo.{path.stem}')
        assert ' at 0x' not in page.text, path.name
        for name in (n for n in module.__all__ if inspect.isfunction(getattr(module, n))):
            said = re.findall(r'(?m)^\): # (.+)$', inspect.getsource(getattr(module, name)))
            for text in said[:1]: assert text.replace('`', '') in page.text, (name, text)


def test_nothing_comes_from_elsewhere(site, pages):
    for name, page in pages.items():
        assert not re.findall(r'<(?:script|img|iframe|source|video)\b[^>]*?\bsrc="?(?:https?:)?//[^">\s]*', page.html), name
        assert not [tag for tag in re.findall(r'<link\b[^>]*>', page.html) if re.search(r'href="?(?:https?:)?//', tag)], name
    for path in site.rglob('*.css'): assert not re.search(r'(url\(|@import)\s*["\']?(https?:)?//', path.read_text(encoding='utf-8')), path
    assert (site / 'math.ttf').stat().st_size > 10**5


def test_search_index_holds_the_pages(site, pages):
    text = (site / 'search/search_index.js').read_text(encoding='utf-8')
    found = {d['location'].partition('#')[0] for d in json.loads(text.partition('=')[2])['docs']}
    assert found >= set(pages) - {'index.html'}


@pytest.fixture(scope='session')
def browse(site, tmp_path_factory):
    "Open a page from disk in a browser: its content after the scripts have run"
    chromium = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
    if not chromium: pytest.skip('needs a browser: install chromium to see the pages rendered')
    profile = tmp_path_factory.mktemp('profile')
    def run(url):
        command = [chromium, '--headless=new', '--disable-gpu', f'--user-data-dir={profile}', '--enable-logging=stderr', '--virtual-time-budget=8000', '--dump-dom']
        if not os.getuid(): command.append('--no-sandbox')
        seen = subprocess.run([*command, (site / url.partition('?')[0]).as_uri() + ''.join(url.partition('?')[1:])], capture_output=True, text=True, timeout=120)
        said = [line for line in seen.stderr.splitlines() if 'CONSOLE' in line and 'file://' in line]
        assert not said, '\n'.join(said)
        return seen.stdout
    return run


@pytest.mark.parametrize('name', ['index.html', 'nbs/01_losses.html', 'api/gains.html', 'paper_figures/quick/12_table2.html'])
def test_a_browser_shows_the_page(site, pages, browse, name):
    "Without a word on its console; formulas have a size and a place, in the font that comes along; nothing sticks out of the page"
    probe = Path(name).with_stem('probe')
    script = '''<script>document.fonts.ready.then(() => document.body.dataset.probe = JSON.stringify({
        formulas: [...document.querySelectorAll('article math')].filter(m => m.getBoundingClientRect().width > 2 && getComputedStyle(m.parentElement).float == 'none').length,
        fonts: [...document.fonts].filter(f => f.status == 'loaded').map(f => f.family), images: [...document.images].filter(i => !i.naturalWidth).map(i => i.src),
        wide: document.documentElement.scrollWidth > innerWidth}))</script>'''
    (site / probe).write_text(pages[name].html + script, encoding='utf-8')
    try: content = browse(probe.as_posix())
    finally: (site / probe).unlink()
    seen = json.loads(unescape(re.search(r'data-probe="([^"]+)"', content)[1]))
    formulas = pages[name].article.count('<math')
    assert seen['formulas'] == formulas and ('Math' in seen['fonts'] or not formulas)
    assert not seen['images'] and not seen['wide']


def test_search_finds_in_a_browser(browse): assert browse('index.html?q=calibrated').count('<li class="md-search-result__item') > 1
