"Packaging facts come from settings.ini; everything else about the build is in pyproject.toml"
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup

settings = ConfigParser()
settings.read(Path(__file__).with_name('settings.ini'), encoding='utf-8')
facts = settings['DEFAULT']
extras = {k.removesuffix('_requirements'): v.split() for k, v in facts.items() if k.endswith('_requirements')}
extras['dev'] = sum(extras.values(), [])  # dev_requirements and all the other extras: the tests use the real libraries
setup(version=facts['version'], description=facts['description'], install_requires=facts['requirements'].split(), extras_require=extras)
