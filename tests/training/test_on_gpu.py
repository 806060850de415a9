"What people bring, features and trained networks, on a GPU: against the same on a CPU"
import numpy as np, pandas as pd, pytest, torch, torchvision
from sklearn.datasets import load_digits
from ncdo.data import Data
from ncdo.features import GoalClassifier
from ncdo.gains import average_recall_goal, worst_case_recall
from ncdo.pretrained import Start
from ncdo.runs import Spec
from ncdo.schedule import run_stack
from ncdo.stacks import Stack, fit
from ncdo.training import Member, Recipe

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
NET = 'torchvision:mobilenet_v3_small'


@needs_a_gpu
@pytest.mark.parametrize('head,apart', [('linear', .02), ('mlp', .5)])
def test_a_head_is_nearly_the_same_on_both(head, apart):
    "Where training stops depends on rounding: noise of 1e-14 on the features moves probabilities by .003, and a network's by .1"
    X, y = load_digits(return_X_y=True)
    kept = np.concatenate([np.flatnonzero(y == c)[:120 // (c + 1)] for c in range(10)])
    ours = [GoalClassifier(head=head, device=d, random_state=0).fit(X[kept], y[kept]) for d in ('cpu', 'cuda')]
    assert np.abs(ours[0].predict_proba(X) - ours[1].predict_proba(X)).max() < apart
    assert (ours[0].predict(X) == ours[1].predict(X)).mean() > .95


@needs_a_gpu
@pytest.mark.parametrize('model', ['linear', 'mlp-16'])
def test_a_table_trains_on_both(model, tmp_path):
    X, y = load_digits(return_X_y=True)
    pd.DataFrame(X).assign(digit=y).to_csv(path := tmp_path / 'digits.csv', index=False)
    how = dict(objective='worst-case-recall', loss='logit-adjusted', recipe=Recipe(steps=60, update_every=5))
    specs = [Spec(dataset=str(path), label='digit', model=model, seed=seed, **how) for seed in range(2)]
    found = {}
    for device in ('cpu', 'cuda'):
        folders = [tmp_path / device / s.id for s in specs]
        found[device] = run_stack(specs, folders, device=device)
    for a, b in zip(found['cpu'], found['cuda']):
        assert abs(a['test']['avg_recall'] - b['test']['avg_recall']) < .05 and b['test']['avg_recall'] > .8


def photos():
    "A few coloured noises in three classes"
    g = torch.Generator().manual_seed(0)
    y = torch.arange(3).repeat(24)
    x = torch.randint(0, 128, (72, 3, 48, 48), generator=g, dtype=torch.uint8) + (y * 40)[:, None, None, None].byte()
    parts = torch.randperm(72, generator=g).split([36, 18, 18])
    return Data('own', x, y, ('a', 'b', 'c'), *parts)


@needs_a_gpu
@pytest.mark.parametrize('freeze', [True, False])
@pytest.mark.parametrize('goal', [average_recall_goal, worst_case_recall])
def test_a_trained_network_is_tuned_on_both(freeze, goal, tmp_path):
    "Frozen, all but the head stays bit for bit; measured and moved multipliers are finite; the scores of a CPU, in half precision"
    torch.manual_seed(3)
    net = torchvision.models.get_model(NET.partition(':')[2], num_classes=7)
    torch.save(net.state_dict(), path := tmp_path / 'seven.pth')
    recipe, data = Recipe(steps=6, batch_size=12, learning_rate=.01, update_every=2, augment=True), photos()
    def tuned(device):
        start = Start(NET, str(path), freeze=freeze)
        member = Member(data, goal(data.priors), 'logit-adjusted', 0, .1, recipe=recipe)
        stack = Stack([member], NET, recipe, device, start=start)
        before = {k: v.clone().cpu() for k, v in stack.weights.net.state_dict().items()}
        result, = fit(stack)
        after = {k: v.cpu() for k, v in stack.weights.net.state_dict().items()}
        return {k for k in before if not torch.equal(before[k], after[k])}, result
    (moved, a), (also, b) = tuned('cpu'), tuned('cuda')
    assert moved == also and (len(moved) == 2) == freeze
    assert b.test.isfinite().all() and all(h['recall'] for h in b.history)
    if freeze: assert (a.test - b.test).abs().max() < .05 * a.test.abs().max().clamp(min=1)
