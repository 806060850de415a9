"Ensembles: records made of records, from the command line to a served file, and students of them"
import dataclasses, json, numpy as np, pytest, torch
from pictures import COUNTS, image_folder
from safetensors.torch import save_file
from ncdo.data import load
from ncdo.distillation import ensemble_scores
from ncdo.gains import InputError, confusion_matrix
from ncdo.predict import Classifier
from ncdo.runs import Ensemble, Spec, counted, ensemble_run, read_record, read_scores
from ncdo.schedule import compute, ensemble_in, run_stack, with_views
from ncdo.stacks import Stack
from ncdo.training import Recipe, draw_views

RECIPE = Recipe(steps=12, batch_size=32, update_every=3)
TRAIN = ['train', '--model', 'mlp-16', '--steps', 12, '--batch-size', 32]

def spec(seed, **how):
    return Spec(model='mlp-16', objective='worst-case-recall', loss='logit-adjusted', step_size=.3, seed=seed, recipe=RECIPE, **how)

def mixing(seed, **how): return dataclasses.replace(spec(seed), recipe=dataclasses.replace(RECIPE, mixup=.5), **how)

def members(n=3, **how): return Ensemble(tuple(spec(s, **how) for s in range(n)))


def test_scores_of_an_ensemble_are_logs_of_mean_probabilities():
    scores = torch.randn(4, 50, 7, dtype=torch.float64) * 30
    by_hand = sum(s.softmax(-1) for s in scores) / 4
    assert torch.allclose(ensemble_scores(scores).exp(), by_hand) and torch.allclose(ensemble_scores(scores[:1]), scores[0].log_softmax(-1))
    far = torch.tensor([[[0., -5000, -9000]], [[-9000., 0, -9000]]])
    assert torch.allclose(ensemble_scores(far).exp(), torch.tensor([[.5, .5, 0]])) and ensemble_scores(far).isfinite().all()


def test_the_record_is_what_a_loop_over_the_members_gives(tmp_path):
    both = members()
    records = compute([*both.members, both], tmp_path, workers=1, device='cpu', quiet=True)
    record, z = records[both], [read_scores(tmp_path / s.id) for s in both.members]
    assert record['id'] == both.id and record['members'] == [s.id for s in both.members] and len(both.id) == 12
    for part in ('validation', 'test'):
        p = sum(s[part].double().softmax(-1) for s in z) / 3
        C = confusion_matrix(z[0][f'y_{part}'], p.argmax(-1), 10) * len(p)
        assert record[part]['confusion'] == C.round().int().tolist()
        assert torch.allclose(read_scores(tmp_path / both.id)[part].double().softmax(-1), p, atol=1e-6)
    assert record['test']['min_recall'] == min(record['test']['recall']) and record['spec']['seed'] == 0
    assert compute([both], tmp_path, workers=1, device='cpu', quiet=True)[both] == record # Nothing is trained


def test_a_student_of_an_ensemble_learns_from_its_mean(tmp_path):
    both = members()
    student = spec(7, teacher=both.teacher)
    records = compute([*both.members, student], tmp_path, workers=1, device='cpu', quiet=True)
    assert records[student]['spec']['teacher'] == '+'.join(s.id for s in both.members)
    assert read_record(tmp_path / both.id)['members'] # Made on the way
    alone = spec(7, teacher=both.members[0].id)
    assert compute([alone], tmp_path, workers=1, device='cpu', quiet=True)[alone]['test'] != records[student]['test']


def test_a_student_by_command_line_is_the_same_run(ncdo, tmp_path):
    train = [*TRAIN, '--update-every', 3, '--step-size', .3, '--loss', 'logit-adjusted']
    recipe = ['--weight-decay', 5e-4]
    assert ncdo(*train, *recipe, '--ensemble', 3, '--out', tmp_path / 'ens')[0] == 0
    assert ncdo(*train, *recipe, '--seed', 7, '--teacher', tmp_path / 'ens', '--out', tmp_path / 'student')[0] == 0
    theirs = read_record(tmp_path / 'ens')
    assert read_record(tmp_path / 'student')['spec']['teacher'] == '+'.join(theirs['members'])
    assert theirs['id'] == members().id == Ensemble(tuple(spec(s) for s in range(3))).id
    assert read_record(tmp_path / 'student')['id'] == spec(7, teacher=members().teacher).id


def test_from_a_folder_of_images_to_a_served_file(ncdo, tmp_path):
    "Everything that issue asks of `--augment trivial --mixup 1 --ensemble 4`"
    onnxruntime = pytest.importorskip('onnxruntime')
    image_folder(tmp_path / 'pets', size=(32, 32))
    out = tmp_path / 'run'
    status, told, err = ncdo('train', '--dataset', tmp_path / 'pets', '--augment', 'trivial', '--mixup', 1, '--ensemble', 4,
        '--model', 'resnet8-w8', '--steps', 12, '--batch-size', 8, '--rolling', 2, '--out', out)
    assert status == 0 and not err and all(f'{c:>12}' in told for c in COUNTS), err
    record = read_record(out)
    assert record['spec']['recipe']['augment'] == 'trivial' and record['spec']['recipe']['mixup'] == 1 and len(record['members']) == 4
    assert sorted(f.name for f in out.glob('seed-*')) == [f'seed-{s}' for s in range(4)]
    for command in (['report', out], ['postshift', '--run', out], ['export', out]): assert ncdo(*command)[0] == 0
    status, table, _ = ncdo('predict', out, tmp_path / 'pets')
    assert status == 0 and len(table.splitlines()) == 1 + sum(COUNTS.values())
    session = onnxruntime.InferenceSession(out / 'model.onnx')
    pixels = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 255
    served, = session.run(['scores'], dict(pixels=pixels.numpy()))
    alone = [Classifier(out / f'seed-{s}') for s in range(4)]
    with torch.no_grad(): mean = sum(c(pixels).softmax(-1) for c in alone) / 4
    assert np.allclose(np.exp(served), mean.numpy(), atol=1e-5)
    assert json.loads(session.get_modelmeta().custom_metadata_map['class_names']) == list(COUNTS)
    assert session.get_modelmeta().custom_metadata_map['model'] == ' + '.join(['resnet8-w8'] * 4)


def test_the_report_of_an_ensemble_says_what_it_is(ncdo, tmp_path):
    assert ncdo(*TRAIN, '--ensemble', 2, '--out', tmp_path / 'ens')[0] == 0 and ncdo('report', tmp_path / 'ens')[0] == 0
    assert '0, first of 2 runs together' in (tmp_path / 'ens/report.html').read_text()


def test_finished_runs_are_brought_together(ncdo, tmp_path):
    for seed in (0, 1): ncdo(*TRAIN, '--seed', seed, '--split-seed', 0, '--out', tmp_path / str(seed))
    assert ncdo('ensemble', tmp_path / '0', tmp_path / '1', '--out', tmp_path / 'ens')[0] == 0
    assert (tmp_path / 'ens/weights.safetensors').exists() and read_record(tmp_path / 'ens')['members']
    assert ncdo('ensemble', tmp_path / '0', tmp_path / '1', '--out', tmp_path / 'ens')[0] == 0 # Once more
    (tmp_path / '1/weights.safetensors').unlink()
    assert ncdo('ensemble', tmp_path / '0', tmp_path / '1', '--out', tmp_path / 'bare')[0] == 0
    assert not (tmp_path / 'bare/weights.safetensors').exists() # Without its networks it is a record, not a classifier
    status, _, err = ncdo('export', tmp_path / 'bare')
    assert status == 2 and 'weights.safetensors is missing' in err


def test_an_interrupted_ensemble_goes_on(ncdo, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('ncdo.schedule.make_record', lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        assert ncdo(*TRAIN, '--ensemble', 2, '--out', tmp_path / 'ens')[0] == 130
    status, _, err = ncdo(*TRAIN, '--ensemble', 2, '--out', tmp_path / 'ens')
    assert status == 2 and 'add --resume to go on with it' in err
    status, _, err = ncdo(*TRAIN, '--ensemble', 3, '--out', tmp_path / 'ens')
    assert status == 2 and 'for it has other options than these' in err
    assert ncdo(*TRAIN, '--ensemble', 2, '--resume', '--out', tmp_path / 'ens')[0] == 0
    assert ncdo(*TRAIN, '--ensemble', 2, '--out', tmp_path / 'whole')[0] == 0
    assert read_record(tmp_path / 'ens')['test'] == read_record(tmp_path / 'whole')['test']
    assert not list((tmp_path / 'ens').rglob('checkpoint*'))


def test_shared_multipliers_by_command_line(ncdo, tmp_path):
    assert ncdo(*TRAIN, '--ensemble', 2, '--shared', '--swapped', '--out', tmp_path / 'ens')[0] == 0
    a, b = [read_record(tmp_path / f'ens/seed-{s}') for s in (0, 1)]
    assert a['multipliers'] == b['multipliers'] and a['spec']['team'] == [0, 1] and a['spec']['swapped']
    status, _, err = ncdo(*TRAIN, '--shared', '--out', tmp_path / 'one')
    assert status == 2 and err == 'ncdo: --shared is for an ensemble; add --ensemble 4, say\n'


NET = 'from torch import nn\ndef flat(num_classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))\n'

def test_networks_that_train_alone_predict_together(ncdo, tmp_path, monkeypatch):
    (tmp_path / 'ncdo_flat_net.py').write_text(NET)
    monkeypatch.chdir(tmp_path)
    train = ['train', '--model', 'ncdo_flat_net:flat', '--steps', 4, '--ensemble', 2]
    assert ncdo(*train, '--out', 'ens')[0] == 0 and len(Classifier('ens').members) == 2
    status, _, err = ncdo(*train, '--shared', '--out', 'shared')
    assert status == 2 and 'trains alone, so its runs cannot share multipliers' in err


def test_what_cannot_be_is_told_in_one_line(ncdo, tmp_path):
    for name, more in dict(a=[], b=['--split-seed', 1], ens=['--ensemble', 2]).items(): ncdo(*TRAIN, *more, '--out', tmp_path / name)
    a, b, ens = [tmp_path / n for n in ('a', 'b', 'ens')]
    said = {(a, b): 'holds a run on another split', (a, a): 'is given twice', (a,): 'needs two runs or more', (a, tmp_path / 'no'): 'holds no record'}
    for runs, message in said.items():
        status, _, err = ncdo('ensemble', *runs, '--out', tmp_path / 'new')
        assert status == 2 and message in err and err.count('\n') == 1 and not (tmp_path / 'new').exists()
    assert 'holds the record of other runs' in ncdo('ensemble', ens / 'seed-0', ens / 'seed-1', '--out', b)[2]
    assert 'is one of the runs' in ncdo('ensemble', a, b, '--out', a)[2]
    assert 'of 2 runs together, not of 3' in ncdo(*TRAIN, '--ensemble', 3, '--out', ens)[2]
    assert 'of 2 runs together, not of 1' in ncdo(*TRAIN, '--out', ens)[2]
    for many in (0, 10 ** 9): assert f'ensemble is {many}; it must be a whole number from 1 to 1000' in ncdo(*TRAIN, '--ensemble', many, '--out', tmp_path / 'zero')[2]
    assert "--swapped is True, the teacher's False" in ncdo(*TRAIN, '--teacher', ens, '--swapped', '--out', tmp_path / 'student')[2]


def test_members_of_different_networks_join(tmp_path, ncdo):
    ncdo(*TRAIN, '--out', tmp_path / 'a')
    ncdo('train', '--model', 'resnet8-w8', '--steps', 4, '--out', tmp_path / 'b')
    ensemble_run([tmp_path / 'a', tmp_path / 'b'], tmp_path / 'ens', weights=True)
    x = torch.rand(3, 1, 8, 8) * 255
    with torch.no_grad(): scores = [Classifier(tmp_path / n)(x) for n in ('a', 'b', 'ens')]
    assert torch.allclose(scores[2].softmax(-1), (scores[0].softmax(-1) + scores[1].softmax(-1)) / 2, atol=1e-6)
    with pytest.raises(InputError, match='holds no record'): ensemble_run([tmp_path / 'a', tmp_path], tmp_path / 'other')


def test_members_of_other_options_are_not_taken_over(ncdo, tmp_path):
    "A kill before the ensemble's record leaves its members; whoever asks for others is told"
    assert ncdo(*TRAIN, '--ensemble', 2, '--out', tmp_path / 'ens')[0] == 0
    (tmp_path / 'ens/record.json').unlink()
    status, _, err = ncdo(*TRAIN, '--weight-decay', .1, '--ensemble', 2, '--out', tmp_path / 'ens')
    assert status == 2 and 'seed-0 holds the record of another run (weight_decay 0.0005, not 0.1)' in err
    assert ncdo(*TRAIN, '--ensemble', 2, '--out', tmp_path / 'ens')[0] == 0 and read_record(tmp_path / 'ens')['members']


def test_an_ensemble_of_ensembles_is_refused(ncdo, tmp_path):
    for name in 'ab': ncdo(*TRAIN, '--ensemble', 2, '--split-seed', 0, '--seed', 'ab'.index(name), '--out', tmp_path / name)
    status, _, err = ncdo('ensemble', tmp_path / 'a', tmp_path / 'b', '--out', tmp_path / 'all')
    assert status == 2 and 'is an ensemble already; give its runs' in err and not (tmp_path / 'all').exists()


def test_a_student_sees_images_of_its_teachers_size(ncdo, tmp_path):
    image_folder(tmp_path / 'pets', size=(24, 20))
    train = ['train', '--dataset', tmp_path / 'pets', '--model', 'mlp-16', '--steps', 3, '--batch-size', 8]
    assert ncdo(*train, '--image-size', 12, '--out', tmp_path / 'teacher')[0] == 0
    status, _, err = ncdo(*train, '--teacher', tmp_path / 'teacher', '--out', tmp_path / 'student')
    assert status == 0 and read_record(tmp_path / 'student')['spec']['image_size'] == 12, err


def test_an_ensemble_alone_brings_its_members(tmp_path):
    both = members(2)
    record = compute([both], tmp_path, workers=1, device='cpu', quiet=True)[both]
    assert all(read_record(tmp_path / i)['id'] == i for i in record['members'])


def test_a_goal_without_multipliers_has_none_to_share(ncdo, tmp_path):
    status, _, err = ncdo(*TRAIN, '--objective', 'average-recall', '--ensemble', 2, '--shared', '--out', tmp_path / 'a')
    assert status == 2 and err == 'ncdo: average-recall has no multipliers to share; leave out --shared\n'
    more = ['--constraint', 'coverage', '--loss', 'hybrid-b']
    assert ncdo(*TRAIN, '--objective', 'average-recall', *more, '--ensemble', 2, '--shared', '--out', tmp_path / 'a')[0] == 0


def test_a_study_with_fewer_seeds_than_an_ensemble_is_told(ncdo, tmp_path):
    status, _, err = ncdo('paper', 'beyond', '--preset', 'smoke', '--seeds', 2, '--out', tmp_path / 'x', '--compute-only')
    assert status == 2 and 'ensembles of 4 need as many seeds; there are 2' in err
    status, _, err = ncdo('paper', 'beyond', '--preset', 'smoke', '-p', 'datasets=[digits-balanced]', '--out', tmp_path / 'x', '--compute-only')
    assert status == 2 and "unknown data set of study beyond 'digits-balanced'; use one of" in err


@pytest.mark.parametrize('spoil,message', [(lambda p: p.write_bytes(p.read_bytes()[:100]), 'cannot be read'),
    (lambda p: save_file(dict(w=torch.zeros(2)), p), 'is not the weights of a run')], ids=['cut off', 'foreign'])
def test_weights_that_cannot_be_joined_are_one_line(ncdo, tmp_path, spoil, message):
    for seed in (0, 1): ncdo(*TRAIN, '--seed', seed, '--split-seed', 0, '--out', tmp_path / str(seed))
    spoil(tmp_path / '1/weights.safetensors')
    status, _, err = ncdo('ensemble', tmp_path / '0', tmp_path / '1', '--out', tmp_path / 'ens')
    assert status == 2 and message in err and err.count('\n') == 1 and not (tmp_path / 'ens').exists()


def test_a_student_learns_from_what_its_teacher_says_of_views(tmp_path, monkeypatch):
    import ncdo.schedule as schedule
    seen = []
    monkeypatch.setattr(schedule, 'Stack', lambda *args, **how: seen.append(Stack(*args, **how)) or seen[-1])
    both = members(2)
    pupil = mixing(0, teacher=both.teacher, temperature=2., views=3)
    records = compute([*both.members, pupil], tmp_path, workers=1, device='cpu', quiet=True)
    stack, data = seen[-1], load('digits-lt')
    assert stack.recipe == pupil.recipe.as_they_are # Views are not changed again
    views, shown = draw_views(data, pupil.recipe, 3, pupil.split_seed)
    n = len(data.x)
    assert torch.equal(stack.images.pool[n:], views) and not torch.equal(views, data.x[shown])
    assert len(stack.images.pool) == n + 3 * len(data.train) and stack.images.order.min() >= n
    with torch.no_grad(): told = sum(Classifier(tmp_path / i)(views * 255 / 16).softmax(-1) for i in both.teacher.split('+')) / 2
    labels = (told.double().log() / 2).softmax(-1).float()
    index = stack.images.order[3]
    assert torch.allclose(stack.images.targets(index)[0], labels[index[0] - n], atol=1e-6)
    assert torch.allclose(stack.members[0].problem.priors, labels.double().mean(0), atol=1e-6)
    scores = read_scores(tmp_path / pupil.id) # Of the images, not of the views
    assert len(scores['train']) == len(data.train) and records[pupil]['split_hash'] == data.split_hash
    assert records[pupil]['spec']['views'] == 3 and 'views' not in counted(both.members[0])


def test_views_of_several_splits_and_halves_in_one_stack(tmp_path):
    "Each student learns from views of its own training sample, labelled by its own teacher, and as it would alone"
    teachers = [mixing(0, split_seed=k) for k in (0, 1)]
    pupils = [mixing(3, split_seed=t.split_seed, teacher=t.id, views=2) for t in teachers]
    together = compute([*teachers, *pupils], tmp_path / 'a', workers=1, device='cpu', quiet=True)
    for t, p in zip(teachers, pupils):
        alone = compute([t, p], tmp_path / p.id, workers=1, device='cpu', quiet=True)[p]
        assert alone['test']['confusion'] == together[p]['test']['confusion']
        assert torch.allclose(*[read_scores(tmp_path / where / p.id)['test'] for where in ('a', p.id)], atol=1e-4)


def test_a_student_with_views_goes_on_exactly(tmp_path):
    both = members(2)
    pupil = mixing(0, teacher=both.teacher, views=2)
    whole = compute([*both.members, pupil], tmp_path, workers=1, device='cpu', quiet=True)[pupil]
    class Stop(Exception): pass
    done, where = [], tmp_path / 'again'
    def stop(n):
        done.append(n)
        if sum(done) >= 6: raise Stop
    how = dict(device='cpu', checkpoint=tmp_path / 'c.safetensors', teachers={pupil.teacher: ensemble_in(tmp_path, pupil.teacher)})
    with pytest.raises(Stop): run_stack([pupil], [where], progress=stop, **how)
    assert (tmp_path / 'c.safetensors').exists()
    again, = run_stack([pupil], [where], **how)
    assert again['test'] == whole['test'] and again['history'] == whole['history']


def test_views_by_command_line_and_what_they_need(ncdo, tmp_path):
    mixed = [*TRAIN, '--mixup', .5]
    assert ncdo(*mixed, '--ensemble', 2, '--out', tmp_path / 'ens')[0] == 0
    assert ncdo(*mixed, '--teacher', tmp_path / 'ens', '--views', 4, '--out', tmp_path / 'student')[0] == 0
    assert read_record(tmp_path / 'student')['spec']['views'] == 4 and Classifier(tmp_path / 'student').members
    told = {(*mixed, '--views', 4): 'nobody is there to label them; give a teacher',
        (*TRAIN, '--teacher', tmp_path / 'ens', '--views', 4): 'the recipe changes no image; give augment or mixup',
        (*mixed, '--teacher', tmp_path / 'ens', '--views', -1): 'views is -1; give a whole number'}
    for args, message in told.items():
        status, _, err = ncdo(*args, '--out', tmp_path / 'no')
        assert status == 2 and message in err and err.count('\n') == 1 and not (tmp_path / 'no').exists()
    for weights in tmp_path.glob('ens/**/weights.safetensors'): weights.unlink()
    status, _, err = ncdo(*mixed, '--seed', 5, '--teacher', tmp_path / 'ens', '--views', 4, '--out', tmp_path / 'no')
    assert status == 2 and 'weights.safetensors is missing' in err and err.count('\n') == 1


def test_a_teacher_on_record_without_its_network_is_told_before_anything_is_trained(tmp_path):
    "Trained when nobody wanted views of it"
    both, how = members(2), dict(workers=1, device='cpu', quiet=True)
    compute([*both.members], tmp_path, **how)
    pupil, other = mixing(0, teacher=both.teacher, views=2), spec(7)
    with pytest.raises(InputError, match='is a teacher on record whose network was not kept.*remove record.json there'):
        compute([*both.members, pupil, other], tmp_path, **how)
    assert read_record(tmp_path / other.id) is None
    for s in both.members: (tmp_path / s.id / 'record.json').unlink()
    assert compute([*both.members, pupil], tmp_path, **how)[pupil]['id'] == pupil.id


def test_views_need_one_pool_and_room(ncdo, tmp_path):
    data, mixed = load('digits-lt'), [*TRAIN, '--mixup', .5]
    pupils = [mixing(0, teacher='0' * 12, views=2, split_seed=k) for k in (0, 1)]
    with pytest.raises(InputError, match='must share one pool'): with_views(pupils, [data, dataclasses.replace(data, x=data.x.clone())])
    found, places = with_views(pupils[:1], [data])
    assert len(found[0].x) == len(data.x) + 2 * len(data.train) and places[0].min() == len(data.x)
    assert ncdo(*mixed, '--out', tmp_path / 'teacher')[0] == 0
    status, _, err = ncdo(*mixed, '--teacher', tmp_path / 'teacher', '--views', 10 ** 9, '--out', tmp_path / 'no')
    assert status == 2 and 'views is 1000000000, which take 137728 GB of memory' in err and err.count('\n') == 1 and not (tmp_path / 'no').exists()
