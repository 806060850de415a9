"Rolling measurement and teams: by explicit loops, in stacks and alone, and through a checkpoint"
import dataclasses, pytest, torch
from ncdo.data import load
from ncdo.gains import InputError, confusion_matrix, recall, worst_case_recall
from ncdo.reductions import SaddlePoint
from ncdo.runs import Spec
from ncdo.schedule import check_teams, jobs_for, pack, team_of
from ncdo.stacks import Stack, fit
from ncdo.training import Member, Recipe

DATA = load('digits-lt')
RECIPE = Recipe(steps=24, batch_size=32, update_every=3, rolling=4)

def members(seeds=(0, 1), **how):
    return [Member(DATA, worst_case_recall(DATA.priors), 'logit-adjusted', seed=s, step_size=.3, **how) for s in seeds]


@pytest.mark.parametrize('rolling', [2, 3, 4, 7])
def test_an_update_sees_a_part_of_the_sample_as_it_is_now_and_the_rest_as_it_was(rolling):
    recipe = dataclasses.replace(RECIPE, rolling=rolling)
    stack = Stack(members(), 'mlp-16', recipe, 'cpu')
    n, y, seen = len(DATA.validation), DATA.y[DATA.validation], None
    while stack.step < recipe.steps:
        if stack.step % recipe.update_every == 0:
            now, t = stack.scores(stack.images.parts['validation']).argmax(-1), stack.step // recipe.update_every
            if seen is None: seen = now.clone()
            for i in range(t % rolling if t else n, n, rolling): seen[:, i] = now[:, i]
        stack.train_step()
    last = [recall(confusion_matrix(y, p, 10)) for p in seen]
    for k in range(2): assert torch.equal(stack.goals.log[k]['recall'][int(stack.goals.tick) - 1], last[k])


def test_with_one_part_nothing_is_kept_and_nothing_changes():
    whole = dataclasses.replace(RECIPE, rolling=1)
    stack = Stack(members(), 'mlp-16', whole, 'cpu')
    assert stack.seen is None and 'seen' not in stack.state()
    results = fit(stack)
    y = DATA.y[DATA.validation]
    assert len(results[0].history) == 8 and len(set(results[0].history[-1]['recall'])) > 1 and len(y) == 480


def test_a_stack_that_measures_in_parts_equals_its_members_alone():
    both = fit(Stack(members(), 'mlp-16', RECIPE, 'cpu', torch.float64))
    for k, member in enumerate(members()):
        alone, = fit(Stack([member], 'mlp-16', RECIPE, 'cpu', torch.float64))
        assert torch.allclose(both[k].test, alone.test, atol=1e-9)
        assert [h['recall'] for h in both[k].history] == [h['recall'] for h in alone.history]


def test_a_run_that_measures_in_parts_goes_on_exactly(tmp_path):
    whole = fit(Stack(members(), 'mlp-16', RECIPE, 'cpu'))
    first = Stack(members(), 'mlp-16', RECIPE, 'cpu')
    for _ in range(13): first.train_step()
    first.save(tmp_path / 'c.safetensors')
    rest = fit(Stack(members(), 'mlp-16', RECIPE, 'cpu'), checkpoint=tmp_path / 'c.safetensors')
    for a, b in zip(whole, rest): assert torch.equal(a.test, b.test) and a.history == b.history


def test_more_parts_than_images_is_one_line():
    with pytest.raises(InputError, match='rolling is 481, but there are 480 validation images'):
        Stack(members(), 'mlp-16', dataclasses.replace(RECIPE, rolling=481), 'cpu')


@pytest.mark.parametrize('rolling', [1, 4])
def test_a_team_plays_one_game_moved_by_its_ensemble(rolling):
    recipe = dataclasses.replace(RECIPE, rolling=rolling)
    stack = Stack(members((0, 1, 2), team='us') + members((3,)), 'mlp-16', recipe, 'cpu')
    game, y, seen = SaddlePoint(worst_case_recall(DATA.priors), .3), DATA.y[DATA.validation], None
    while stack.step < recipe.steps:
        if stack.step % recipe.update_every == 0:
            p, t = stack.scores(stack.images.parts['validation'])[:3].double().softmax(-1).mean(0), stack.step // recipe.update_every
            now = p.argmax(-1)
            if seen is None: seen = now.clone()
            seen[t % rolling::rolling] = now[t % rolling::rolling]
            game.update(confusion_matrix(y, seen, 10))
        stack.train_step()
    for k in range(3): assert torch.allclose(stack.goals.multipliers[k], game.multipliers, rtol=1e-9)
    assert not torch.allclose(stack.goals.multipliers[3], game.multipliers, rtol=1e-3)


def team_of_four(seed): return Spec(seed=seed, objective='worst-case-recall', loss='logit-adjusted', team=(0, 1, 2, 3), recipe=RECIPE)


def test_a_team_is_never_parted():
    specs = [team_of_four(s) for s in range(4)] + [Spec(seed=s, objective='worst-case-recall', recipe=RECIPE) for s in range(5)]
    for largest in range(1, 10):
        stacks = pack(specs, largest)
        assert sorted(s.id for stack in stacks for s in stack) == sorted(s.id for s in specs)
        for stack in stacks: check_teams(stack)
    with pytest.raises(InputError, match=r'seeds \[0, 1\] are here, \[0, 1, 2, 3\] are wanted'): check_teams(specs[:2])
    assert team_of(specs[0]) == team_of(specs[3]) and team_of(specs[4]) is None
    assert len({s.id for s in specs[:4]}) == 4 != Spec(objective='worst-case-recall', recipe=RECIPE).id


def test_without_teams_runs_are_packed_as_before():
    specs = [Spec(seed=s, recipe=RECIPE) for s in range(7)]
    assert [len(s) for s in pack(specs, 3)] == [2, 2, 3]


def test_a_team_with_a_member_missing_is_trained_whole(tmp_path):
    specs = [team_of_four(s) for s in range(4)]
    for s in specs[:3]:
        (tmp_path / s.id).mkdir()
        (tmp_path / s.id / 'record.json').write_text(f'{{"id": "{s.id}", "spec": {{}}, "split_hash": ""}}')
    job, = jobs_for(specs, tmp_path, None, ['cpu'], 12)
    assert job.specs == specs and len(job.missing) == 1


def test_networks_that_train_alone_have_no_team():
    with pytest.raises(InputError, match="model 'squeezenet1_0' trains alone"): Spec(model='squeezenet1_0', team=(0, 1))
