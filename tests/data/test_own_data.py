"A person's own images and networks, from the folder to the record"
import dataclasses, hashlib, json, numpy as np, pytest, torch
from PIL import Image
from pictures import COUNTS, archive, divided_folder, image_folder, picture
from ncdo.data import load
from ncdo.runs import FIRST_FIELDS, Spec, own_recipe, recipe_spec
from ncdo.schedule import compute, pack
from ncdo.gains import InputError
from ncdo.networks import TWICE, build, model_source
from ncdo.training import Recipe


def record(folder): return json.loads((folder / 'record.json').read_text())


@pytest.mark.parametrize('model,steps', [('resnet8-w8', 12), ('resnet18', 3)])
def test_a_folder_trains(ncdo, tmp_path, model, steps):
    "Class names, counts and hash in the record, names in the summary"
    image_folder(tmp_path / 'pets', size=(32, 32))
    status, out, err = ncdo('train', '--dataset', tmp_path / 'pets', '--model', model, '--steps', steps, '--batch-size', 8, '--out', tmp_path / 'run')
    assert status == 0 and not err, err
    assert all(f'{c:>12}' in out for c in COUNTS)
    r, data = record(tmp_path / 'run'), load(str(tmp_path / 'pets'))
    assert r['class_names'] == list(COUNTS) and r['class_counts'] == [12, 8, 6] and r['split_hash'] == data.split_hash
    assert r['spec']['dataset'] == str(tmp_path / 'pets') and r['spec']['model'] == model and r['spec']['objective'] == 'worst-case-recall'
    assert [sum(row) for row in r['test']['confusion']] == [4, 2, 1] and len(r['history']) == steps


def test_something_is_learnt(ncdo, tmp_path):
    "The pictures' brightness tells the class, and a few steps find out"
    image_folder(tmp_path / 'pets')
    ncdo('train', '--dataset', tmp_path / 'pets', '--model', 'resnet8-w8', '--steps', 60, '--batch-size', 16, '--out', tmp_path / 'run')
    assert record(tmp_path / 'run')['test']['min_recall'] == 1


def test_relative_path_and_slash_are_the_same_run(ncdo, tmp_path, monkeypatch):
    image_folder(tmp_path / 'pets')
    monkeypatch.chdir(tmp_path)
    ids = set()
    for i, name in enumerate(['pets', './pets/', tmp_path / 'pets']):
        assert ncdo('train', '--dataset', name, '--model', 'mlp-16', '--steps', 2, '--out', f'run{i}')[0] == 0
        ids.add(record(tmp_path / f'run{i}')['id'])
    assert len(ids) == 1


def test_epochs_image_size_and_split_seed(ncdo, tmp_path):
    image_folder(tmp_path / 'pets', size=(24, 20))
    status, _, err = ncdo('train', '--dataset', tmp_path / 'pets', '--model', 'mlp-16', '--epochs', 2, '--batch-size', 13, '--image-size', 12, '--split-seed', 5,
        '--augment', 'none', '--out', tmp_path / 'run')
    assert status == 0, err
    spec = record(tmp_path / 'run')['spec']
    assert spec['recipe']['steps'] == 4 and spec['image_size'] == 12 and spec['split_seed'] == 5 and not spec['recipe']['augment']
    assert record(tmp_path / 'run')['split_hash'] == load(str(tmp_path / 'pets'), split_seed=5, image_size=12).split_hash


def test_resumed_equals_uninterrupted(ncdo, tmp_path):
    image_folder(tmp_path / 'pets')
    args = ['train', '--dataset', tmp_path / 'pets', '--model', 'mlp-16', '--batch-size', 8, '--steps', 520]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('ncdo.schedule.make_record', lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        assert ncdo(*args, '--out', tmp_path / 'a')[0] == 130
    assert [p.name for p in (tmp_path / 'a').iterdir()] == ['checkpoint.safetensors']
    assert 'add --resume' in ncdo(*args, '--out', tmp_path / 'a')[2]
    assert ncdo(*args, '--out', tmp_path / 'a', '--resume')[0] == 0 and ncdo(*args, '--out', tmp_path / 'b')[0] == 0
    a, b = record(tmp_path / 'a'), record(tmp_path / 'b')
    assert a['test'] == b['test'] and a['history'] == b['history']


def test_a_network_that_trains_alone_resumes(tmp_path):
    from ncdo.gains import worst_case_recall
    from ncdo.stacks import Stack, fit
    from ncdo.training import Member
    data, recipe = load(str(image_folder(tmp_path / 'pets'))), Recipe(steps=4, batch_size=8, update_every=2)
    start = lambda: Stack([Member(data, worst_case_recall(data.priors), 'logit-adjusted')], 'resnet18', recipe, 'cpu')
    whole, = fit(start())
    half = start()
    for _ in range(2): half.train_step()
    half.save(tmp_path / 'half.safetensors', 'name')
    resumed, = fit(start(), checkpoint=tmp_path / 'half.safetensors', name='name')
    assert torch.equal(whole.test, resumed.test) and whole.history == resumed.history


@pytest.mark.parametrize('change', ['repaint', 'add', 'remove'])
def test_a_folder_that_changed_is_another(ncdo, tmp_path, change):
    "Neither a record nor a checkpoint is taken for one of other images"
    pets = image_folder(tmp_path / 'pets')
    args = ['train', '--dataset', pets, '--model', 'mlp-16', '--batch-size', 8]
    assert ncdo(*args, '--steps', 3, '--out', tmp_path / 'done')[0] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('ncdo.schedule.make_record', lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        ncdo(*args, '--steps', 500, '--out', tmp_path / 'begun')
    if change == 'repaint': [picture(p, 99) for p in sorted((pets / 'cat').iterdir())]
    elif change == 'add': [picture(pets / 'cat' / f'more{i}.png', 200 + i) for i in range(5)]
    else: [p.unlink() for p in sorted((pets / 'cat').iterdir())[:5]]
    before = (tmp_path / 'done/record.json').read_bytes()
    status, _, err = ncdo(*args, '--steps', 3, '--out', tmp_path / 'done')
    assert status == 2 and 'holds a run on other images' in err and err.count('\n') == 1 and (tmp_path / 'done/record.json').read_bytes() == before
    status, _, err = ncdo(*args, '--steps', 500, '--out', tmp_path / 'begun', '--resume')
    assert status == 2 and 'of another run' in err and 'on images' in err and err.count('\n') == 1


def test_many_runs_on_a_folder(tmp_path):
    "compute finds its records again, and refuses them when the folder has changed; networks that train alone are not stacked"
    pets = str(image_folder(tmp_path / 'pets'))
    tiny = Recipe(steps=2, batch_size=8, update_every=2)
    specs = [Spec(pets, m, 'worst-case-recall', 'auto', seed=s, recipe=tiny) for m in ('mlp-16', 'mobilenet_v3_small') for s in (0, 1)]
    assert sorted(map(len, pack(specs))) == [1, 1, 2]
    first = compute(specs, tmp_path / 'runs', workers=1, quiet=True)
    assert compute(specs, tmp_path / 'runs', workers=1, quiet=True) == first
    picture(tmp_path / 'pets/cat/000.png', 77)
    with pytest.raises(InputError, match='holds a run on other images'): compute(specs, tmp_path / 'runs', workers=1, quiet=True)


def test_given_splits_are_respected(ncdo, tmp_path):
    parts = dict(train=dict(a=6, b=5), val=dict(a=3, b=2), test=dict(a=2, b=4))
    data = load(str(divided_folder(tmp_path / 'd', **parts)))
    for part, counts in zip(('train', 'validation', 'test'), parts.values()): assert data.part(part)[1].bincount().tolist() == list(counts.values())
    assert data.split_hash == load(str(tmp_path / 'd'), split_seed=9).split_hash
    for part, folder in dict(train='train', validation='val', test='test').items():
        shown = sorted(x.numpy().tobytes() for x in data.part(part)[0])
        assert shown == sorted(np.asarray(Image.open(p)).transpose(2, 0, 1).tobytes() for p in (tmp_path / 'd' / folder).rglob('*.png'))
    status, out, err = ncdo('train', '--dataset', tmp_path / 'd', '--model', 'mlp-16', '--steps', 3, '--batch-size', 4, '--out', tmp_path / 'run')
    assert status == 0 and record(tmp_path / 'run')['class_counts'] == [6, 5], err


def test_an_archive_trains(ncdo, tmp_path):
    archive(tmp_path / 'mine.npz', class_names=['x', 'y', 'z'])
    status, out, err = ncdo('train', '--dataset', tmp_path / 'mine.npz', '--model', 'resnet8-w8', '--steps', 4, '--batch-size', 8, '--out', tmp_path / 'run')
    assert status == 0 and record(tmp_path / 'run')['class_names'] == ['x', 'y', 'z'] and record(tmp_path / 'run')['class_counts'] == [6] * 3, err


def test_a_student_on_own_images(ncdo, tmp_path):
    image_folder(tmp_path / 'pets')
    args = ['train', '--dataset', tmp_path / 'pets', '--model', 'mlp-16', '--steps', 3, '--batch-size', 8]
    assert ncdo(*args, '--split-seed', 3, '--out', tmp_path / 'teacher')[0] == 0
    status, _, err = ncdo(*args, '--teacher', tmp_path / 'teacher', '--loss', 'hybrid-distilled', '--out', tmp_path / 'student')
    assert status == 0 and record(tmp_path / 'student')['split_hash'] == record(tmp_path / 'teacher')['split_hash'], err


NET = '''
import torch
from torch import nn
def small(num_classes): return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.LazyLinear(num_classes))
'''


def test_a_network_of_ones_own(ncdo, tmp_path, monkeypatch):
    "By import path, from the current folder; its weights come from the seed"
    image_folder(tmp_path / 'pets')
    (tmp_path / 'ncdo_own_net.py').write_text(NET)
    monkeypatch.chdir(tmp_path)
    for seed in (0, 0, 1):
        status, _, err = ncdo('train', '--dataset', 'pets', '--model', 'ncdo_own_net:small', '--steps', 4, '--seed', seed, '--out', f'run{seed}')
        assert status == 0, err
    assert record(tmp_path / 'run0')['spec']['model'] == 'ncdo_own_net:small'
    a, b, c = [build('ncdo_own_net:small', (3, 16, 16), 3, [s]).state_dict()['net.2.weight'] for s in (0, 0, 1)]
    assert torch.equal(a, b) and not torch.equal(a, c)
    with pytest.raises(InputError, match='trains alone'): build('ncdo_own_net:small', (3, 16, 16), 3, [0, 1])


def test_names_that_two_networks_have():
    from torchvision import models
    both = {m for m in models.list_models(module=models) if m.removeprefix('resnet').isdigit() and int(m[6:]) % 6 == 2}
    assert both == set(TWICE)
    for m in both:
        with pytest.raises(InputError, match='two networks'): model_source(m)
        assert model_source(f'{m}-w16') == 'ncdo' and model_source(f'torchvision:{m}') == 'torchvision'


@pytest.mark.parametrize('name,side', [('torchvision:resnet18', 32), ('torchvision:resnet50', 32), ('mobilenet_v3_small@32', 16), ('vit_b_32', 64), ('googlenet', 32), ('squeezenet1_1', 32)])
@pytest.mark.parametrize('channels', [1, 3])
def test_torchvision_networks(name, side, channels):
    net = build(name, (channels, side, side), 4, [0]).eval()
    x = torch.rand(1, 2, channels, side, side)
    assert net(x).shape == (1, 2, 4) and net(x.expand(-1, -1, 3, -1, -1)).equal(net(x))
    assert any(p.requires_grad for p in net.parameters())


def test_the_random_state_is_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    build('torchvision:resnet18', (3, 32, 32), 4, [0])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize('side,model,augment', [(8, 'resnet8-w8', False), (28, 'resnet20', False), (32, 'resnet20', True), (64, 'resnet18', True)])
def test_the_images_decide_the_recipe(tmp_path, side, model, augment):
    data = load(str(image_folder(tmp_path / 'pets', size=(side, side))))
    chosen = recipe_spec(None, str(tmp_path / 'pets'), 'worst-case-recall', 'auto', own=data)
    assert chosen.model == model and chosen.recipe.augment is augment and chosen.recipe.batch_size == 26
    assert 8 <= chosen.step_size * chosen.recipe.steps / chosen.recipe.update_every <= 10 and own_recipe(data)['recipe'] == chosen.recipe


def test_image_size_counts_where_it_is_set():
    "So records made before there was such a field keep their ids"
    fields = dataclasses.asdict(Spec())
    first = {k: v for k, v in fields.items() if k in FIRST_FIELDS}
    first['recipe'] = {k: v for k, v in fields['recipe'].items() if k in FIRST_FIELDS}
    of_first = hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:12]
    assert Spec().id == of_first == 'bf616d24bf88' != Spec(image_size=32).id
