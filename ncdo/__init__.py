"""Train classifiers for goals that are not accuracy: the worst class, head against tail, coverage, recall and precision targets.

    problem = ncdo.worst_case_recall(priors)                # a goal
    reduction = ncdo.SaddlePoint(problem)                   # its multipliers, moved by what the classifier achieves
    loss_fn = ncdo.CostSensitiveLoss(reduction.gain)        # the loss they ask for

`help` of each name below shows its parameters. The chapters in nbs/ explain them.
"""
from importlib import import_module

__version__ = '0.2.0.dev0'
_ROOMS = dict(
    gains='InputError Problem accuracy_goal average_recall_goal balanced_coverage_constraint class_priors confusion_matrix cost_matrix_goal '
        'coverage_constraint head_tail_groups precision_constraint recall recall_constraint worst_case_recall',
    goals='alpha_fair_goal constrained geometric_mean_goal harmonic_mean_goal macro_f1_goal mean_iou_goal micro_f1_goal quadratic_mean_goal '
        'recall_at_precision soft_min_goal worst_f1_goal worst_k_goal',
    losses='CostSensitiveLoss', distillation='DistilledLoss', reductions='SaddlePoint StochasticClassifier',
    samples='certified_recall recall_intervals', postshift='PostShiftClassifier post_shift', features='GoalClassifier',
    adapters='measure_confusion update_gain', data='load')
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name):
    "Rooms are opened when they are asked for: images and scikit-learn cost time that a loop of one's own need not spend"
    if name not in _HOME: raise AttributeError(f"module 'ncdo' has no attribute '{name}'")
    from .common import documented
    found = globals()[name] = documented(getattr(import_module(f'.{_HOME[name]}', __name__), name))
    return found


def __dir__(): return sorted([*globals(), *__all__])
