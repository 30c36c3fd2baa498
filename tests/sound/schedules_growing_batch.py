"""From step 10 on a batch is twice as large."""

from shared import train

train.sequences_at = lambda step: (1 + (step >= 10)) * train.batch_size * train.accum_steps
