"""No positions: what stands before a token counts, not where (NoPE, Kazemnejad et al. 2023)."""

from shared import model

model.rotate = lambda x, cos, sin: x
