"Two processes with DistributedDataParallel compute what one does"
import pytest, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ncdo.adapters import mean_over_processes, measure_confusion, train_digits_on_ranks
from ncdo.gains import InputError, average_recall, confusion_matrix, recall, worst_case_recall
from ncdo.losses import CostSensitiveLoss

WEIGHTS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
X = torch.randn(11, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2, 0, 1])


def linear():
    model = nn.Linear(6, 3, bias=False, dtype=torch.float64)
    model.weight.data.copy_(WEIGHTS.T)
    return model


def _start(rank, world, folder, jobs):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=rank, world_size=world)
    torch.save({name: work(rank, *args) for name, (work, *args) in jobs.items()}, folder / f'{rank}.pt')
    dist.destroy_process_group()


@pytest.fixture(scope='module')
def both(tmp_path_factory):
    "What each job returns on the first and on the second of two processes, which are started once"
    folder = tmp_path_factory.mktemp('processes')
    torch.multiprocessing.spawn(_start, (2, folder, JOBS), 2)
    first, second = [torch.load(folder / f'{rank}.pt', weights_only=True) for rank in range(2)]
    return {name: (first[name], second[name]) for name in JOBS}


def _train(rank, batch_size):
    model, reduction = train_digits_on_ranks(60, batch_size)
    return dict(weights=model.module.state_dict(), reduction=reduction.state_dict())


@pytest.mark.parametrize('batch_size', [64, 65])
def test_trap_50_two_processes_have_the_multipliers_and_weights_of_one(both, batch_size):
    alone, reduction = train_digits_on_ranks(60, batch_size)
    one = reduction.state_dict()
    first, second = both[f'train {batch_size}']
    assert len(reduction.history) == 6 and (one['multipliers'] - .1).abs().max() > .05
    for k in one:
        assert torch.equal(first['reduction'][k], second['reduction'][k])
        assert torch.allclose(first['reduction'][k], one[k], rtol=0, atol=1e-12)
    for k, w in alone.state_dict().items():
        assert torch.equal(first['weights'][k], second['weights'][k])
        assert torch.allclose(first['weights'][k], w, rtol=0, atol=1e-6)


def _measure(rank):
    "Rank 0 has the six zeros and nothing else, rank 1 the rest"
    mine = slice(0, 6) if rank == 0 else slice(6, 11)
    part = confusion_matrix(Y[mine], linear()(X[mine]).argmax(-1), 3)
    return dict(C=measure_confusion(DistributedDataParallel(linear()), [(X[mine], Y[mine])], 3), part=part)


def test_trap_49_counts_of_processes_with_other_class_mixes_are_added(both):
    first, second = both['measure']
    whole = confusion_matrix(Y, linear()(X).argmax(-1), 3)
    assert torch.equal(first['C'], second['C']) and torch.allclose(first['C'], whole, atol=1e-12)
    assert not torch.allclose((first['part'] + second['part']) / 2, whole, atol=1e-3)
    assert not torch.isclose((average_recall(first['part']) + average_recall(second['part'])) / 2, average_recall(whole), atol=1e-3)


def _measure_uneven(rank):
    "Rank 0 has three batches, rank 1 none"
    batches = list(zip(X.split(4), Y.split(4))) if rank == 0 else []
    return measure_confusion(DistributedDataParallel(nn.Sequential(linear(), nn.BatchNorm1d(3, dtype=torch.float64)).eval()), batches, 3)


def test_a_process_may_have_fewer_batches_or_none(both):
    first, second = both['uneven']
    whole = confusion_matrix(Y, linear()(X).argmax(-1), 3)
    assert torch.equal(first, second) and torch.allclose(recall(first), recall(whole))


def _nothing(rank):
    try: measure_confusion(linear(), [], 3)
    except InputError as e: return torch.tensor(list(str(e).encode()))


def test_nothing_anywhere_is_told_on_every_process(both):
    for said in both['nothing']: assert 'no held-out example' in bytes(said.tolist()).decode()


def _gradient(rank, mean):
    "Rank 0 sees seven labels that count, rank 1 one"
    labels = torch.where(torch.arange(11) < 7, Y, torch.where(torch.arange(11) == 10, Y, -100))
    mine = slice(0, 7) if rank == 0 else slice(7, 11)
    loss_fn = CostSensitiveLoss(worst_case_recall([.6, .3, .1]).gain([.2, .3, .5]), reduction='mean' if mean else 'sum')
    model = DistributedDataParallel(linear())
    loss = loss_fn(model(X[mine]), labels[mine])
    (loss if mean else mean_over_processes(loss, (labels[mine] != -100).sum())).backward()
    return model.module.weight.grad


def test_trap_49_losses_are_added_and_divided_by_the_global_count(both):
    labels = torch.where(torch.arange(11) < 7, Y, torch.where(torch.arange(11) == 10, Y, -100))
    model = linear()
    CostSensitiveLoss(worst_case_recall([.6, .3, .1]).gain([.2, .3, .5]))(model(X), labels).backward()
    for gradient in both['sum']: assert torch.allclose(gradient, model.weight.grad, atol=1e-12)
    wrong, _ = both['mean']
    assert not torch.allclose(wrong, model.weight.grad, atol=1e-2)


def test_alone_the_mean_is_a_mean():
    total = torch.tensor(6., requires_grad=True)
    assert mean_over_processes(total, 3) == 2 and mean_over_processes(total, torch.tensor(0)) == 6


JOBS = {'train 64': (_train, 64), 'train 65': (_train, 65), 'measure': (_measure,), 'uneven': (_measure_uneven,), 'nothing': (_nothing,),
    'sum': (_gradient, False), 'mean': (_gradient, True)}
