"""Learn the mean distribution of one or more teachers, which are checkpoints of other runs."""

import torch.nn.functional as F
from torch import nn

import plumbing
import train

train.knob("teachers", "", "a.pt b.pt: checkpoints whose mean distribution is learned")
train.knob("soft", 0.7, "weight of the teachers")


class Student(nn.Module):
    def __init__(self, inner, teachers):
        super().__init__()
        self.inner = inner
        self.teachers = [teacher.eval().requires_grad_(False) for teacher in teachers]  # a list:
        #  they are no part of the model, and in no checkpoint

    def forward(self, inputs, targets=None):
        if targets is None or not self.training:
            return self.inner(inputs, targets)
        logits = self.inner(inputs).float().flatten(0, 1)
        goals = [teacher(inputs).float().flatten(0, 1).softmax(-1) for teacher in self.teachers]
        hard = F.cross_entropy(logits, targets.flatten())
        soft = F.cross_entropy(logits, sum(goals) / len(goals))
        return (1 - train.soft) * hard + train.soft * soft, {"hard": hard, "soft": soft}


def build_model(config, vocab_size, inner=train.build_model):
    teachers = []
    for path in config["teachers"].split():
        saved = plumbing.read_checkpoint(path)
        teachers.append(inner(saved["config"], vocab_size))
        teachers[-1].load_state_dict(saved["model"])
    return Student(inner(config, vocab_size), teachers)


def open_dataset(saved, inner=train.open_dataset):
    *data, facts = inner(saved)
    return *data, facts | {"files": train.teachers.split()}  # the run is another one with others


train.build_model, train.open_dataset = build_model, open_dataset
if __name__ == "__main__":
    train.main()
