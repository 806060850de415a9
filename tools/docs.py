"Hooks of mkdocs.yml: notebooks become pages, and the API pages come from the comments behind parameters"
import dataclasses, html, importlib, inspect, posixpath, re, textwrap
from base64 import b64decode
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote
import math_core
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from mkdocs.utils import get_relative_url
from nbdev.process import NBProcessor
from nbdev.processors import clean_magics, filter_stream_, hide_, hide_line, rm_header_dash, strip_ansi
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from ncdo.common import comments_behind

ROOT = Path(__file__).resolve().parent.parent
FONT = Path(find_spec('ziamath').origin).parent / 'fonts/STIXTwoMath-Regular.ttf' # The package is there for its font alone
GROUPS = ['Course', 'Appendices', 'Reference', 'Results', 'Studies']


# Which notebook is which page

def executed(): # As papermill left them, one folder a preset
    found = sorted(ROOT.glob('paper_figures/*/*.ipynb'), key=lambda p: (p.parent.name != 'quick', p))
    return {p.relative_to(ROOT).as_posix(): p for p in found}

def chapters(): # In order of their numbers; a study counts where it was executed
    studies = {p.name for p in executed().values()}
    return {p.relative_to(ROOT).as_posix(): p for p in sorted(ROOT.glob('nbs/[0-9]*.ipynb')) if p.name not in studies}

def group(path):
    "Where a chapter says it belongs, in italics under its title; else by its number"
    head, number = path.read_text(encoding='utf-8')[:3000], int(re.match(r'\d+', path.name)[0])
    if re.search(r'"\*(An appendix|For the curious)', head): return 'Appendices'
    if '"*Reference' in head: return 'Reference'
    return 'Course' if number < 7 or number == 20 else 'Studies' if 10 <= number < 17 else 'Results' if 17 <= number < 20 else 'Reference'

def presets(): return list(dict.fromkeys(p.parent.name for p in executed().values()))

def module_of(path):
    "The module a notebook exports to, unless it is private"
    found = re.search(r'#\| default_exp ([a-z]\w*)', path.read_text(encoding='utf-8'))
    return found and found[1]


# One notebook

def fence(text, language): return f'````{language}\n{text.rstrip()}\n````'

def shown(output, name, images):
    "What a cell gave, as Markdown"
    if output.output_type == 'stream': return fence(output.text, 'text')
    data = {k: v if isinstance(v, str) else ''.join(v) for k, v in output.get('data', {}).items()}
    if 'image/png' in data:
        file = f'{name}_{len(images)}.png'
        images[file] = b64decode(data['image/png'])
        width = output.get('metadata', {}).get('image/png', {}).get('width')
        return f'<img src="{posixpath.basename(file)}" alt=""' + (f' width="{width}">' if width else '>')
    if 'text/markdown' in data: return data['text/markdown']
    if 'text/html' in data: return re.sub(r'\n\s*\n', '\n', data['text/html'])  # At an empty line Markdown would begin again
    return fence(data['text/plain'], 'text') if 'text/plain' in data else ''

def page(path, name):
    "(Markdown, {file: bytes} of its figures) of a notebook"
    reader = NBProcessor(path, procs=[strip_ansi, hide_line, filter_stream_, hide_, rm_header_dash, clean_magics])
    reader.process()
    parts, images = [], {}
    for cell in reader.nb.cells:
        if cell.cell_type == 'markdown': parts.append(cell.source)
        if cell.cell_type != 'code': continue
        if cell.source.strip() and cell.directives_.get('echo') != 'false': parts.append(fence(cell.source, 'python'))
        for text in [shown(o, name, images) for o in cell.get('outputs', [])]:
            if text: parts.append(f'<div class="output">\n\n{text}\n\n</div>')
    if module := module_of(path): parts.insert(1, f'Module [`ncdo.{module}`](../api/{module}.md)')
    return '\n\n'.join(parts), images

def folder_page(preset):
    "What lies in paper_figures/<preset>"
    folder = ROOT / 'paper_figures' / preset
    rows = [f'- [{title(p)}]({p.name})' for p in sorted(folder.glob('*.ipynb'))]
    for stem in sorted({p.stem for p in folder.glob('*.csv')} | {p.stem for p in folder.glob('*.png')}):
        rows.append(f'- {stem}: ' + ', '.join(f'[{p.suffix[1:]}]({p.name})' for p in sorted(folder.glob(f'{stem}.*'))))
    return f'# Studies at preset *{preset}*\n\n' + '\n'.join(rows)

def title(path): return re.search(r'"# (.+?)(\\n)?"', path.read_text(encoding='utf-8'))[1]


# Markdown as notebooks and GitHub read it; mkdocs gets headings as Markdown, for its contents, and HTML for all else

formulas = math_core.LatexToMathML(fancy_error=False)

def coloured(code, language):
    try: lexer = get_lexer_by_name(language or 'text')
    except ClassNotFound: lexer = get_lexer_by_name('text')
    return highlight(code, lexer, HtmlFormatter(cssclass='highlight', wrapcode=True))

def formula(tokens, i, *_):
    latex, display = tokens[i].content.strip(), tokens[i].type != 'math_inline'
    if r'\tag' in latex: latex = rf'\begin{{equation}}{latex}\end{{equation}}'
    return formulas.convert_with_local_state(latex, displaystyle=display)

markdown = MarkdownIt('commonmark').enable('table').use(dollarmath_plugin, double_inline=True, allow_labels=False)
markdown.renderer.rules |= {k: formula for k in ('math_inline', 'math_inline_double', 'math_block')}
markdown.renderer.rules['fence'] = lambda tokens, i, *_: coloured(tokens[i].content, tokens[i].info.split(' ')[0])

def with_summary(tokens, i, *_): # What folds an answer away may hold code and formulas
    return re.sub(r'<summary>(.*?)</summary>', lambda m: f'<summary>{markdown.renderInline(m[1])}</summary>', tokens[i].content, flags=re.S)

markdown.renderer.rules['html_block'] = with_summary

def rendered(text, change): # `change` is applied to the HTML
    parts, run, folded = [], [], 0
    def flush():
        if run: parts.append('<div>\n' + change(markdown.renderer.render(run, markdown.options, {})) + '\n</div>')
        run.clear()
    tokens = iter(markdown.parse(text))
    for t in tokens:
        if t.type == 'html_block': folded += t.content.count('<details') - t.content.count('</details')
        if t.type == 'heading_open' and t.level == 0 and not folded:
            flush()
            inline = next(tokens)
            parts.append(f"{t.markup} {markdown.renderer.render([inline], markdown.options, {}).replace(chr(10), ' ')}")
            next(tokens)
        else: run.append(t)
    flush()
    return '\n\n'.join(parts)


# API pages

def prose(text):
    "A docstring or comment as Markdown: what is not code is meant as it stands"
    parts = re.split(r'(`[^`]*`)', text)
    return ''.join(p if p.startswith('`') else re.sub(r'([$|*_[])', r'\\\1', html.escape(p, quote=False)) for p in parts)

def given_to(x): # -> its parameters, but for self
    try: return [p for p in inspect.signature(x).parameters.values() if p.name != 'self']
    except (TypeError, ValueError): return []

def parameters(x): # -> [(names, text)], what it returns
    "Texts from the comments behind parameters, or a field's or an option's own text"
    rows, returns = comments_behind(x)
    own = {f.name: f.metadata.get('text') for f in dataclasses.fields(x)} if dataclasses.is_dataclass(x) else {}
    for p in given_to(x):
        for option in (p.default, *getattr(p.annotation, '__metadata__', ())): own[p.name] = own.get(p.name) or getattr(option, 'help', None)
    return rows + [(name, text) for name, text in own.items() if text], returns

class Dots:
    "A default that has no short form"
    def __repr__(self): return '…'

def signature(name, x):
    "Without annotations; an option's default, not the option; no addresses"
    def plain(p):
        default = getattr(p.default, 'default', p.default)
        return p.replace(annotation=p.empty, default=Dots() if ' at 0x' in repr(default) else default)
    line = name + str(inspect.Signature(map(plain, given_to(x))))
    return '\n'.join(textwrap.wrap(line, 88, subsequent_indent=' ' * (len(name) + 1), break_long_words=False))

def described(x, name, level, comment=''):
    "Heading, signature, docstring and parameters of a function, class or value"
    head, short = f"{'#' * level} {name}", name.rpartition('.')[2]
    if isinstance(x, property): return f"{head}\n\nProperty. {prose(x.__doc__ or parameters(x.fget)[1] or '')}"
    if not inspect.isroutine(x) and not isinstance(x, type):
        value = type(x).__name__ if '<' in repr(x) else textwrap.shorten(repr(x), 300)
        return f'{head}\n\n{prose(comment)}\n\n' + fence(f'{short} = {value}', 'python')
    given, returns = parameters(x)
    text, *sections = re.split(r'(?m)^([A-Z]\w+)\n-{3,}\n', inspect.getdoc(x) or '')
    more = [f'**{t}**\n\n{prose(textwrap.dedent(b))}' for t, b in zip(sections[::2], sections[1::2]) if t not in ('Parameters', 'Returns')]
    rows = [(', '.join(f'`{n}`' for n in names.split(', ')), t) for names, t in given] + [('returns', returns)] * bool(returns)
    table = '\n'.join(['| | |', '|---|---|', *(f"| {n} | {prose(' '.join(t.split()))} |" for n, t in rows)]) if rows else ''
    own = [] if not isinstance(x, type) else [(n, getattr(m, '__func__', m)) for n, m in vars(x).items() if not n.startswith('_')]
    methods = [described(m, f'{name}.{n}', level + 1) for n, m in own if isinstance(m, property) or inspect.isfunction(m)]
    return '\n\n'.join(filter(None, [head, fence(signature(short, x), 'python'), prose(text.strip()), table, *more, *methods]))

def module_page(name, chapter):
    module = importlib.import_module(f'ncdo.{name}')
    source = inspect.getsource(module)
    comment = lambda n: (re.search(rf'^{n} = [^\n#]*# (.+)$', source, re.M) or [None, ''])[1]
    entries = [described(getattr(module, n), n, 2, comment(n)) for n in module.__all__]
    return '\n\n'.join([f'# ncdo.{name}', prose(module.__doc__ or ''), f'Chapter [{title(chapter)}](../nbs/{chapter.name})', *entries])

def public_names(): # -> {name: module} of what `from ncdo import` gives
    import ncdo
    return {n: getattr(ncdo, n).__module__.rpartition('.')[2] for n in ncdo.__all__}

def api_page(modules):
    import ncdo
    first = lambda x: prose(' '.join((x.__doc__ or '').strip().partition('\n\n')[0].split()))
    rows = [f'| [`{n}`]({m}.md#{n.lower()}) | {first(getattr(ncdo, n))} |' for n, m in public_names().items()]
    rooms = [f"| [`ncdo.{m}`]({m}.md) | {first(importlib.import_module(f'ncdo.{m}'))} |" for m in modules]
    table = ['', '| | |', '|---|---|']
    return '\n'.join(['# API', '', 'What `from ncdo import …` gives:', *table, *rows, '', '## Modules', *table, *rooms])


# mkdocs calls these

LINK = re.compile(r'((?:href|src)=")([^"#:]+)(?=["#])')

def on_files(files, config):
    "All pages, the figures in them and the files they link to"
    notebooks = chapters() | executed()
    modules = {module_of(p): p for p in chapters().values() if module_of(p)}
    texts, wanted = {'index.md': (ROOT / 'README.md').read_text(encoding='utf-8'), 'api/index.md': api_page(modules)}, []
    add = lambda uri, **content: files.append(File.generated(config, uri, **content))
    for name, path in notebooks.items():
        texts[name[:-5] + 'md'], images = page(path, name[:-6])
        for file, data in images.items(): add(file, content=data)
    for preset in presets(): texts[f'paper_figures/{preset}/index.md'] = folder_page(preset)
    for name, path in modules.items(): texts[f'api/{name}.md'] = module_page(name, path)

    def home(target): # Where on the site is this file of the repository?
        name = posixpath.basename(target)
        if target in ('README.md', 'nbs/index.ipynb'): return 'index.md'
        if target.startswith('nbs/') and target not in notebooks: # A study: as executed
            target = next((n for n in executed() if n.endswith(f'/{name}')), target)
        if target in notebooks: return target[:-5] + 'md'
        if f'{target}/index.md' in texts: return f'{target}/index.md'
        if target not in texts and (ROOT / target).is_file(): wanted.append(target)
        return target

    def made(text, uri):
        folder = posixpath.dirname(uri)
        def to(m):
            new = home(posixpath.normpath(posixpath.join(folder, unquote(m[2]))))
            return m[1] + re.sub(r'\.md$', '.html', posixpath.relpath(new, folder or '.'))
        try: return rendered(text, lambda page: LINK.sub(to, page))
        except math_core.LatexError as e: raise PluginError(f'{uri}: {e}\nin a formula that tools/docs.py cannot set; see the math-core package') from None

    for uri in list(texts): texts[uri] = made(texts[uri], uri)
    for uri in dict.fromkeys(wanted):
        if not uri.endswith('.md'): add(uri, abs_src_path=str(ROOT / uri))
        else:
            text = (ROOT / uri).read_text(encoding='utf-8')
            texts[uri] = made(text if text.startswith('# ') else f"# {posixpath.dirname(uri)}: {Path(uri).stem}\n\n{text}", uri)
    for uri, text in texts.items(): add(uri, content=text)
    add('math.ttf', abs_src_path=str(FONT))

    nav = {g: [{f"{p.name.partition('_')[0]} {title(p)}": n[:-5] + 'md'} for n, p in chapters().items() if group(p) == g] for g in GROUPS}
    nav['Studies'] += [{p: [f'paper_figures/{p}/index.md', *(n[:-5] + 'md' for n in executed() if f'/{p}/' in n)]} for p in presets()]
    nav['API'] = [{'Overview': 'api/index.md'}, *(f'api/{m}.md' for m in modules)]
    config.nav = [{'Start': 'index.md'}, *({g: pages} for g, pages in nav.items() if pages)]
    return files

def on_page_content(text, page, config, files):
    "Public names in code lead to the API"
    known = {n: m for n, m in public_names().items() if re.search('[A-Z_]', n)}
    def name(m):
        if m[1] not in known: return m[0]
        return f'<a href="{get_relative_url(f"api/{known[m[1]]}.html", page.url)}#{m[1].lower()}"><code>{m[1]}</code></a>'
    return re.sub(r'(?<!">)<code>(\w+)</code>', name, text)
