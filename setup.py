"Packaging facts come from settings.ini; everything else about the build is in pyproject.toml"
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup

settings = ConfigParser()
settings.read(Path(__file__).with_name('settings.ini'), encoding='utf-8')
facts = settings['DEFAULT']
setup(version=facts['version'], description=facts['description'], install_requires=facts['requirements'].split(),
    extras_require=dict(paper=facts['paper_requirements'].split(), onnx=facts['onnx_requirements'].split(),
        dev=(facts['paper_requirements'] + facts['onnx_requirements'] + facts['dev_requirements']).split()))
