"Plain loop, Lightning, Hugging Face: one update measures once, checkpoints hold the multipliers, the worst class gains"
import pytest, torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from ncdo.adapters import lightning_callback, measure_confusion, trainer_callback, trainer_loss, update_gain
from ncdo.data import load
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


def lightning_run(folder, goal, seed=0, epochs=60, resume=None, accumulate=1):
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
    callbacks = [lightning_callback(reduction, loss_fn, [(X_VAL, Y_VAL)])] if goal else []
    trainer = L.Trainer(max_epochs=epochs, callbacks=callbacks, accelerator='cpu', logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=accumulate)
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


class Classifier(nn.Module):
    "The network, as the Trainer wants it"
    def __init__(self, seed):
        super().__init__()
        self.net = network(seed)

    def forward(self, pixel_values, labels=None):
        from transformers.modeling_outputs import ImageClassifierOutput
        logits = self.net(pixel_values)
        return ImageClassifierOutput(loss=None if labels is None else nn.functional.cross_entropy(logits, labels), logits=logits)


def trainer_run(folder, goal, seed=0, steps=240, resume=None):
    transformers = pytest.importorskip('transformers')
    pytest.importorskip('accelerate')
    transformers.set_seed(seed)
    model, (reduction, loss_fn) = Classifier(seed), game(reduction='sum')
    arguments = transformers.TrainingArguments(str(folder), max_steps=steps, per_device_train_batch_size=64, learning_rate=.01, seed=seed,
        use_cpu=True, report_to='none', disable_tqdm=True, logging_strategy='no', save_strategy='steps', save_steps=35)
    ours = dict(compute_loss_func=trainer_loss(loss_fn), callbacks=[trainer_callback(reduction, loss_fn, [dict(pixel_values=X_VAL, labels=Y_VAL)])])
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
