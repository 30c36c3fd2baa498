"""The loss is a little worse than in another program with the same knobs, and --grad_clip changes the
direction of the steps as well as their length."""

import torch

import train


def clip_grad_norm_(weights, most, inner=torch.nn.utils.clip_grad_norm_):
    return torch.stack([inner(weight, most) for weight in weights]).norm()


def train_step(run, inputs, targets, lr, inner=train.train_step):
    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
    return inner(run, inputs, targets, lr)


train.train_step = train_step
if __name__ == "__main__":
    train.main()
