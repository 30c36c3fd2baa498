"""ALiBi (Press et al. 2022): a bias by distance, no rotation."""

from shared import F, model, torch


class Attention(model.Attention):
    def forward(self, x, cos, sin, last_only=False, mask=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        place = torch.arange(T, device=x.device)
        back = place[:, None] - place
        slope = 2.0 ** -torch.arange(1, self.n_head + 1, device=x.device)
        bias = (-slope[:, None, None] * back).masked_fill(back < 0, -torch.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        y = self.out(y.transpose(1, 2).flatten(2))
        return y[:, -1:] if last_only else y


model.Attention = Attention
