"Random toys whose probabilities are known, and solvers that share with ncdo only what a goal means: programs for HiGHS, enumeration, search"
import os, numpy as np, scipy.sparse as sp, torch
from scipy.optimize import linprog
from ncdo.gains import bayes_rule
from ncdo.reductions import SaddlePoint, best_mixture
from ncdo.theory import expected_confusion

TOYS = int(os.environ.get('NCDO_TOYS', 2)) # Of each goal; the issue asks for 200


def toy(seed, n=None):
    "Probabilities (n, m) of equally likely points, 3 to 8 classes, none of them impossible anywhere; and the class mix"
    rng = np.random.default_rng(seed)
    m, n = int(rng.integers(3, 9)), n or int(rng.integers(20, 25))
    p = torch.as_tensor(rng.dirichlet(np.full(m, .6), n)) * .98 + .02 / m
    return p, p.mean(0)

def answer(p): return lambda G: expected_confusion(p, bayes_rule(p, G)) # The best classifier's confusion, for a gain

def as_it_came(p): return expected_confusion(p, p.argmax(1))


def program(p, gains, offsets, least=()): # (n, m); (r, m, m); (r,); pairs of (m, m) and a number
    "The largest of min_r offset_r + <gain_r, C> over randomised classifiers with <B, C> >= b, and the C it is reached at; -inf if there are none"
    n, m = p.shape
    flat = lambda G: (p @ torch.as_tensor(G)).flatten().numpy() / n
    rows = [np.append(-flat(G), 1.) for G in gains] + [np.append(-flat(B), 0.) for B, _ in least]
    one_each = sp.hstack([sp.kron(sp.eye_array(n), np.ones((1, m))), sp.csr_array((n, 1))])
    cost, bounds = np.append(np.zeros(n * m), -1.), [(0, 1)] * (n * m) + [(None, 2)]
    found = linprog(cost, np.array(rows), [*offsets, *[-b for _, b in least]], one_each, np.ones(n), bounds, method='highs')
    if found.status: return -np.inf, None
    return -found.fun, p.T @ torch.as_tensor(found.x[:-1]).view(n, m) / n


def cutting_planes(value, p, start, least=(), close=2e-5, most=300): # Concave function of C; (n, m); (m, m) where to begin
    "Lower and upper bound of the largest value, by tangents whose least is ever larger than the function"
    gains, offsets, C, low, high = [], [], start, -np.inf, np.inf
    for _ in range(most):
        x = C.clone().requires_grad_()
        f = value(x)
        G, = torch.autograd.grad(f, x)
        meets = all((torch.as_tensor(B) * C).sum() >= b - 1e-7 for B, b in least)
        if meets: low = max(low, f.item())
        if high - low < close: break
        gains.append(G)
        offsets.append((f.detach() - (G * C).sum()).item())
        high, C = program(p, gains, offsets, least)
    return low, high


def ladder(problem, p, updates=400, tolerance=1e-9):
    "The game with steps from coarse to fine, as in a post-shift"
    game, respond = SaddlePoint(problem, floor=1e-30, tolerance=tolerance), answer(p)
    C = respond(game.gain)
    for step in np.geomspace(3, .01, 8):
        game.step_size = [step / 6 if domain == 'average' else step for domain, _ in problem.parts]
        for _ in range(updates // 8): C = respond(game.update(C))
    return game

def mixed(game):
    "Objective and violations of the best mixture, and the weights"
    w = torch.as_tensor(best_mixture(game))
    earned, violations = [torch.stack([h[name] for h in game.history]) for name in ('objective', 'violations')]
    return game.problem._overall(w @ earned, game.problem.b - w @ violations).item(), w @ violations, w


def f1_of(C): return 2 * C.diagonal() / (C.sum(0) + C.sum(1))

def best_threshold(p, background):
    "Micro-F1 by enumeration: the background where no other class reaches a threshold"
    others = p.clone()
    others[:, background] = -1
    top, named = others.max(1)
    hits = lambda C: 2 * (C.diagonal().sum() - C[background, background]) / (2 - C[background].sum() - C[:, background].sum())
    tried = [named.where(top >= threshold, background) for threshold in [*top.tolist(), 2.]]
    return max(hits(expected_confusion(p, predicted)).item() for predicted in tried[:-1])

def f1_constraint(m, i, level):
    "B with <B, C> = level times row and column of class i less twice its hits, negative"
    B = torch.zeros(m, m, dtype=torch.float64)
    B[i] -= level
    B[:, i] -= level
    B[i, i] += 2
    return B

def best_worst_f1(p, close=1e-6):
    "Bisection: is there a classifier with every F1 at least so high?"
    m, low, high = p.shape[1], 0., 1.
    while high - low > close:
        level = (low + high) / 2
        reached, _ = program(p, [f1_constraint(m, i, level) for i in range(m)], [0.] * m)
        low, high = (level, high) if reached >= 0 else (low, level)
    return low

def mean_of_worst(p, q, k):
    "The largest mean of the k smallest recalls: eta less the mean shortfall of each recall from it"
    n, m = p.shape
    rows = np.zeros((m, n * m))
    for i in range(m): rows[i, i::m] = p[:, i] / n / q[i]
    cost = np.r_[np.zeros(n * m), -1., np.full(m, 1 / k)]
    one_each = np.hstack([np.kron(np.eye(n), np.ones((1, m))), np.zeros((n, 1 + m))])
    bounds = [(0, 1)] * (n * m) + [(None, None)] + [(0, None)] * m
    return -linprog(cost, np.hstack([-rows, np.ones((m, 1)), -np.eye(m)]), np.zeros(m), one_each, np.ones(n), bounds, method='highs').fun

def search(score, p, starts=40, rounds=30):
    "A local optimum from each of many random rules argmax a (p - b), every one pulled up by best responses to the gradient; the best of them"
    m, draw, best = p.shape[1], torch.Generator().manual_seed(0), -np.inf
    for _ in range(starts):
        a, b = .05 + torch.rand(m, generator=draw, dtype=torch.float64), torch.rand(m, generator=draw, dtype=torch.float64) / 2
        C = expected_confusion(p, (a * (p - b)).argmax(1))
        for _ in range(rounds):
            x = C.clone().requires_grad_()
            G, = torch.autograd.grad(reached := score(x), x)
            if reached <= best - .2: break
            best, old, C = max(best, reached.item()), C, expected_confusion(p, (p @ G).argmax(1))
            if (C - old).abs().max() < 1e-12: break
    return best

def constrained_search(score, p, least, starts=8, rounds=25):
    "A local optimum under <B, C> >= b from each of many starts: the program for the gradient, and the best point on the way to its answer; the best of them"
    m, draw, best = p.shape[1], torch.Generator().manual_seed(0), -np.inf
    for _ in range(starts):
        _, C = program(p, [torch.rand(m, m, generator=draw, dtype=torch.float64) + torch.eye(m)], [0.], least)
        for _ in range(rounds):
            x = C.clone().requires_grad_()
            G, = torch.autograd.grad(score(x), x)
            _, there = program(p, [G], [0.], least)
            path = [C + share * (there - C) for share in np.linspace(0, 1, 41)]
            scores = torch.stack([score(x) for x in path])
            if scores.max() < scores[0] + 1e-7: break
            C = path[scores.argmax()]
        best = max(best, score(C).item())
    return best

def best_mixture_of(value, points, close=1e-6, most=300): # Concave function of (m,) recalls; (T, m)
    "The largest value at a mixture of the points, from below, by tangents"
    T, low, high, rows, offsets, w = len(points), -np.inf, np.inf, [], [], np.full(len(points), 1 / len(points))
    for _ in range(most):
        x = torch.as_tensor(w @ points).clamp(min=1e-4).requires_grad_()
        slope, = torch.autograd.grad(f := value(x), x)
        low = max(low, value(torch.as_tensor(w @ points)).item())
        if high - low < close: break
        rows.append(np.append(-points @ slope.numpy(), 1.))
        offsets.append((f - slope @ x).item())
        found = linprog(np.append(np.zeros(T), -1.), np.array(rows), offsets, np.append(np.ones(T), 0.)[None], [1.], [(0, 1)] * T + [(None, 2)], method='highs')
        w, high = found.x[:-1], -found.fun
    return low
