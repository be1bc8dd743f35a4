"""Provide models and their data, to try a strategy before changing your own code: plain modules, independent of strategies.

model = X.applications.Resnet50(num_classes=10, image_size=32)
for batch in model.get_train_dataloader("digits", batch_size=64):
    loss = model.loss(batch)
"""

from .bert import Bert, Bert_base, Bert_large
from .bert_encoder import BertConfig
from .evaluate import evaluate
from .resnet import Resnet20, Resnet50
from .vgg import VGG16

__all__ = ["Bert", "BertConfig", "Bert_base", "Bert_large", "Resnet20", "Resnet50", "VGG16", "evaluate"]


def __dir__() -> list[str]:
    return sorted(__all__)
