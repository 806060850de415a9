"Runs that start from trained weights: what moves, what stays, what is refused"
import argparse, json, os, signal, subprocess, sys
import numpy as np, pytest, timm, torch, torchvision
from safetensors.torch import load_file, save_file
from torchvision.models.feature_extraction import create_feature_extractor
from pictures import divided_folder, image_folder, picture
from ncdo.data import load
from ncdo.gains import InputError
from ncdo.networks import build, model_source
from ncdo.predict import Classifier, export_onnx
from ncdo.pretrained import DEFAULT, Start, bare, describe, embed, head_of, misfits, weights_hash
from ncdo.runs import Spec, read_scores, recipe_spec
from ncdo.schedule import pack
from ncdo.stacks import Stack
from ncdo.training import Member, Recipe
from waiting import WITH_TESTS, steps_done

NET = 'torchvision:mobilenet_v3_small' # Has batch normalisation and dropout


def seed_net(name=NET, m=7, seed=3):
    "A network whose weights and running means are not those of any new one"
    torch.manual_seed(seed)
    net = torchvision.models.get_model(name.partition(':')[2], num_classes=m)
    for k, b in net.named_buffers():
        if b.is_floating_point(): b.uniform_(.5, 1.5)
    return net


@pytest.fixture
def here(tmp_path, monkeypatch):
    "A folder with photos and the weights of a network for 7 classes, to stand in"
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / 'pets', size=(32, 32))
    torch.save(seed_net().state_dict(), 'seven.pth')
    return tmp_path


PETS = ['train', '--dataset', 'pets']
SEVEN = ['--model', NET, '--weights', 'seven.pth', '--image-size', '32']
TRAIN = [*PETS, *SEVEN, '--batch-size', '8', '--steps', '6']
OF_NET = torchvision.models.MobileNet_V3_Small_Weights.DEFAULT.transforms()


def record(folder): return json.loads((folder / 'record.json').read_text())


def weights(folder): return load_file(f'{folder}/weights.safetensors')


def in_channels(t): return torch.tensor(t).view(-1, 1, 1)


def normalised(x): # Of 0 to 1
    "As torchvision's weights for the network want it"
    return (x - in_channels(OF_NET.mean)) / in_channels(OF_NET.std)


def same_record(a, b): return {**a, 'seconds': 0} == {**b, 'seconds': 0}


def refused(ncdo, place, *args):
    "The one line of a command that writes nothing"
    status, out, err = ncdo(*args, '--out', place)
    assert status == 2 and not out and err.count('\n') == 1 and not os.path.exists(place), err
    return err


def trained(ncdo, *more):
    "The body and the head that a run has left"
    status, _, err = ncdo(*TRAIN, *more, '--out', 'run')
    assert status == 0, err
    tensors = bare({k: v for k, v in weights('run').items() if k.startswith('net.')})
    part = lambda head: {k: v for k, v in tensors.items() if k.startswith('classifier.3') == head}
    return part(False), part(True)


def test_a_frozen_body_stays_as_it_is_to_the_bit(ncdo, here):
    "Running means and counts too; the head, for three classes instead of seven, moves"
    body, head = trained(ncdo, '--freeze')
    first = torch.load('seven.pth')
    assert body.keys() == {k for k in first if not k.startswith('classifier.3')}
    for k, v in body.items(): assert torch.equal(v, first[k]), k
    new = bare(build(NET, (3, 32, 32), 3, [0]).state_dict())
    for k, v in head.items(): assert v.shape[0] == 3 and not torch.equal(v, new[k]), k


def test_a_whole_network_moves(ncdo, here):
    body, head = trained(ncdo)
    first = torch.load('seven.pth')
    moved = {k: (v - first[k]).abs().max() for k, v in body.items()}
    far = max(d for k, d in moved.items() if k.endswith('.weight'))
    assert all(d > 0 for d in moved.values()) and far < .2
    assert record(here / 'run')['spec']['recipe']['learning_rate'] == .01


def test_a_head_of_the_same_size_is_taken_over(here):
    torch.save(seed_net(m=3).state_dict(), 'three.pth')
    for file, kept in (('three.pth', True), ('seven.pth', False)):
        net = build(NET, (3, 32, 32), 3, [0])
        Start(NET, file).enter(net, NET, (3, 32, 32), 3)
        given, net = torch.load(file), net.net
        assert torch.equal(net.classifier[3].weight, given['classifier.3.weight']) == kept
        assert torch.equal(net.features[0][0].weight, given['features.0.0.weight'])


def test_a_run_predicts_and_exports_with_the_normalisation_of_the_weights(ncdo, here):
    trained(ncdo)
    left = weights('run')
    assert torch.allclose(left['mean'], 255 * torch.tensor(OF_NET.mean))
    assert torch.allclose(left['std'], 255 * torch.tensor(OF_NET.std))
    x = load(str(here / 'pets'), image_size=32).part('test')[0].float()
    with torch.no_grad(): scores = Classifier('run')(x)
    assert torch.allclose(scores, read_scores('run')['test'], atol=1e-4)
    assert export_onnx('run')[1] < 1e-3
    status, out, err = ncdo('predict', 'run', 'pets')
    assert status == 0 and len(out.splitlines()) == 41, err


def test_the_digits_are_on_another_scale(tmp_path):
    "White is 16 there; the weights' mean and deviation are for 255"
    torch.save(seed_net().state_dict(), tmp_path / 'w.pth')
    spec = Spec(model=f'{NET}@32', weights=str(tmp_path / 'w.pth'), recipe=Recipe(steps=1))
    data = spec.data()
    member = Member(data, spec.problem(data.priors), spec.loss)
    stack = Stack([member], spec.model, spec.recipe, 'cpu', start=spec.start())
    x = stack.images.take(torch.tensor([[0]]))[0, 0] # Grey images, three means
    assert x.shape == (3, 8, 8) and torch.allclose(x, normalised(data.x[0] / 16), atol=1e-5)


def test_members_of_a_stack_start_alike(tmp_path):
    "One's own networks stack: the bodies are those of the file, the heads those of the seeds"
    spec = Spec(model='resnet8-w8', recipe=Recipe(steps=1))
    data = spec.data()
    alone = build('resnet8-w8', (1, 8, 8), 4, [9])
    save_file(alone.state_dict(), tmp_path / 'w.safetensors')
    members = [Member(data, spec.problem(data.priors), spec.loss, seed) for seed in range(3)]
    with pytest.warns(UserWarning, match='do not say how images are to be normalised'):
        frozen = Start('resnet8-w8', str(tmp_path / 'w.safetensors'), freeze=True)
    stack = Stack(members, 'resnet8-w8', spec.recipe, 'cpu', start=frozen)
    now = stack.weights.net.state_dict()
    before = {k: v.clone() for k, v in now.items()}
    seeds = build('resnet8-w8', (1, 8, 8), 10, [0, 1, 2]).state_dict()
    for k, v in before.items():
        body = torch.cat([alone.state_dict()[k]] * 3) if v.ndim else v
        assert torch.equal(v, seeds[k] if k.startswith('head') else body), k
    stack.train_step()
    for k, v in now.items(): assert torch.equal(v, before[k]) != k.startswith('head'), k
    assert stack.weights.vector.numel() == seeds['head.weight'].numel() + seeds['head.bias'].numel()


def test_the_weights_of_a_run_are_a_start(ncdo, tmp_path, monkeypatch):
    "They say their network, size and normalisation; a run of 4 classes becomes one of 3"
    monkeypatch.chdir(tmp_path)
    image_folder(tmp_path / 'pets', size=(20, 20))
    image_folder(tmp_path / 'more', dict(ant=9, bee=9, cat=9, dog=9), size=(24, 24))
    first = ['train', '--dataset', 'more', '--model', 'resnet8-w8', '--steps', 4, '--out', 'first']
    assert ncdo(*first)[0] == 0
    args = [*PETS, '--weights', 'first/weights.safetensors', '--steps', 2, '--freeze']
    status, _, err = ncdo(*args, '--out', 'second', '--ensemble', 2)
    assert status == 0, err
    first, second = weights('first'), weights('second/seed-1')
    assert all(torch.equal(second[k], v) for k, v in first.items() if 'head' not in k)
    spec = record(tmp_path / 'second/seed-1')['spec']
    assert spec['model'] == 'resnet8-w8' and spec['image_size'] == 24 and spec['freeze']
    both = 'second/weights.safetensors'
    assert 'of an ensemble' in refused(ncdo, 'third', *PETS, '--weights', both)


def with_texts(path, **changed):
    "A file as a run leaves it, with other texts beside its tensors"
    facts = dict(id='1', model='resnet8-w8', shape=[3, 8, 8], class_names=['a', 'b'])
    texts = {k: json.dumps(v) for k, v in facts.items()} | changed
    save_file({k: torch.ones(3) for k in ('mean', 'std', 'net.a')}, path, texts)


@pytest.mark.parametrize('command', [['embed', 'pets'], PETS])
def test_a_file_does_not_choose_what_is_imported(ncdo, here, command):
    "A network of one's own, named by a stranger's file, must be named by the person too"
    (here / 'ncdo_theirs.py').write_text("import os\nos.mkdir('it-has-run')")
    with_texts('theirs.safetensors', model='"ncdo_theirs:net"')
    told = refused(ncdo, 'new', *command, '--weights', 'theirs.safetensors')
    assert "are of 'ncdo_theirs:net'" in told and 'give it as --model' in told
    assert not os.path.exists('it-has-run') and 'ncdo_theirs' not in sys.modules
    assert describe('ncdo_theirs:net', 'theirs.safetensors').side == 8


@pytest.mark.parametrize('text', [dict(model='{no'), dict(model='5'), dict(shape='5'),
    dict(shape='[3, 8]'), dict(shape='[Infinity, 8, 8]'), dict(shape='["a", 8, 8]'), dict(shape='')])
def test_texts_that_say_nothing_of_a_network(ncdo, here, text):
    with_texts('texts.safetensors', **text)
    told = refused(ncdo, 'new', 'embed', 'pets', '--weights', 'texts.safetensors')
    assert 'do not say rightly what they are of' in told


def test_small_images_of_a_fixed_size_are_enlarged(ncdo, tmp_path):
    "To what the weights have seen, unless the model's name says otherwise"
    from ncdo.cli import _as_seen
    torch.save(seed_net('torchvision:squeezenet1_1').state_dict(), path := str(tmp_path / 'w.pth'))
    spec = recipe_spec('quick', 'digits-lt', model='squeezenet1_1', weights=path)
    assert _as_seen(spec, spec.data()) == 'squeezenet1_1@224'
    args = ['--model', 'squeezenet1_1@32', '--weights', path, '--steps', 1, '--batch-size', 2]
    status, _, err = ncdo('train', *args, '--out', tmp_path / 'run')
    assert status == 0 and record(tmp_path / 'run')['spec']['model'] == 'squeezenet1_1@32', err


KILLED = '''
import sys, torch
torch.set_num_threads(1)
from ncdo.cli import main
from waiting import die_at
die_at('step', 12)
main(sys.argv[1:])
'''


@pytest.mark.parametrize('freeze', [[], ['--freeze']])
def test_killed_and_resumed(ncdo, here, freeze):
    "By SIGKILL at step 11, a checkpoint after every second: the same record and weights as without"
    args = [*TRAIN[:-1], '40', *freeze]
    command = [sys.executable, '-c', KILLED, *args, '--out', 'a']
    done = subprocess.run(command, env=WITH_TESTS, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert steps_done(here / 'a/checkpoint.safetensors') == 10
    for more in (['--out', 'a', '--resume'], ['--out', 'b']):
        status, _, err = ncdo(*args, *more)
        assert status == 0, err
    assert same_record(*[record(here / d) for d in 'ab'])
    a, b = map(weights, 'ab')
    assert all(torch.equal(v, b[k]) for k, v in a.items())


def test_weights_count_by_their_content(here):
    "Not by their path; and a run without weights has the id that it always had"
    make = lambda **more: Spec(model=NET, recipe=Recipe(steps=1), **more)
    ids = [make(weights='seven.pth').id]
    os.rename('seven.pth', 'moved.pth')
    ids.append(make(weights='moved.pth').id)
    ids.append(make(weights='moved.pth', freeze=True).id)
    torch.save(seed_net(seed=4).state_dict(), 'moved.pth')
    ids += [make(weights='moved.pth').id, make(weights=DEFAULT).id, make().id]
    assert ids[0] == ids[1] and len(set(ids)) == 5
    assert weights_hash(NET, DEFAULT) == 'MobileNet_V3_Small_Weights.IMAGENET1K_V1'
    assert len(pack([make(seed=s) for s in range(2)] + [make(weights=DEFAULT)])) == 3


def test_other_content_under_the_same_path_is_another_run(ncdo, here):
    trained(ncdo)
    assert 'holds this run already' in ncdo(*TRAIN, '--out', 'run')[2]
    torch.save(seed_net(seed=4).state_dict(), 'seven.pth')
    assert 'as its weights to start from were then' in ncdo(*TRAIN, '--out', 'run')[2]


class Trojan:
    def __reduce__(self): return os.mkdir, ('it-has-run',)


def wrong_files():
    "Files to refuse, by name"
    state = seed_net().state_dict()
    torch.save(dict(state, more=Trojan()), 'code.pth')
    torch.save(seed_net('torchvision:shufflenet_v2_x0_5').state_dict(), 'other.pth')
    torch.save(dict(state, **{'features.0.0.weight': torch.zeros(8, 3, 3, 3)}), 'narrow.pth')
    torch.save([1, 2], 'list.pth')
    torch.save({0: torch.zeros(2)}, 'numbered.pth')
    torch.save(dict(state, loss=np.float64(1)), 'numpy.pth')
    torch.save(dict(state, args=argparse.Namespace(a=1)), 'options.pth')
    with open('seven.pth', 'rb') as f: half = f.read()[:9999]
    for name in ('half.pth', 'half.safetensors'):
        with open(name, 'wb') as f: f.write(half)
    with open('weights.txt', 'w') as f: f.write('1')
    with open('text.pt', 'w') as f: f.write('no weights')


WRONG = {'code.pth': 'may run code', 'list.pth': 'hold no tensors', 'text.pt': 'damaged',
    'other.pth': "are not those of 'torchvision:mobilenet_v3_small': they lack features.0",
    'narrow.pth': 'other shapes of features.0.0.weight (8x3x3x3, not 16x3x3x3)'}
WRONG |= dict.fromkeys(['numpy.pth', 'options.pth'], 'hold more than tensors')
WRONG |= {'numbered.pth': 'hold no tensors by name'}
WRONG |= {'half.pth': 'cannot be read', 'half.safetensors': 'cannot be read',
    'weights.txt': "end in '.txt'", 'gone.pth': 'are no file', '/nowhere/gone.pth': 'are no file'}


@pytest.mark.parametrize('command', ['train', 'embed'])
def test_wrong_files_are_told_in_one_line(ncdo, here, command):
    wrong_files()
    args = dict(train=TRAIN, embed=['embed', 'pets', *SEVEN])[command]
    for name, told in WRONG.items():
        changed = [name if a == 'seven.pth' else a for a in args]
        assert told in refused(ncdo, 'new', *changed), name
    assert not os.path.exists('it-has-run')


@pytest.mark.parametrize('args,told', [
    (['--model', 'timm:resnet11'], "unknown timm model 'resnet11'; perhaps resnet"),
    (['--model', 'timm:resnet10t.nobody'], 'nobody'),
    (['--model', 'torchvision:resnet11'], "unknown model 'torchvision:resnet11'"),
    (['--model', 'resnet20', '--weights', DEFAULT], 'has no DEFAULT weights'),
    (['--freeze'], 'give --weights too'),
    (['--weights', 'seven.pth'], 'give its name as --model')])
def test_what_cannot_be(ncdo, here, args, told): assert told in refused(ncdo, 'new', *PETS, *args)


@pytest.mark.parametrize('library', ['timm', 'torchvision'])
def test_a_library_that_is_missing(ncdo, here, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    told = refused(ncdo, 'new', *PETS, '--model', f'{library}:resnet18', '--weights', DEFAULT)
    extra = dict(timm='timm', torchvision='train')[library]
    assert told == f"ncdo: {library} is not installed; pip install 'ncdo[{extra}]'\n"


OF_TORCHVISION = 'torchvision.models._api.load_state_dict_from_url' # What fetches, by name
OF_TIMM = 'timm.models._builder.load_state_dict_from_hf'


@pytest.mark.parametrize('model', [NET, 'timm:test_vit'])
def test_no_network_to_fetch_the_default_by(ncdo, here, monkeypatch, model):
    def offline(*args, **more): raise OSError('there is\nno network')
    for fetch in (OF_TORCHVISION, OF_TIMM): monkeypatch.setattr(fetch, offline)
    args = ['--model', model, '--weights', DEFAULT, '--image-size', 32]
    told = f"DEFAULT weights of '{model}' cannot be fetched (OSError: there is no network)"
    assert told in refused(ncdo, 'new', *PETS, *args)


@pytest.mark.parametrize('model,fetched', [(NET, OF_TORCHVISION), ('timm:test_resnet', OF_TIMM)])
def test_the_default_of_a_hub(here, monkeypatch, model, fetched):
    "What is fetched, without code in it, is what the network starts from"
    asked, name = [], model.partition(':')[2]
    def fetch(*args, **more):
        asked.append(more['weights_only'])
        torch.manual_seed(5)
        make = timm.create_model if 'timm' in model else torchvision.models.get_model
        return make(name).state_dict()
    monkeypatch.setattr(fetched, fetch)
    start = Start(model, DEFAULT)
    net = build(model, (3, 64, 64), 4, [0])
    start.enter(net, model, (3, 64, 64), 4)
    own, theirs = bare(net.state_dict()), fetch(weights_only=True)
    head = head_of(net, model, (3, 64, 64), 4)
    assert asked[0] is True and len(head) == 2
    assert all(torch.equal(own[k], v) for k, v in theirs.items() if k not in head)


@pytest.mark.parametrize('model', ['timm:test_resnet', 'timm:test_vit', 'timm:test_efficientnet'])
def test_networks_of_timm(ncdo, here, model):
    "Trained from a safetensors file, told its normalisation, run again, and its features embedded"
    net = timm.create_model(model.partition(':')[2], num_classes=7)
    save_file(net.state_dict(), 'timm.safetensors')
    args = ['--model', model, '--weights', 'timm.safetensors']
    how = ['--batch-size', 8, '--steps', 2, '--freeze', '--out', 'run']
    status, _, err = ncdo(*PETS, *args, *how)
    assert status == 0, err
    side, cfg = record(here / 'run')['spec']['image_size'], net.pretrained_cfg
    assert side == cfg['input_size'][1]
    assert torch.allclose(weights('run')['mean'], 255 * torch.tensor(cfg['mean']))
    assert ncdo('predict', 'run', 'pets/cat')[0] == 0
    X = embed(here / 'pets', None, 'run/weights.safetensors')['X']
    net.reset_classifier(0)
    x = load(str(here / 'pets'), image_size=side).x[:1] / 255
    x = (x - in_channels(cfg['mean'])) / in_channels(cfg['std'])
    with torch.no_grad(): assert torch.allclose(net.eval()(x)[0], torch.from_numpy(X[0]), atol=1e-4)


def test_features_are_what_the_head_sees(ncdo, here):
    "By torchvision's own extractor; labels from the folders, and none without"
    status, out, err = ncdo('embed', 'pets', *SEVEN, '--out', 'z.npz')
    assert status == 0 and out == 'features: z.npz (40 images, 1024 numbers each)\n', err
    with np.load('z.npz') as z: found = dict(z)
    assert found['X'].dtype == np.float32
    assert found['y'].tolist() == ['cat'] * 20 + ['dog'] * 12 + ['emu'] * 8
    assert found['class_names'].tolist() == ['cat', 'dog', 'emu']
    assert found['files'][[0, 39]].tolist() == ['cat/000.png', 'emu/007.png']
    x, features = load(str(here / 'pets'), image_size=32).x[[0, 20]] / 255, 'classifier.2'
    extract = create_feature_extractor(seed_net().eval(), [features])
    with torch.no_grad(): expected = extract(normalised(x))[features]
    assert np.allclose(found['X'][[0, 20]], expected, atol=1e-4)
    flat = embed('pets/dog', NET, 'seven.pth', 32)
    assert sorted(flat) == ['X', 'files'] and np.allclose(flat['X'], found['X'][20:32], atol=1e-5)


def test_a_convolution_as_head_is_averaged(here):
    torch.save((net := seed_net('torchvision:squeezenet1_1')).state_dict(), 'w.pth')
    X = embed('pets/dog', 'torchvision:squeezenet1_1', 'w.pth', 32)['X']
    assert X.shape == (12, 512) and (X >= 0).all()


def test_folders_that_cannot_be_embedded(ncdo, here):
    divided_folder(here / 'parts', train=dict(cat=2, dog=2), test=dict(cat=2, dog=2))
    (here / 'empty').mkdir()
    wrong = dict(parts='embed one after the other', empty='holds no images', nowhere='is no folder')
    for f, told in wrong.items(): assert told in refused(ncdo, 'new.npz', 'embed', f, *SEVEN)
    picture(here / 'pets/stray.png')
    with pytest.warns(UserWarning, match='1 files of .*pets are in no class .* stray.png for one'):
        assert len(embed(here / 'pets', NET, 'seven.pth', 32)['X']) == 40


@pytest.mark.parametrize('wrap', [
    lambda s: dict(state_dict=s, epoch=3),
    lambda s: {f'module.{k}': v for k, v in s.items()},
    lambda s: dict(model={f'model.{k}': v.half() for k, v in s.items()}),
    lambda s: {k: v for k, v in s.items() if not k.startswith('classifier.3')}])
def test_checkpoints_of_others(here, wrap):
    "Nested, from several processes, in half precision, or without a head"
    torch.save(wrap(seed_net().state_dict()), 'wrapped.pt')
    net = build(NET, (3, 32, 32), 3, [0])
    Start(NET, 'wrapped.pt').enter(net, NET, (3, 32, 32), 3)
    a, b = [n.classifier[0].weight for n in (net.net, seed_net())]
    assert torch.allclose(a, b, atol=1e-3)


def test_the_head_is_what_the_number_of_classes_decides():
    heads = {'torchvision:vit_b_32': 'heads.head', 'squeezenet1_0': 'classifier.1'}
    heads |= dict.fromkeys(['mlp-16', 'resnet8-w8@64', 'timm:test_vit'], 'head')
    for model, head in heads.items():
        found = head_of(build(model, (3, 32, 32), 3, [0]), model, (3, 32, 32), 3)
        assert found == [f'{head}.weight', f'{head}.bias'], model


def test_auxiliary_classifiers_are_left_out(tmp_path):
    "And pixels go from -1 to 1, as torchvision's transform_input would have it"
    torch.manual_seed(0)
    how = dict(aux_logits=True, init_weights=False, num_classes=3, transform_input=True)
    theirs = torchvision.models.googlenet(**how).eval()
    torch.save(theirs.state_dict(), tmp_path / 'w.pth')
    start = Start('googlenet', str(tmp_path / 'w.pth'))
    net = build('googlenet', (3, 64, 64), 3, [0])
    start.enter(net, 'googlenet', (3, 64, 64), 3)
    x = torch.rand(2, 3, 64, 64)
    ours = (255 * x - start.mean.view(-1, 1, 1)) / start.std.view(-1, 1, 1)
    with torch.no_grad(): a, b = net.eval()(ours[None])[0], theirs(normalised(x))
    assert torch.allclose(a, b, atol=1e-4)


def test_descriptions():
    "A file that has the name of one of torchvision's is that one"
    side = lambda name: describe(name, DEFAULT).side
    assert side('torchvision:resnet50') == 224 and side('torchvision:inception_v3') == 299
    assert describe('timm:test_vit', DEFAULT).shape == (3, 160, 160)
    wrong = misfits(dict(a=(1,), c=()), dict(a=(2,), b=(1,)), ['b'])
    assert wrong == 'also have c; they have other shapes of a (1, not 2)'


def test_a_described_file(tmp_path):
    sides = {'regnet_y_16gf_swag-43afe44d.pth': 384, 'regnet_y_16gf_lc_swag-f3ec0043.pth': 224}
    for name, side in (sides | {'mine.pth': 224}).items():
        (tmp_path / name).touch()
        assert describe('torchvision:regnet_y_16gf', str(tmp_path / name)).side == side


def test_timm_is_told_by_its_name():
    assert model_source('timm:resnet18.a1_in1k@64') == 'timm'
    shape = 3, 160, 160
    with pytest.raises(InputError, match='trains alone'): build('timm:test_vit', shape, 3, [0, 1])


OWN = """
from torch import nn
def body(): return nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
def small(num_classes): return nn.Sequential(*body(), nn.Linear(4, num_classes))
def headless(num_classes): return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(num_classes))
"""


def test_a_network_of_ones_own(ncdo, here):
    "Its weights say nothing of images: the training sample does, with a warning"
    (here / 'ncdo_start_net.py').write_text(OWN)
    model = 'ncdo_start_net:small'
    alone = build(model, (3, 32, 32), 9, [7])
    save_file(alone.net.state_dict(), 'own.safetensors')
    args = ['--model', model, '--weights', 'own.safetensors']
    with pytest.warns(UserWarning, match='do not say how images are to be normalised'):
        assert ncdo(*PETS, *args, '--steps', 3, '--freeze', '--out', 'run')[0] == 0
    left, data = weights('run'), load(str(here / 'pets'))
    assert torch.allclose(left['mean'], data.part('train')[0].float().mean((0, 2, 3)))
    same = {k: torch.equal(left[f'net.net.{k}'], v) for k, v in alone.net[:4].state_dict().items()}
    assert len(same) == 7 and all(same.values())
    with pytest.warns(UserWarning): told = refused(ncdo, 'new', 'embed', 'pets', *args)
    assert 'do not say how images are to be normalised' in told
    args = ['--model', 'ncdo_start_net:headless', '--weights', 'own.safetensors']
    with pytest.warns(UserWarning): told = refused(ncdo, 'new', *PETS, *args, '--steps', 3)
    assert 'has no head' in told
