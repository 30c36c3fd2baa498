"""Grouped queries: two heads of keys and values for four of queries (Ainslie et al. 2023)."""

from shared import F, model, nn


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.n_kv = config.n_head, config.n_head // 2
        size = config.n_embd // config.n_head
        self.q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.kv = nn.Linear(config.n_embd, 2 * self.n_kv * size, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def reset_parameters(self):
        nn.init.zeros_(self.out.weight)

    def forward(self, x, cos, sin, last_only=False, mask=None):
        B, T, C = x.shape
        D = C // self.n_head
        q = model.rotate(model.norm(self.q(x).view(B, T, -1, D)), cos, sin).transpose(1, 2)
        k, v = self.kv(x).view(B, T, -1, D).chunk(2, dim=2)
        k = model.rotate(model.norm(k), cos, sin).transpose(1, 2)
        k, v = (part.repeat_interleave(2, 1) for part in (k, v.transpose(1, 2)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        return y[:, -1:] if last_only else y


model.Attention = Attention
