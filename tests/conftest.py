import os, pytest, torch

os.environ.setdefault('MPLBACKEND', 'agg')
torch.set_num_threads(1)


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


@pytest.fixture(scope='session')
def data_root():
    "Folder with cifar10.npz, or skip"
    root = os.environ.get('NCDO_DATA')
    if not root or not os.path.exists(os.path.join(root, 'cifar10.npz')): pytest.skip('needs real images: set NCDO_DATA to a folder with cifar10.npz')
    return root


@pytest.fixture(scope='session')
def tiny_root():
    "Folder with tiny-imagenet-200, or skip"
    root = os.environ.get('NCDO_DATA')
    if not root or not os.path.isdir(os.path.join(root, 'tiny-imagenet-200')): pytest.skip('needs real images: set NCDO_DATA to a folder with tiny-imagenet-200')
    return root
