"One step of λ for all: a stack's multipliers are those of `SaddlePoint`, shown the same confusion matrices"
import pytest, torch
from ncdo.data import load
from ncdo.reductions import SaddlePoint
from ncdo.runs import GOALS, Spec
from ncdo.stacks import Stack, fit
from ncdo.training import Member, Recipe

RECIPE = Recipe(steps=120, batch_size=32, update_every=4)
LOSS = {name: 'auto' for name in GOALS} | {'worst-case-recall': 'logit-adjusted', 'precision': 'hybrid-b', 'coverage': 'hybrid-a', 'balanced-coverage': 'hybrid-b'}
MEASURED = [name for name, goal in GOALS.items() if goal.measured]


class Watched(Stack):
    "A stack that keeps the confusion matrices its updates saw"
    def __init__(self, *args):
        self.watched = []
        super().__init__(*args)

    def _against_truth(self, part, predicted):
        C = super()._against_truth(part, predicted)
        if self.step < self.recipe.steps: self.watched.append(C.clone())
        return C


@pytest.fixture(scope='module')
def trained():
    "For classes and for head and tail, at two step sizes: each goal, all as one stack, to the end"
    data = load('digits-lt')
    how = [dict(objective=name, loss=LOSS[name], groups=groups, step_size=size, tau=.9) for name in MEASURED
        for groups in ('class', 'head-tail')[:1 + ('groups' in GOALS[name].asks)] for size in (.3, 3.)]
    specs = [Spec(model='mlp-16', **h) for h in how]
    members = [Member(data, s.problem(data.priors), s.loss, s.seed, s.step_size, max_multiplier=s.max_multiplier) for s in specs]
    stack = Watched(members, 'mlp-16', RECIPE, 'cpu')
    results = fit(stack)
    return specs, members, torch.stack(stack.watched), results


def test_every_goal_is_there(trained): assert {s.objective for s in trained[0]} == set(MEASURED) >= {'worst-case-recall', 'recall', 'precision', 'coverage', 'balanced-coverage'}


@pytest.mark.parametrize('objective', MEASURED)
def test_the_stack_moves_multipliers_as_saddle_point_does(trained, objective):
    "Thirty updates, each multiplier at each of them, to the rounding of float64"
    specs, members, seen, results = trained
    assert len(seen) == 30
    far = []
    for k, spec in enumerate(specs):
        if spec.objective != objective: continue
        game, member = SaddlePoint(members[k].problem, spec.step_size), members[k]
        for C in seen[:, k]: game.update(C)
        for name in ('multipliers', 'objective', 'violations'):
            ours, theirs = [torch.stack([torch.as_tensor(h[name], dtype=torch.float64) for h in rows]) for rows in (results[k].history, game.history)]
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14, equal_nan=True), (member.loss, spec.groups, name)
        assert torch.allclose(results[k].reduction.multipliers, game.multipliers, rtol=1e-12, atol=1e-14)
        assert results[k].reduction.best == game.best and results[k].reduction.feasible == game.feasible
        far.append((game.history[0]['multipliers'].nan_to_num() - game.multipliers).abs().max())
    assert max(far) > .01 # They moved
