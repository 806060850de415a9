import os, pytest, torch

os.environ.setdefault('MPLBACKEND', 'agg')
torch.set_num_threads(1)


QUICK = {'test_gains', 'test_absent_classes', 'test_losses', 'test_reductions', 'test_data', 'test_identity', 'test_contributing', 'test_repository'}


def pytest_collection_modifyitems(items):
    "The subset for the edit loop: `pytest -m quick`"
    for item in items:
        if item.path.stem in QUICK: item.add_marker('quick')


@pytest.fixture
def ncdo(capsys):
    "Run the command line in this process; gives exit status, standard output, standard error"
    from ncdo.cli import main
    def run(*args):
        status = 0
        try: main([str(a) for a in args])
        except SystemExit as e: status = e.code or 0
        out, err = capsys.readouterr()
        return status, out, err
    return run


def real_images(name):
    "The data root, if it holds a file or folder of this name; else skip"
    root = os.environ.get('NCDO_DATA')
    if not root or not os.path.exists(os.path.join(root, name)): pytest.skip(f'needs real images: set NCDO_DATA to a folder with {name}')
    return root


@pytest.fixture(scope='session')
def data_root(): return real_images('cifar10.npz')


@pytest.fixture(scope='session')
def tiny_root(): return real_images('tiny-imagenet-200')
