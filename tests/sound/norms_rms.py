"""RMSNorm without a gain in place of LayerNorm."""

from shared import F, model

model.norm = lambda x: F.rms_norm(x, (x.size(-1),))
