"""Attention to the last 8 tokens and to the first one (Xiao et al. 2023)."""

from shared import model, torch


def visible(tokens, n):
    key = torch.arange(tokens.size(1), device=tokens.device)
    back = key[-n:, None] - key
    return (back >= 0) & ((back < 8) | (key == 0))


model.visible = visible
