"Small image folders and archives to test with"
import numpy as np
from PIL import Image

COUNTS = dict(cat=20, dog=12, emu=8)


def picture(path, seed=0, size=(16, 16), mode='RGB'):
    "A picture whose brightness tells its class folder, with noise"
    path.parent.mkdir(parents=True, exist_ok=True)
    level = 40 + 70 * (ord(path.parent.name[0]) % 3)
    pixels = np.random.default_rng(seed).integers(level, level + 40, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def image_folder(path, counts=COUNTS, **kw):
    "A folder with so many pictures of each class"
    for c, n in counts.items():
        for i in range(n): picture(path / c / f'{i:03}.png', i, **kw)
    return path


def divided_folder(path, **parts):
    "A folder with train, validation and test, or whatever is asked for"
    for k, (part, counts) in enumerate(parts.items()):
        for c, n in counts.items():
            for i in range(n): picture(path / part / c / f'{i:03}.png', 1000 * k + i)
    return path


def archive(path, classes=3, per_class=6, **changes):
    "An .npz with a few images of each class; arrays that are None are left out"
    y = np.arange(classes).repeat(per_class)
    x = np.random.default_rng(0).integers(0, 255, (len(y), 8, 8, 3), dtype=np.uint8)
    arrays = dict(x_train=x, y_train=y, x_test=x, y_test=y) | changes
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return path
