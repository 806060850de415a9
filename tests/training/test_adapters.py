"Plain loop, Lightning, Hugging Face: one update measures once, checkpoints hold the multipliers, the worst class gains"
import pytest, torch
from torch import nn
from torch.utils.data import (BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler, Subset,
    SubsetRandomSampler, TensorDataset, WeightedRandomSampler)
from ncdo.adapters import lightning_callback, mean_over_processes, measure_confusion, trainer_callback, trainer_loss, update_gain
from ncdo.data import load
from ncdo.distillation import DistilledLoss
from ncdo.gains import InputError, confusion_matrix, worst_case_recall, worst_recall
from ncdo.losses import CostSensitiveLoss
from ncdo.reductions import SaddlePoint

DATA = load('digits-lt')
(X, Y), (X_VAL, Y_VAL), (X_TEST, Y_TEST) = [DATA.part(p) for p in ('train', 'validation', 'test')]
SEEDS = range(3)


def network(seed=0, norm=nn.BatchNorm1d):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), norm(128), nn.ReLU(), nn.Linear(128, 10))


def game(**kwargs):
    reduction = SaddlePoint(worst_case_recall(DATA.priors), step_size=.33)
    return reduction, CostSensitiveLoss(reduction.gain, **kwargs)


def worst(model): return worst_recall(measure_confusion(model, [(X_TEST, Y_TEST)], 10)).item()


def sgd(model): return torch.optim.SGD(model.parameters(), lr=.1, momentum=.9, nesterov=True, weight_decay=5e-4)


def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Points(nn.Module):
    "Predicts the class it is told"
    def __init__(self):
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, x): return torch.eye(3)[x]


def test_trap_25_batches_of_4096_and_904_are_one_sample():
    rng = torch.Generator().manual_seed(0)
    y, h = torch.randint(3, (5000,), generator=rng), torch.randint(3, (5000,), generator=rng)
    reduction = SaddlePoint(worst_case_recall([.5, .3, .2]), step_size=1.)
    update_gain(Points(), zip(h.split(4096), y.split(4096)), reduction, CostSensitiveLoss(reduction.gain))
    once = SaddlePoint(worst_case_recall([.5, .3, .2]), step_size=1.)
    once.update(confusion_matrix(y, h, 3))
    assert len(reduction.history) == 1 and torch.allclose(reduction.multipliers, once.multipliers, atol=1e-12)


def test_ignored_labels_and_labels_of_sequences():
    y, h = torch.tensor([[0, 1, -100, -100], [2, -100, -100, -100]]), torch.tensor([[0, 2, 1, 1], [2, 0, 0, 0]])
    C = measure_confusion(Points(), [(h, y)], 3)
    assert C.sum() == 1 and C[0, 0] == C[1, 2] == C[2, 2] and C[0, 0] > 0


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32])
def test_labels_of_small_integers_do_not_wrap_round(dtype):
    "-100 as a byte is 156"
    y, model = torch.tensor([156, 0, 200]), nn.Sequential(nn.Identity())
    batches = [(torch.eye(300)[y], y.to(dtype))]
    assert torch.equal(measure_confusion(model, batches, 300), measure_confusion(model, [(torch.eye(300)[y], y)], 300))
    assert measure_confusion(model, batches, 300)[156, 156] > 0 and measure_confusion(model, batches, 300, 156)[156].sum() == 0
    output = type('Output', (), dict(logits=torch.zeros(3, 300)))
    total = trainer_loss(CostSensitiveLoss(torch.eye(300), reduction='sum'))
    assert torch.equal(total(output, y.to(dtype)), total(output, y)) and total(output, y) > 5


@pytest.mark.parametrize('value, counted', [(None, 3), (0, 2), (0., 2), (torch.tensor(0), 2)])
def test_what_is_ignored_is_a_label_or_nothing(value, counted):
    y, output = torch.tensor([0, 1, 2]), type('Output', (), dict(logits=torch.zeros(3, 3)))
    loss_fn = CostSensitiveLoss(torch.eye(3), reduction='sum', ignore_index=value)
    assert abs(measure_confusion(Points(), [(y, y)], 3, value).diagonal() - torch.tensor([counted == 3, 1, 1]) / counted).max() < 1e-6
    assert torch.isclose(trainer_loss(loss_fn)(output, y), torch.tensor(3.).log())
    reduction = SaddlePoint(worst_case_recall([.5, .3, .2]))
    if counted == 3:
        update_gain(Points(), [(y, y)], reduction, loss_fn)
        assert reduction.history[0]['violations'].tolist() == [-1, -1, -1]


@pytest.mark.parametrize('given, message', [(dict(num_classes='3'), "num_classes is '3'"), (dict(num_classes=0), 'num_classes is 0'), (dict(num_classes=True), 'num_classes is True'),
    (dict(num_classes=None), 'num_classes is None'), (dict(ignore_index='1'), "ignore_index is '1'"), (dict(ignore_index=torch.nan), 'ignore_index is nan'),
    (dict(ignore_index=[0]), r'ignore_index is \[0\]'), (dict(batches=[(torch.tensor([0]), ['cat'])]), 'labels is a list that does not hold numbers')], ids=str)
def test_what_cannot_be_measured_with_is_refused(given, message):
    y = torch.tensor([0, 1, 2])
    assert torch.equal(measure_confusion(Points(), [(y, y)], 3.), measure_confusion(Points(), [(y, y)], 3))
    with pytest.raises(InputError, match=message) as e: measure_confusion(Points(), **dict(batches=[(y, y)], num_classes=3) | given)
    assert '\n' not in str(e.value)


def test_nothing_to_measure_on_is_told():
    for batches in ([], [(torch.tensor([1]), torch.tensor([-100]))]):
        with pytest.raises(InputError, match='no held-out example'): measure_confusion(Points(), batches, 3)


def test_measuring_leaves_every_layer_in_its_mode_and_the_statistics_alone():
    model = network()
    model[2].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    measure_confusion(model, [(X_VAL, Y_VAL)], 10)
    assert [layer.training for layer in model] == [True, True, False, True, True] and same(before, model.state_dict())


@pytest.mark.parametrize('rank', [0, 1])
def test_a_sampler_that_repeats_examples_is_refused(rank):
    data = TensorDataset(torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 1, 2, 0, 1]))
    padded = DataLoader(data, 2, sampler=DistributedSampler(data, 2, rank, shuffle=False))
    with pytest.raises(InputError, match='repeats 1 of 5 examples'): measure_confusion(Points(), padded, 3)
    measure_confusion(Points(), DataLoader(Subset(data, range(rank, 5, 2)), 2), 3)
    even = Subset(data, range(4))
    measure_confusion(Points(), DataLoader(even, 2, sampler=DistributedSampler(even, 2, rank)), 3)


TARGETS = torch.arange(21) % 3
DATASET = TensorDataset(TARGETS, TARGETS)

class Streamed(IterableDataset):
    "The same examples as a stream, of known length or not"
    def __iter__(self): return iter(DATASET)

class StreamedWithLength(Streamed):
    def __len__(self): return 21

class Repeats(Sampler):
    "A sampler that says how much it gives, which is too much"
    def __iter__(self): return iter([*range(21), 0, 1])
    def __len__(self): return 23

class OtherLibrarys(Sampler):
    "As those of timm and transformers: no subclass of torch's"
    num_replicas, total_size = 2, 22
    def __iter__(self): return iter(range(11))
    def __len__(self): return 11

def twice(rows): return [torch.stack(column).repeat_interleave(2) for column in zip(*rows)]

def loader(*args, data=DATASET, **kwargs): return lambda: DataLoader(data, *args, **kwargs)

IN_ORDER = SequentialSampler(DATASET)
GOOD = {'plain': loader(4), 'shuffled': loader(4, shuffle=True), 'a subset': loader(4, sampler=SubsetRandomSampler(range(9))),
    'drop_last without a rest': loader(7, drop_last=True), 'batch_sampler': loader(batch_sampler=BatchSampler(IN_ORDER, 4, False)),
    'batches of indices': loader(batch_sampler=[[0, 1, 2], [3, 4]]), 'batches by sampler': loader(sampler=BatchSampler(IN_ORDER, 4, False), batch_size=None),
    'weighted, each once': loader(4, sampler=WeightedRandomSampler([1.] * 21, 9, replacement=False)), 'stream': loader(4, data=Streamed()),
    'stream with a length': loader(4, data=StreamedWithLength()), 'list': lambda: [(TARGETS, TARGETS)], 'generator': lambda: (pair for pair in [(TARGETS, TARGETS)]),
    'several rows an example': loader(4, collate_fn=twice), 'ready batches': loader(data=[(TARGETS, TARGETS)], batch_size=None)}

@pytest.mark.parametrize('case', GOOD)
def test_loaders_that_give_each_example_once_are_measured(case):
    assert abs(measure_confusion(Points(), GOOD[case](), 3).diagonal().sum() - 1) < 1e-12

BAD = {'drop_last': (loader(4, drop_last=True), 'drop_last=True leaves out 1 of 21'), 'drop_last, shuffled': (loader(8, shuffle=True, drop_last=True), 'leaves out 5 of 21'),
    'drop_last in a batch_sampler': (loader(batch_sampler=BatchSampler(IN_ORDER, 4, True)), 'leaves out 1 of 21'),
    'drop_last of a stream': (loader(4, data=StreamedWithLength(), drop_last=True), '20 examples were seen .* in a sample of 21: this loader leaves out'),
    'stream by two workers': (loader(4, data=StreamedWithLength(), num_workers=2), '42 examples were seen .* in a sample of 21: this loader repeats'),
    'weighted': (loader(4, sampler=WeightedRandomSampler([1.] * 21, 21)), 'WeightedRandomSampler draws with replacement'),
    'random with replacement': (loader(4, sampler=RandomSampler(DATASET, replacement=True)), 'RandomSampler draws with replacement'),
    'replacement in a batch_sampler': (loader(batch_sampler=BatchSampler(RandomSampler(DATASET, replacement=True), 4, False)), 'draws with replacement'),
    'more than there is': (loader(4, sampler=RandomSampler(DATASET, num_samples=30)), '30 examples .* sample of 21'),
    'repeats': (loader(4, sampler=Repeats()), '23 examples .* sample of 21: this loader repeats some; give the held-out data without a sampler'),
    'batches of indices that repeat': (loader(batch_sampler=[list(range(21)), [0]]), '22 examples .* sample of 21'),
    'distributed': (loader(4, sampler=DistributedSampler(DATASET, 2, 0)), 'repeats 1 of 21'),
    'distributed, drop_last': (loader(4, sampler=DistributedSampler(DATASET, 2, 0, drop_last=True)), 'leaves out 1 of 21'),
    'distributed in a batch_sampler': (loader(batch_sampler=BatchSampler(DistributedSampler(DATASET, 2, 0), 4, False)), 'repeats 1 of 21'),
    "another library's": (loader(4, sampler=OtherLibrarys()), 'OtherLibrarys repeats 1 of 21'), 'no iterable': (lambda: 5, 'batches is a int; give a list'),
    'not a pair': (lambda: [TARGETS], 'a batch is a Tensor; give pairs'), 'three': (lambda: [(TARGETS,) * 3], 'a batch is a tuple; give pairs'),
    'no labels': (lambda: [dict(x=TARGETS)], r"a batch is a dict with the keys \['x'\]"), 'soft labels': (lambda: [(TARGETS, torch.eye(3)[TARGETS])], 'the labels are distributions'),
    'other classes': (lambda: [(TARGETS, TARGETS + 1)], r'target holds \[3\]')}

@pytest.mark.parametrize('case', BAD)
def test_loaders_that_repeat_or_leave_out_are_refused_in_a_line(case):
    make, message = BAD[case]
    model = Points().train()
    with pytest.raises(InputError, match=message) as e: measure_confusion(model, make(), 3)
    assert '\n' not in str(e.value) and model.training


@pytest.mark.parametrize('make', [lambda x: ((x, x) for _ in '1'), lambda x: zip([x], [x]), lambda x: iter([(x, x)]), lambda x: map(tuple, [(x, x)])])
def test_batches_that_come_once_are_told_at_the_second_update(make):
    reduction = SaddlePoint(worst_case_recall([.5, .3, .2]))
    loss_fn, batches = CostSensitiveLoss(reduction.gain), make(TARGETS)
    update_gain(Points(), batches, reduction, loss_fn)
    with pytest.raises(InputError, match='gives its batches once|yields nothing'): update_gain(Points(), batches, reduction, loss_fn)
    assert len(reduction.history) == 1

def test_a_generator_that_has_been_started_is_refused():
    batches = ((x, x) for x in TARGETS.split(7))
    next(batches)
    with pytest.raises(InputError, match='gives its batches once'): measure_confusion(Points(), batches, 3)


@pytest.mark.parametrize('make', [lightning_callback, trainer_callback])
@pytest.mark.parametrize('change,message', [(dict(every=0), 'every is 0; it must be a whole number'), (dict(every=1.5), 'every is 1.5'), (dict(every=-1), 'every is -1'), (dict(every=True), 'every is True'), (dict(batches=5), 'batches is a int'),
    (dict(batches=iter([])), 'batches is a list_iterator'), (dict(batches=(i for i in [])), 'batches is a generator'), (dict(loss_fn=nn.CrossEntropyLoss()), 'CrossEntropyLoss, which takes no gain')], ids=str)
def test_mistakes_in_callbacks_are_told_when_they_are_made(make, change, message):
    pytest.importorskip('lightning.pytorch' if make is lightning_callback else 'transformers')
    reduction, loss_fn = game()
    with pytest.raises(InputError, match=message) as e: make(reduction, **dict(loss_fn=loss_fn, batches=[(X_VAL, Y_VAL)]) | change)
    assert '\n' not in str(e.value)


def test_update_gain_serves_the_distilled_loss_and_names_a_loss_without_a_gain():
    reduction = SaddlePoint(worst_case_recall([.5, .3, .2]), step_size=1.)
    loss_fn = DistilledLoss(reduction.gain, [.5, .3, .2])
    before = loss_fn.gain.clone()
    update_gain(Points(), [(torch.zeros(21).long(), TARGETS)], reduction, loss_fn)
    assert not torch.equal(loss_fn.gain, before)
    with pytest.raises(InputError, match='CrossEntropyLoss, which takes no gain'): update_gain(Points(), [(TARGETS, TARGETS)], reduction, nn.CrossEntropyLoss())
    for wrong in (nn.functional.cross_entropy, nn.CrossEntropyLoss()):
        with pytest.raises(InputError, match="needs a loss module with reduction='sum'"): trainer_loss(wrong)
    with pytest.raises(InputError, match=r'the loss has shape \(3,\)'): mean_over_processes(torch.ones(3), 3)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize('given', [torch.float16, torch.float32, torch.float64])
def test_inputs_are_brought_to_the_precision_of_the_model(dtype, given):
    torch.manual_seed(0)
    x, y = torch.randn(40, 8), torch.arange(40) % 3
    model = nn.Linear(8, 3)
    expected = confusion_matrix(y, model.to(dtype)(x.to(given).to(dtype)).argmax(-1), 3)
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model
        def forward(self, values, index, mask, note):
            assert index.dtype == torch.int32 and mask.dtype == torch.bool and note == 'as it is' and values.dtype == dtype
            return self.net(values)
    assert torch.allclose(measure_confusion(model, [(x.to(given), y)], 3), expected)
    batch = dict(values=x.to(given), index=torch.arange(40).int(), mask=torch.ones(40).bool(), note='as it is', labels=y)
    assert torch.allclose(measure_confusion(Named(), [batch], 3), expected)

def test_a_model_without_weights_and_one_with_buffers_alone():
    class Bare(nn.Module):
        def forward(self, x): return x
    class Buffered(Bare):
        def __init__(self):
            super().__init__()
            self.register_buffer('mean', torch.zeros(1, dtype=torch.float64))
    for model in (Bare(), Buffered()): assert measure_confusion(model, [(torch.eye(3), torch.arange(3))], 3).diagonal().sum() == 1


@pytest.mark.parametrize('value', [torch.nan, torch.inf])
def test_scores_that_are_not_finite_are_refused_with_their_number(value):
    "The argmax of nan is its index, so a network that diverged would predict one class always"
    class Given(nn.Module):
        def forward(self, s): return s
    s, y = torch.eye(3)[torch.arange(12) % 3], torch.arange(12) % 3
    s[[2, 5, 7], 1] = value
    with pytest.raises(InputError, match='3 of 12 examples have scores that are not finite; the model has diverged'): measure_confusion(Given(), [(s[:6], y[:6]), (s[6:], y[6:])], 3)
    y[[2, 5, 7]] = -100
    assert torch.isclose(measure_confusion(Given(), [(s, y)], 3).diagonal().sum(), torch.tensor(1.).double())
    masked = torch.where(torch.eye(3) > 0, 1., -torch.inf)
    assert measure_confusion(Given(), [(masked, torch.arange(3))], 3).diagonal().sum() == 1
    with pytest.raises(InputError, match='3 of 3'): measure_confusion(Given(), [(torch.full((3, 3), -torch.inf), torch.arange(3))], 3)


@pytest.mark.parametrize('shape', [(4, 3, 5), (4, 5, 3), (4, 3, 2, 5), (4, 2, 5, 3), (3,)], ids=str)
def test_measuring_takes_classes_last_or_on_axis_1(shape):
    class Given(nn.Module):
        def forward(self, s): return s
    axis = shape.index(3)
    s = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    y = torch.randint(3, shape[:axis] + shape[axis + 1:], generator=torch.Generator().manual_seed(1))
    assert torch.allclose(measure_confusion(Given(), [(s, y)], 3), confusion_matrix(y.flatten(), s.argmax(axis).flatten(), 3))

def test_measuring_refuses_a_layout_that_fits_both_ways_except_the_tokens_of_transformers():
    class Output(nn.Module):
        def forward(self, s): return type('Output', (), dict(logits=s))
    class Given(nn.Module):
        def forward(self, s): return s
    s, y = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0)), torch.randint(3, (4, 3), generator=torch.Generator().manual_seed(1))
    with pytest.raises(InputError, match='on axis 1 or on the last'): measure_confusion(Given(), [(s, y)], 3)
    assert torch.allclose(measure_confusion(Output(), [dict(s=s, labels=y)], 3), confusion_matrix(y.flatten(), s.argmax(-1).flatten(), 3))
    total, rows = trainer_loss(CostSensitiveLoss(torch.eye(3), reduction='sum')), s.flatten(0, 1)
    assert torch.allclose(total(type('Output', (), dict(logits=s)), y), nn.functional.cross_entropy(rows, y.flatten()))
    pixels, labels = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    assert torch.allclose(total(type('Output', (), dict(logits=pixels)), labels), nn.functional.cross_entropy(pixels, labels))
    assert total(type('Output', (), dict(logits=pixels)), torch.full((2, 4, 5), -100)) == 0


def plain_run(stop=None, resume=None, forget=()):
    "100 steps of a plain loop; stopped and resumed, perhaps without some of its parts"
    model = network()
    reduction, loss_fn = game()
    parts = dict(model=model, optimiser=sgd(model), reduction=reduction, loss_fn=loss_fn)
    order = torch.Generator().manual_seed(0)
    batches = [i for _ in range(25) for i in torch.randperm(len(X), generator=order).split(64)[:4]]
    for name in parts.keys() - set(forget) if resume else (): parts[name].load_state_dict(resume[name])
    for step in range(55 if resume else 0, stop or 100):
        if step % 10 == 0: update_gain(model, [(X_VAL, Y_VAL)], reduction, loss_fn)
        loss_fn(model.train()(X[batches[step]]), Y[batches[step]]).backward()
        parts['optimiser'].step()
        parts['optimiser'].zero_grad()
    return {k: v.state_dict() for k, v in parts.items()}


def test_trap_24_a_resumed_loop_equals_an_uninterrupted_one_only_with_its_multipliers():
    whole, half = plain_run(), plain_run(stop=55)
    resumed = plain_run(resume=half)
    assert all(same(whole[k], resumed[k]) for k in ('model', 'reduction', 'loss_fn'))
    for part in ('reduction', 'loss_fn'): assert not same(whole['model'], plain_run(resume=half, forget=[part])['model'])


def lightning_run(folder, goal, seed=0, epochs=60, resume=None, accumulate=1, callback=True, **more):
    L = pytest.importorskip('lightning.pytorch')

    class Module(L.LightningModule):
        def __init__(self, loss_fn):
            super().__init__()
            self.net, self.loss_fn = network(seed), loss_fn
        def forward(self, x): return self.net(x)
        def training_step(self, batch, index): return self.loss_fn(self(batch[0]), batch[1])
        def configure_optimizers(self): return sgd(self)

    reduction, loss_fn = game()
    module = Module(loss_fn if goal else nn.CrossEntropyLoss())
    callbacks = [lightning_callback(reduction, loss_fn, [(X_VAL, Y_VAL)])] if goal and callback else []
    trainer = L.Trainer(max_epochs=epochs, callbacks=callbacks, accelerator='cpu', logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=accumulate, **more)
    shuffled = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    trainer.fit(module, DataLoader(TensorDataset(X[shuffled], Y[shuffled]), 64, drop_last=True), ckpt_path=resume)
    trainer.save_checkpoint(folder / 'last.ckpt')
    return module, reduction


def test_lightning_gains_in_the_worst_class(tmp_path):
    plain, ours = [sum(worst(lightning_run(tmp_path, goal, seed)[0]) for seed in SEEDS) / len(SEEDS) for goal in (False, True)]
    assert ours > plain + .15


def test_trap_24_lightning_resumes_with_its_multipliers(tmp_path):
    whole, reduction = lightning_run(tmp_path, True, epochs=12)
    lightning_run(tmp_path, True, epochs=7)
    resumed, again = lightning_run(tmp_path, True, epochs=12, resume=tmp_path / 'last.ckpt')
    assert same(reduction.state_dict(), again.state_dict()) and len(again.history) == 5
    assert same(whole.state_dict(), resumed.state_dict())


def test_lightning_updates_once_a_step_under_accumulation(tmp_path):
    _, reduction = lightning_run(tmp_path, True, epochs=10, accumulate=2)
    assert len(reduction.history) == 2


def test_lightning_says_that_a_checkpoint_has_no_multipliers(tmp_path):
    lightning_run(tmp_path, True, epochs=3, callback=False)
    with pytest.warns(UserWarning, match='holds no multipliers'): _, reduction = lightning_run(tmp_path, True, epochs=6, resume=tmp_path / 'last.ckpt')
    assert len(reduction.history) == 1


def test_a_module_of_lightning_is_loaded_with_its_loss(tmp_path):
    "The loss is an argument, so it is given again; its gain comes from the checkpoint, as do the multipliers"
    module, reduction = lightning_run(tmp_path, True, epochs=7)
    _, fresh = game()
    again = type(module).load_from_checkpoint(tmp_path / 'last.ckpt', loss_fn=fresh)
    assert again.loss_fn is fresh and torch.equal(fresh.gain, module.loss_fn.gain) and same(again.state_dict(), module.state_dict())
    other = SaddlePoint(worst_case_recall(DATA.priors), step_size=.33)
    other.load_state_dict(torch.load(tmp_path / 'last.ckpt', weights_only=True)['callbacks']['ncdo'])
    assert torch.equal(other.multipliers, reduction.multipliers) and torch.allclose(other.gain, fresh.gain)
    with pytest.raises(RuntimeError, match='loss_fn.gain: gain has shape'): type(module).load_from_checkpoint(tmp_path / 'last.ckpt', loss_fn=CostSensitiveLoss(torch.eye(3)))


@pytest.mark.parametrize('precision', ['bf16-true', '16-true', '64-true', 'bf16-mixed', '32-true'])
def test_lightning_in_every_precision(tmp_path, precision):
    "Weights, inputs and losses in it; held-out data are given as float32"
    module, reduction = lightning_run(tmp_path, True, epochs=6, precision=precision)
    dtype = {'bf16-true': torch.bfloat16, '16-true': torch.float16, '64-true': torch.float64}.get(precision, torch.float32)
    assert module.net[1].weight.dtype == dtype and module.loss_fn.gain.dtype == torch.float64
    assert len(reduction.history) == 3 and reduction.multipliers.isfinite().all() and (reduction.multipliers - .1).abs().max() > .005
    assert torch.allclose(module.loss_fn.gain, reduction.gain) and module.net[1].weight.isfinite().all()


class Classifier(nn.Module):
    "The network, as the Trainer wants it"
    def __init__(self, seed):
        super().__init__()
        self.net = network(seed)

    def forward(self, pixel_values, labels=None):
        from transformers.modeling_outputs import ImageClassifierOutput
        logits = self.net(pixel_values)
        return ImageClassifierOutput(loss=None if labels is None else nn.functional.cross_entropy(logits, labels), logits=logits)


def trainer_run(folder, goal, seed=0, steps=240, resume=None, callback=True, **more):
    transformers = pytest.importorskip('transformers')
    pytest.importorskip('accelerate')
    transformers.set_seed(seed)
    model, (reduction, loss_fn) = Classifier(seed), game(reduction='sum')
    arguments = transformers.TrainingArguments(str(folder), max_steps=steps, per_device_train_batch_size=64, learning_rate=.01, seed=seed,
        use_cpu=True, report_to='none', disable_tqdm=True, logging_strategy='no', save_strategy='steps', save_steps=35, **more)
    steering = trainer_callback(reduction, loss_fn, [dict(pixel_values=X_VAL, labels=Y_VAL)])
    ours = dict(compute_loss_func=trainer_loss(loss_fn), callbacks=[steering] if callback else [])
    trainer = transformers.Trainer(model, arguments, train_dataset=[dict(pixel_values=x, labels=y) for x, y in zip(X, Y)], **(ours if goal else {}))
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return model, reduction


def test_the_trainer_gains_in_the_worst_class(tmp_path):
    plain, ours = [sum(worst(trainer_run(tmp_path, goal, seed)[0].net) for seed in SEEDS) / len(SEEDS) for goal in (False, True)]
    assert ours > plain + .15


def test_trap_24_the_trainer_resumes_with_its_multipliers(tmp_path):
    whole, reduction = trainer_run(tmp_path, True, steps=60)
    resumed, again = trainer_run(tmp_path, True, steps=60, resume=tmp_path / 'checkpoint-35')
    assert same(reduction.state_dict(), again.state_dict()) and len(again.history) == 6
    assert same(whole.state_dict(), resumed.state_dict())


def test_the_trainer_goes_on_from_a_checkpoint_made_without_the_callback(tmp_path):
    "It was a KeyError; the multipliers start anew, and that is said"
    trainer_run(tmp_path, True, steps=35, callback=False)
    with pytest.warns(UserWarning, match='made without the callback and holds no multipliers'): _, reduction = trainer_run(tmp_path, True, steps=50, resume=tmp_path / 'checkpoint-35')
    assert len(reduction.history) == 1 and (reduction.multipliers - .1).abs().max() > .005


@pytest.mark.parametrize('more', [{}, dict(domain='simplex', names=[f'class {c}' for c in range(10)])], ids=['tensors', 'and names'])
def test_the_state_in_json_reads_back_exactly(tmp_path, monkeypatch, more):
    "Tensors with their dtype, anything else as it is; and plain lists, as version 0.1 wrote them"
    import json
    transformers = pytest.importorskip('transformers')
    reduction, loss_fn = game()
    update_gain(network(), [(X_VAL, Y_VAL)], reduction, loss_fn)
    state = reduction.state_dict() | more
    monkeypatch.setattr(reduction, 'state_dict', lambda: state)
    callback = trainer_callback(reduction, loss_fn, [])
    for form in (callback.state(), dict(attributes={k: v.tolist() if torch.is_tensor(v) else v for k, v in state.items()})):
        seen = {}
        monkeypatch.setattr(reduction, 'load_state_dict', seen.update)
        callback.on_train_begin(None, transformers.TrainerState(stateful_callbacks={'MultipliersCallback': json.loads(json.dumps(form))}), None)
        assert seen.keys() == state.keys()
        for k, v in state.items(): assert torch.equal(seen[k].to(v.dtype), v) if torch.is_tensor(v) else seen[k] == v


def test_the_trainer_in_bfloat16(tmp_path):
    model, reduction = trainer_run(tmp_path, True, steps=30, bf16=True)
    assert len(reduction.history) == 3 and (reduction.multipliers - .1).abs().max() > .005 and all(w.isfinite().all() for w in model.parameters())


def test_the_trainer_divides_by_the_labels_of_the_whole_step(tmp_path):
    "Two batches of 32, accumulated, are one batch of 64, though 3 labels of one and 20 of the other count"
    transformers = pytest.importorskip('transformers')
    pytest.importorskip('accelerate')
    labels = Y[:64].where((torch.arange(64) < 3) | (torch.arange(64) >= 44), -100)
    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, dataset=None): return torch.utils.data.SequentialSampler(self.train_dataset)
    def step(accumulate):
        model, (_, loss_fn) = Classifier(0), game(reduction='sum')
        model.net = network(norm=nn.LayerNorm)
        arguments = transformers.TrainingArguments(str(tmp_path), max_steps=1, per_device_train_batch_size=64 // accumulate,
            gradient_accumulation_steps=accumulate, learning_rate=1., optim='sgd', max_grad_norm=0, use_cpu=True, report_to='none', disable_tqdm=True, save_strategy='no')
        data = [dict(pixel_values=x, labels=y) for x, y in zip(X, labels)]
        InOrder(model, arguments, train_dataset=data, compute_loss_func=trainer_loss(loss_fn)).train()
        return model.net[4].weight
    whole, halves = step(1), step(2)
    assert torch.allclose(whole, halves, atol=1e-5) and (whole - network(norm=nn.LayerNorm)[4].weight).abs().max() > .01


def test_the_loss_of_the_trainer_is_a_mean_over_labels_that_count():
    reduction, loss_fn = game(reduction='sum')
    _, mean = game()
    logits, labels = torch.randn(6, 4, 10), torch.randint(10, (6, 4)).index_fill(1, torch.tensor([2]), -100)
    class Output: pass
    Output.logits = logits
    ours = trainer_loss(loss_fn)
    assert torch.allclose(ours(Output, labels), mean(logits.flatten(0, 1), labels.flatten()))
    assert torch.allclose(ours(Output, labels, num_items_in_batch=36), ours(Output, labels) / 2)
    with pytest.raises(InputError, match="reduction='sum'"): trainer_loss(mean)


@pytest.mark.parametrize('module,make', [('lightning.pytorch', lightning_callback), ('transformers.trainer_callback', trainer_callback)])
def test_a_missing_library_is_told_in_a_line(monkeypatch, module, make):
    import sys
    monkeypatch.setitem(sys.modules, module, None)
    name = module.split('.')[0]
    with pytest.raises(InputError, match=rf"{name} is not installed; pip install 'ncdo\[{name}\]'"): make(*game(), [])
