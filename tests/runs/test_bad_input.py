"Whatever a person can get wrong: one line that names it, exit status 2, and nothing written"
import errno, json, os, numpy as np, pytest, torch
from pathlib import Path
from PIL import Image
from safetensors.torch import load
from pictures import COUNTS, archive, divided_folder, image_folder, picture

FAST = ['--model', 'mlp-16', '--steps', 4, '--batch-size', 8]


def options(*args): return lambda here, patch: args


def folder(spoil=lambda d: None, counts=COUNTS, more=()):
    def prepare(here, patch):
        spoil(image_folder(here / 'data', counts))
        return ['--dataset', 'data', *FAST, *more]
    return prepare


def divided(spoil=lambda d: None, **parts):
    def prepare(here, patch):
        spoil(divided_folder(here / 'data', **parts))
        return ['--dataset', 'data', *FAST]
    return prepare


def npz(more=(), **changes):
    def prepare(here, patch):
        archive(here / 'data.npz', **changes)
        return ['--dataset', 'data.npz', *FAST, *more]
    return prepare


def spoilt_npz(content):
    def prepare(here, patch):
        (here / 'data.npz').write_bytes(content)
        return ['--dataset', 'data.npz', *FAST]
    return prepare


def cut(path, n=60): path.write_bytes(path.read_bytes()[:n])
def move_up(d): [f.rename(d / f'{f.parent.name}{f.name}') for f in list(d.rglob('*.png'))] and [f.rmdir() for f in list(d.iterdir()) if f.is_dir()]
def float_picture(d): Image.fromarray(np.zeros((16, 16), np.float32)).save(d / 'cat/float.tiff')
def lone_text(name, args):
    def prepare(here, patch):
        (here / name).write_text('here first')
        return args
    return prepare


def empty_folder(here, patch):
    (here / 'data').mkdir()
    return ['--dataset', 'data', *FAST]


def unreadable(here, patch):
    "A folder that says no, whoever asks"
    image_folder(here / 'data')
    scandir = os.scandir
    def refuse(path='.'):
        if Path(path).name == 'dog': raise PermissionError(errno.EACCES, 'Permission denied', str(path))
        return scandir(path)
    patch.setattr(os, 'scandir', refuse)
    return ['--dataset', 'data', *FAST]


def full_disk(name):
    "No room for the file of this name: half of it is written"
    def prepare(here, patch):
        write = Path.write_bytes
        def fill(path, content):
            if name not in path.name: return write(path, content)
            write(path, content[:len(content) // 2])
            raise OSError(errno.ENOSPC, 'No space left on device', str(path))
        patch.setattr(Path, 'write_bytes', fill)
        return ['--model', 'mlp-16', '--steps', 501 if 'checkpoint' in name else 4, '--batch-size', 8]
    return prepare


def read_only(here, patch):
    access = os.access
    patch.setattr(os, 'access', lambda p, mode, **kw: mode != os.W_OK and access(p, mode, **kw))
    return FAST


def lying_there(name, content):
    def prepare(here, patch):
        (here / 'run').mkdir()
        (here / 'run' / name).write_text(content)
        return FAST
    return prepare


def module(text, model):
    def prepare(here, patch):
        (here / 'my_nets.py').write_text('import torch\nfrom torch import nn\n' + text)
        patch.syspath_prepend(here)
        patch.setattr('sys.dont_write_bytecode', True)
        patch.delitem(__import__('sys').modules, 'my_nets', raising=False)
        return ['--model', model, '--steps', 4, '--batch-size', 8]
    return prepare


X = np.zeros((6, 8, 8, 3), np.uint8)
PLAIN = dict(train=dict(a=6, b=6), val=dict(a=3, b=3), test=dict(a=3, b=3))
CASES = { # chkstyle: ignore-node
    # Data sets that are not there, or not data sets
    'unknown name': (options('--dataset', 'nothere'), "unknown data set 'nothere'; use one of digits-lt"),
    'absolute path': (options('--dataset', '/no/such/folder'), '/no/such/folder does not exist'),
    'text file': (lone_text('data.txt', ['--dataset', 'data.txt', *FAST]), 'data.txt is neither a folder of images nor an .npz'),
    'no data root': (options('--dataset', 'cifar10-lt'), 'cifar10-lt needs a data root'),
    'data root not there': (options('--dataset', 'cifar10-lt', '--data', 'no/such/folder'), 'data root no/such/folder is not a folder'),
    # Folders
    'empty folder': (empty_folder, 'data has no sub-folders'),
    'images without folders': (folder(move_up), 'data has no sub-folders; put the images of each class into a folder of their own'),
    'one class': (folder(counts=dict(cat=9)), "has only one class, 'cat'"),
    'empty class folder': (folder(lambda d: (d / 'fox').mkdir()), 'data/fox holds no images'),
    'class folder of texts': (folder(lambda d: [(d / 'fox').mkdir(), (d / 'fox/a.txt').write_text('')]), 'data/fox holds no images'),
    'too few to split': (folder(counts=dict(cat=9, dog=2)), "class 'dog' has 2 images in"),
    'truncated image': (folder(lambda d: cut(d / 'dog/003.png')), 'data/dog/003.png cannot be read as an image'),
    'text called image': (folder(lambda d: (d / 'dog/x.jpg').write_text('dog')), 'data/dog/x.jpg is not an image that can be read; mend it or take it out'),
    'empty image': (folder(lambda d: (d / 'dog/003.png').write_text('')), 'data/dog/003.png is not an image'),
    'link to nowhere': (folder(lambda d: (d / 'dog/x.png').symlink_to(d / 'gone.png')), 'data/dog/x.png cannot be read (No such file'),
    'unreadable folder': (unreadable, 'data/dog cannot be read (Permission denied); mend its permissions'),
    '32-bit image': (folder(float_picture), 'cat/float.tiff has 32 bits a pixel'),
    'image size 0': (folder(more=['--image-size', 0]), 'image_size is 0'),
    'image size too large': (folder(more=['--image-size', 10 ** 7]), 'do not fit into memory; give a smaller image_size'),
    'image size of digits': (options('--image-size', '32'), 'image_size is for folders of images; those of digits-lt'),
    'preset of a folder': (folder(more=['--preset', 'quick']), "preset 'quick' is for digits-lt"),
    'batch larger than the folder': (folder(more=['--batch-size', 1000]), 'batch size 1000 exceeds the 26 training images'),
    'class in test only': (divided(**PLAIN | {'test': dict(a=3, b=3, c=3)}), "class 'c' is in the test part of"),
    'class not in validation': (divided(**PLAIN | {'val': dict(a=3)}), "class 'b' has 0 images in the validation part of"),
    'class once in test': (divided(train=dict(a=6, b=6), test=dict(a=3, b=1)), "class 'b' has 1 images in the test part of"),
    'val and validation': (divided(**PLAIN, validation=dict(a=3, b=3)), "holds both 'validation' and 'val'"),
    'classes beside parts': (divided(lambda d: picture(d / 'fox/1.png'), **PLAIN), "also holds 'fox'"),
    'empty part': (divided(lambda d: (d / 'test').mkdir(), train=dict(a=6, b=6)), 'data/test has no sub-folders'),
    # Archives: form, shapes, labels, priors
    'no archive': (spoilt_npz(b'hello'), 'data.npz cannot be read as an .npz'),
    'half an archive': (spoilt_npz(b'PK\x03\x04 truncated'), 'data.npz cannot be read as an .npz'),
    'pickled labels': (npz(y_test=np.array([object()] * 18)), 'Object arrays cannot be loaded'),
    'array missing': (npz(y_test=None), "has no array 'y_test'; it needs x_train"),
    'float images': (npz(x_train=np.zeros((18, 8, 8, 3))), 'x_train is float64 (18, 8, 8, 3); it must be uint8'),
    'channels first': (npz(x_train=np.zeros((18, 3, 8, 8), np.uint8)), 'must be uint8 (n, height, width, channels)'),
    'flat images': (npz(x_train=np.zeros((18, 64), np.uint8)), 'must be uint8 (n, height, width, channels)'),
    'two shapes': (npz(x_test=np.zeros((18, 9, 9, 3), np.uint8)), 'images of x_train are (8, 8, 3) and those of x_test (9, 9, 3)'),
    'labels missing': (npz(y_train=np.zeros(7, int)), 'y_train has shape (7,) for 18 images'),
    'no images': (npz(x_test=X[:0], y_test=np.zeros(0, int)), 'y_test is empty'),
    'labels with fractions': (npz(y_train=np.arange(18) / 6), 'y_train of', 'are float64; labels must be integers'),
    'negative label': (npz(y_train=np.arange(18) // 6 - 1), '6 labels, such as -1, are not among'),
    'ignore label': (npz(y_train=np.r_[np.arange(17) // 6, 255], class_names=list('abc')), '1 labels, such as 255, are not among 0..2'),
    'huge label': (npz(y_train=np.r_[np.arange(17) // 6, 10 ** 12]), '1 labels, such as 1000000000000'),
    'prior zero': (npz(y_train=np.r_[[0] * 9, [2] * 9]), "class '1' has 0 images in the train part"),
    'class only in test': (npz(y_test=np.r_[np.arange(15) // 5, [3] * 3]), "class '3' has 0 images in the train part"),
    'one class in an archive': (npz(classes=1), "has only one class, '0'"),
    'class once in the test arrays': (npz(y_test=np.r_[[0] * 9, [1] * 8, 2]), "class '2' has 1 images in the test part"),
    'image size of an archive': (npz(['--image-size', 8]), 'image_size is for folders of images'),
    # Models
    'two networks of one name': (options('--model', 'resnet50'), "use 'resnet50-w16' for CIFAR's, 'torchvision:resnet50'"),
    'odd depth': (options('--model', 'resnet9'), 'depth 9 is neither 6n+2'),
    'unknown model': (options('--model', 'vgg'), "unknown model 'vgg'; use resnet20"),
    'unknown in torchvision': (options('--model', 'torchvision:resnet20'), "unknown model 'torchvision:resnet20'"),
    'image too small for a model': (options('--model', 'alexnet'), "model 'alexnet' fails on 1x8x8 images"),
    'no such module': (options('--model', 'no_such_module:net'), "model 'no_such_module:net' cannot be imported (ModuleNotFoundError"),
    'no such factory': (module('', 'my_nets:net'), "has no attribute 'net'"),
    'broken module': (module('def net(:', 'my_nets:net'), 'cannot be imported (SyntaxError'),
    'factory without num_classes': (module('def net(): pass', 'my_nets:net'), "model 'my_nets:net' fails on 1x8x8 images of 10 classes (TypeError"),
    'factory that makes no network': (module('def net(num_classes): return 3', 'my_nets:net'), "model 'my_nets:net' fails on"),
    'scores of another shape': (module('def net(num_classes): return nn.Flatten()', 'my_nets:net'), 'gives (2, 64) for 2 images of 10 classes'),
    # Options
    'unknown loss': (options('--loss', 'focal'), "unknown loss 'focal'; use one of auto"),
    'unknown objective': (options('--objective', 'fairness'), "unknown objective 'fairness'"),
    'negative step size': (options('--step-size', '-1'), 'step_size is -1.0; give a positive number'),
    'step size 0': (options('--step-size', '0'), 'step_size is 0.0'),
    'step size nan': (options('--step-size', 'nan'), 'step_size is nan'),
    'negative rate': (options('--learning-rate', '-0.1'), 'learning_rate is -0.1'),
    'no steps': (options('--steps', '0'), 'steps is 0'),
    'no epochs': (options('--epochs', '0'), 'epochs is 0.0; give a positive number'),
    'large batch': (options('--batch-size', '100000'), 'batch size 100000 exceeds'),
    'unknown groups': (options('--groups', 'mine'), "unknown groups 'mine'"),
    'tail of 2': (options('--groups', 'head-tail', '--tail', '2'), 'tail is 2.0; give a number between 0 and 1'),
    'tau over 1': (options('--objective', 'recall', '--tau', '1.5'), 'tau is 1.5; give a number from 0 to 1'),
    'negative fraction': (options('--objective', 'balanced-coverage', '--fraction', '-1'), 'fraction is -1.0'),
    'loss that does not fit the goal': (options('--objective', 'balanced-coverage', '--loss', 'logit-adjusted'), "use 'hybrid-b'"),
    'another such': (options('--objective', 'balanced-coverage', '--loss', 'softmax-shifted'), 'not a diagonal plus equal rows'),
    'unknown preset': (options('--preset', 'large'), "unknown preset 'large'"),
    'head and tail for recall': (options('--objective', 'recall', '--groups', 'head-tail'), '--groups is for worst-case-recall and balanced-coverage, not for recall'),
    'target of another goal': (options('--tau', '.9'), '--tau is for recall, precision and recall-at-precision, not for worst-case-recall'),
    'share of another goal': (options('--objective', 'precision', '--fraction', '.9'), '--fraction is for coverage and balanced-coverage, not for precision'),
    'hardly an epoch': (options('--epochs', '1e-9'), 'epochs is 1e-09, of 269 images: not one step of 64; give at least 0.238'),
    'steps without end': (options('--steps', 10 ** 20), 'steps is 100000000000000000000, of 64 images each; give at most'),
    'seed too large': (options('--seed', 10 ** 20), 'seed is 100000000000000000000; give a whole number from 0 to 2147483647'),
    'split seed too large': (options('--split-seed', 2 ** 31), 'split_seed is 2147483648; give a whole number from 0 to 2147483647'),
    'split seed of a folder': (folder(more=['--split-seed', -1]), 'split_seed is -1; give'),
    'more worst classes than there are': (options('--objective', 'worst-k', '--worst-k', 11), 'worst_k is 11; give at most 10'),
    'seed x': (options('--seed', 'x'), "Invalid value for '--seed'"),
    'unknown option': (options('--colour', 'red'), '--colour'),
    'unknown device': (options('--device', 'tpu'), "unknown device 'tpu'"),
    'device that is not there': (options('--device', 'cpu:1'), "there is no device 'cpu:1' here"),
    'device without a number': (options('--device', 'cpu:x'), "there is no device 'cpu:x' here"),
    'no record to learn from': (options('--teacher', 'nobody'), 'nobody holds no record of a finished run'),
    # Places
    'disk full at the scores': (full_disk('scores.npz'), 'run/scores.npz cannot be written (No space left on device); make room there'),
    'disk full at the record': (full_disk('record.json'), 'run/record.json cannot be written (No space left on device)'),
    'disk full at a checkpoint': (full_disk('checkpoint'), 'run/checkpoint.safetensors cannot be written (No space left on device)'),
    'read-only place': (read_only, 'cannot be written to; choose another --out'),
    'a file in its place': (lone_text('run', FAST), 'run is a file, so run cannot be a folder'),
    'a file above its place': (lone_text('a', [*FAST, '--out', 'a/b/run']), 'a is a file, so a/b/run cannot be a folder'),
    'a broken record': (lying_there('record.json', '{'), 'is not a record (broken JSON)'),
    'no record of ours': (lying_there('record.json', '{"artist": "Prince"}'), 'is not the record of a run'),
    'an unfinished run': (lying_there('checkpoint.safetensors', 'x'), 'holds an unfinished run; add --resume')}


def everything(folder): return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob('*')}


def test_there_are_enough(): assert len(CASES) >= 40


@pytest.mark.parametrize('case', CASES)
def test_one_line_status_2_nothing_written(ncdo, tmp_path, monkeypatch, case):
    "Nothing but a whole checkpoint, if the disk fills up once training is over"
    prepare, *messages = CASES[case]
    monkeypatch.delenv('NCDO_DATA', raising=False)
    monkeypatch.chdir(tmp_path)
    args = prepare(tmp_path, monkeypatch)
    before = everything(tmp_path)
    status, out, err = ncdo('train', *(args if '--out' in args else [*args, '--out', 'run']))
    assert status == 2 and all(m in err for m in messages) and err.count('\n') == 1 and not out, err
    after = everything(tmp_path)
    if case in ('disk full at the scores', 'disk full at the record') and list(after) == ['run', 'run/checkpoint.safetensors']:
        load(after['run/checkpoint.safetensors'])
        after = {}
    assert after == before


def test_a_checkpoint_that_is_none(ncdo, tmp_path):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run/checkpoint.safetensors').write_text('x')
    status, _, err = ncdo('train', *FAST, '--out', tmp_path / 'run', '--resume')
    assert status == 2 and 'cannot be read' in err and err.count('\n') == 1 and os.listdir(tmp_path / 'run') == ['checkpoint.safetensors']


def test_a_full_disk_keeps_the_last_checkpoint(ncdo, tmp_path, monkeypatch):
    "What was saved before stays good: with room again, the run ends as it would have"
    args = ['train', '--model', 'mlp-16', '--steps', 505, '--batch-size', 8]
    with monkeypatch.context() as patch:
        full_disk('record.json')(tmp_path, patch)
        assert ncdo(*args, '--out', tmp_path / 'run')[0] == 2
    assert os.listdir(tmp_path / 'run') == ['checkpoint.safetensors']
    assert ncdo(*args, '--out', tmp_path / 'run', '--resume')[0] == 0 and ncdo(*args, '--out', tmp_path / 'other')[0] == 0
    a, b = [json.loads((tmp_path / d / 'record.json').read_text())['test'] for d in ('run', 'other')]
    assert a == b


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a CUDA device')
def test_no_cuda_device(ncdo, tmp_path):
    status, _, err = ncdo('train', *FAST, '--device', 'cuda', '--out', tmp_path / 'run')
    assert status == 2 and 'there is no CUDA device here' in err and not (tmp_path / 'run').exists()
