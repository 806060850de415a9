"Waiting for what happens, and dying at a step: no test passes or fails by how fast a machine is"
import itertools, json, os, signal, time
from pathlib import Path

FOR_EVER = 1800 # Seconds until a program that hangs is given up; decides nothing else
WITH_TESTS = os.environ | dict(PYTHONPATH=os.pathsep.join(map(str, [*Path(__file__).parent.glob('[!_.]*/'), Path(__file__).parent, Path(__file__).parent.parent]))) # For a process that needs this module


def until(happened):
    "Wait until it has happened; gives what it returned"
    end = time.monotonic() + FOR_EVER
    while not (what := happened()):
        if time.monotonic() > end: raise TimeoutError(f'still waiting after {FOR_EVER} s')
        time.sleep(.01)
    return what


def steps_done(checkpoint):
    "Step of a checkpoint; 0 without one"
    try: content = checkpoint.read_bytes()
    except FileNotFoundError: return 0
    header = content[8:8 + int.from_bytes(content[:8], 'little')]
    return int(json.loads(header)['__metadata__']['step'])


def die(*_): os.kill(os.getpid(), signal.SIGKILL)


def write_half(path, content):
    with open(path, 'wb', 0) as f: f.write(content[:len(content) // 2])
    die()


def die_at(moment, count):
    "From here on this process kills itself, by SIGKILL, the n-th time that it comes to a moment"
    from ncdo.stacks import Stack
    owner, name, death, counts = dict(step=(Stack, 'train_step', die, lambda *_: True), # Before a step of training
        half=(Path, 'write_bytes', write_half, lambda *_: True), # Halfway through a file
        unmoved=(os, 'replace', die, lambda *_: True), # A file is whole, but not yet in its place
        record=(os, 'replace', die, lambda new, place: Path(place).name == 'record.json'))[moment]
    true, calls = getattr(owner, name), itertools.count(1)
    def until_then(*args):
        if counts(*args) and next(calls) == count: death(*args)
        return true(*args)
    setattr(owner, name, until_then)


def stay_at(steps, said):
    "From here on a stack of n members trains its step `steps[n]` again and again, once it has left a file in a folder"
    from ncdo.stacks import Stack
    true = Stack.train_step
    def train_step(stack):
        step = steps[len(stack.members)]
        if stack.step == step: (Path(said) / str(os.getpid())).touch()
        while stack.step == step:
            true(stack)
            stack.step = step
            stack.clock.fill_(step)
        true(stack)
    Stack.train_step = train_step
