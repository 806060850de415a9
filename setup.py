"Packaging facts come from settings.ini; everything else about the build is in pyproject.toml"
import shutil
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
settings = ConfigParser()
settings.read(ROOT / 'settings.ini', encoding='utf-8')
facts = settings['DEFAULT']
extras = {k.removesuffix('_requirements'): v.split() for k, v in facts.items() if k.endswith('_requirements')}
extras['report'] += extras['train']
extras['paper'] += extras['report']  # Its figures
extras['dev'] = sum(extras.values(), [])  # dev_requirements and all the other extras: the tests use the real libraries


class WithStudies(build_py):
    "Copies what `ncdo paper` needs beside the code: the studies' notebooks, settings.ini, the paper's numbers"
    def run(self):
        super().run()
        if self.editable_mode: return  # There they are found in the checkout
        names = {s.partition(':')[0] for s in settings.sections()}
        notebooks = [p for p in (ROOT / 'nbs').glob('*_*.ipynb') if p.stem.partition('_')[2] in names]
        for file in [*notebooks, ROOT / 'settings.ini', ROOT / 'paper_figures/reported.csv']:
            copy = Path(self.build_lib) / 'ncdo/studies_home' / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


setup(version=facts['version'], description=facts['description'], install_requires=facts['requirements'].split(), extras_require=extras,
    cmdclass=dict(build_py=WithStudies))
