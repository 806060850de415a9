"Two processes with DistributedDataParallel compute what one does"
import importlib.util, os, pytest, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler, Subset, SubsetRandomSampler, TensorDataset
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


SAMPLE = TensorDataset(torch.randn(21, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64), torch.arange(21) % 3)

class Streamed(IterableDataset):
    "The sample as a stream"
    def __iter__(self): return iter(SAMPLE)

class StreamedWithLength(Streamed):
    def __len__(self): return 21

def shares(rank, n=21): return Subset(SAMPLE, range(rank, n, 2))

def accelerated(loader, **settings):
    "What accelerate makes of a loader for one of two processes"
    from accelerate import Accelerator, DataLoaderConfiguration
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings)).prepare(loader)

LOADERS = {'own shares': lambda rank: DataLoader(shares(rank), 4), 'all on both': lambda rank: DataLoader(SAMPLE, 4, shuffle=True), 'list': lambda rank: list(DataLoader(shares(rank), 4)),
    'generator': lambda rank: (batch for batch in DataLoader(shares(rank), 4)), 'sampler': lambda rank: DataLoader(SAMPLE, 4, sampler=SubsetRandomSampler(range(rank, 21, 2))),
    'DistributedSampler, 20': lambda rank: DataLoader(Subset(SAMPLE, range(20)), 4, sampler=DistributedSampler(range(20), 2, rank)),
    'DistributedSampler': lambda rank: DataLoader(SAMPLE, 4, sampler=DistributedSampler(SAMPLE, 2, rank)),
    'DistributedSampler in a batch_sampler': lambda rank: DataLoader(SAMPLE, batch_sampler=BatchSampler(DistributedSampler(SAMPLE, 2, rank), 4, False)),
    'DistributedSampler, drop_last': lambda rank: DataLoader(SAMPLE, 4, sampler=DistributedSampler(SAMPLE, 2, rank, drop_last=True)),
    'drop_last': lambda rank: DataLoader(shares(rank), 4, drop_last=True), 'nan on one': lambda rank: [(x * (torch.nan if rank else 1), y) for x, y in DataLoader(shares(rank), 4)],
    'used on one': lambda rank: iter(list(DataLoader(shares(rank), 4)) if rank == 0 else [])}
ACCELERATED = {'accelerate': lambda rank: accelerated(DataLoader(SAMPLE, 4)), 'accelerate, shuffled': lambda rank: accelerated(DataLoader(SAMPLE, 4, shuffle=True)),
    'accelerate, split': lambda rank: accelerated(DataLoader(SAMPLE, 4), split_batches=True), 'accelerate, dispatched': lambda rank: accelerated(DataLoader(SAMPLE, 4), dispatch_batches=True),
    'accelerate, drop_last': lambda rank: accelerated(DataLoader(Subset(SAMPLE, range(20)), 4, drop_last=True)), 'accelerate, 16': lambda rank: accelerated(DataLoader(Subset(SAMPLE, range(16)), 4)),
    'accelerate, even_batches=False': lambda rank: accelerated(DataLoader(SAMPLE, 4), even_batches=False),
    'accelerate, subset': lambda rank: accelerated(DataLoader(SAMPLE, 4, sampler=SubsetRandomSampler(range(9)))),
    'accelerate, subset of 8': lambda rank: accelerated(DataLoader(SAMPLE, 4, sampler=SubsetRandomSampler(range(8)))),
    'accelerate, batch_sampler': lambda rank: accelerated(DataLoader(SAMPLE, batch_sampler=BatchSampler(SequentialSampler(SAMPLE), 4, False))),
    'accelerate, batches of indices': lambda rank: accelerated(DataLoader(SAMPLE, batch_sampler=[list(range(i, min(i + 7, 21))) for i in range(0, 21, 7)]), even_batches=False),
    'accelerate, stream': lambda rank: accelerated(DataLoader(Streamed(), 4)), 'accelerate, stream with a length': lambda rank: accelerated(DataLoader(StreamedWithLength(), 4)),
    'accelerate, stream in shards': lambda rank: accelerated(DataLoader(Streamed(), 4), dispatch_batches=False),
    'accelerate, sized stream in shards': lambda rank: accelerated(DataLoader(StreamedWithLength(), 4), dispatch_batches=False)}
HAVE_ACCELERATE = bool(importlib.util.find_spec('accelerate'))

def _load(rank, name):
    "What the measure says, and how large the sample is that it saw"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT='29511', ACCELERATE_USE_CPU='true')
    try: return dict(C=measure_confusion(linear(), (LOADERS | ACCELERATED)[name](rank), 3), told='')
    except InputError as e: return dict(told=str(e))

def whole(n): return confusion_matrix(SAMPLE[:n][1], linear()(SAMPLE[:n][0]).argmax(-1), 3)

@pytest.mark.parametrize('name,n', [('own shares', 21), ('all on both', 21), ('list', 21), ('generator', 21), ('sampler', 21), ('DistributedSampler, 20', 20)])
def test_each_example_once_is_the_matrix_of_the_whole_sample(both, name, n):
    for found in both[name]: assert torch.allclose(found['C'], whole(n), atol=1e-12)

@pytest.mark.parametrize('name,first,second', [('DistributedSampler', *['repeats 1 of 21 examples'] * 2), ('DistributedSampler in a batch_sampler', *['repeats 1 of 21 examples'] * 2),
    ('DistributedSampler, drop_last', *['leaves out 1 of 21 examples'] * 2), ('drop_last', 'leaves out 3 of 11', 'leaves out 2 of 10'), ('nan on one', 'another process could not measure', '10 of 10 examples have scores'),
    ('used on one', 'another process could not measure', 'yields nothing')])
def test_what_one_process_must_refuse_all_refuse(both, name, first, second):
    "None waits for the others for ever"
    for said, message in zip(both[name], (first, second)): assert message in said['told'] and '\n' not in said['told']

@pytest.mark.skipif(not HAVE_ACCELERATE, reason='needs accelerate')
@pytest.mark.parametrize('name,n', [('accelerate, 16', 16), ('accelerate, even_batches=False', 21), ('accelerate, subset of 8', 8), ('accelerate, batches of indices', 21)])
def test_accelerate_may_share_a_loader_that_comes_out_even(both, name, n):
    for found in both[name]: assert not found['told'] and torch.allclose(found['C'], whole(n), atol=1e-12)

@pytest.mark.skipif(not HAVE_ACCELERATE, reason='needs accelerate')
@pytest.mark.parametrize('name', ['', ', shuffled', ', split', ', batch_sampler', ', sized stream in shards', ', dispatched', ', stream', ', stream with a length', ', subset', ', drop_last',
    ', stream in shards'])
def test_what_accelerate_repeats_or_leaves_out_is_refused(both, name):
    "21 images on two processes became 24, in silence"
    seen = '22 examples' if name in (', dispatched', ', stream', ', stream with a length') else '24 examples were seen by 2 process(es) in a sample of 21: this loader repeats'
    message = {', subset': '16 examples were seen by 2 process(es) in a sample of 9', ', drop_last': '16 examples were seen by 2 process(es) in a sample of 20: this loader leaves out',
        ', stream in shards': 'without a length is filled up with repeated examples'}.get(name, seen)
    for found in both[f'accelerate{name}']: assert message in found['told'] and 'own share' in found['told']


JOBS = {'train 64': (_train, 64), 'train 65': (_train, 65), 'measure': (_measure,), 'uneven': (_measure_uneven,), 'nothing': (_nothing,),
    'sum': (_gradient, False), 'mean': (_gradient, True)} | {name: (_load, name) for name in LOADERS | (ACCELERATED if HAVE_ACCELERATE else {})}
