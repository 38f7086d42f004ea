"""A model that begins with weights from a file, and is trained in no time."""

from dataclasses import dataclass

from torch import nn

from fedlens.models import Model, load_weights


class Net(nn.Module):
    def __init__(self, classes: int, inputs: int):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * inputs, classes)

    def features(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.features(x))


@dataclass(frozen=True)
class Tiny(Model):
    weights: str = ""

    def network(self, classes, channels, size):
        module = Net(classes, size * size)
        if self.weights:
            load_weights(module, self.weights)
        return module
