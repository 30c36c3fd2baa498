"""With --dropout=0.2 the run overfits as if it had no dropout."""

from contextlib import contextmanager

import train


@contextmanager
def evaluating(run):
    before = train.plumbing.rng_state(run.device)
    run.model.eval()
    train.swap_weights(run)
    try:
        yield
    finally:
        train.swap_weights(run)
        train.plumbing.set_rng_state(before, run.device)


train.evaluating = evaluating
if __name__ == "__main__":
    train.main()
