"""Networks by name. Every module has `features(x)`, one vector per image, and `head`, from that vector to logits."""

from __future__ import annotations

from ..core.errors import BadInput, nearest
from ..core.network import Dropout
from .cnn import Cnn, Cnn2, CnnSmall, Mlp
from .custom import Custom
from .model import Model
from .pse_net import PseNet
from .resnet import ResNet8, ResNet18, ResNet20, ResNet32, ResNet34, ResNet50, ResNet56
from .vgg import Vgg11
from .weights import load_weights

MODELS: dict[str, type[Model]] = {
    "cnn": Cnn,
    "cnn_small": CnnSmall,
    "cnn2": Cnn2,
    "mlp": Mlp,
    "resnet8": ResNet8,
    "resnet18": ResNet18,
    "resnet34": ResNet34,
    "resnet50": ResNet50,
    "resnet20": ResNet20,
    "resnet32": ResNet32,
    "resnet56": ResNet56,
    "vgg11": Vgg11,
    "pse_net": PseNet,
    "custom": Custom,
}


def model_named(name: str) -> Model:
    """The configuration of that name with its defaults; `my_module:MyNet` is short for custom with that path."""
    if ":" in name:
        return Custom(path=name)
    if name not in MODELS:
        raise BadInput(f"model={name} is not known; {nearest(name, MODELS)}")
    return MODELS[name]()
