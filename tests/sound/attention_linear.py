"""Linear attention: a causal sum of outer products, without a softmax (Katharopoulos et al. 2020)."""

from shared import F, model, torch


class Attention(model.Attention):
    def forward(self, x, cos, sin, last_only=False, mask=None):
        B, T, C = x.shape
        D = C // self.n_head
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, D).unbind(2)
        q, k = (F.elu(model.rotate(part, cos, sin)) + 1 for part in (q, k))
        scores = torch.einsum("bthd,bshd->bhts", q, k).tril()
        scores = scores / scores.sum(-1, keepdim=True).clamp(min=1e-6)
        y = self.out(torch.einsum("bhts,bshd->bthd", scores, v).flatten(2))
        return y[:, -1:] if last_only else y


model.Attention = Attention
