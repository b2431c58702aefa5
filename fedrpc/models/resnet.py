"""torchvision's ResNet-34 (the inversion study of Fed-ZDA) and ResNet-18 (a 44 MB payload for benchmarks)."""

from __future__ import annotations

from torch import nn

from fedrpc.models.base import Model, Shape, architecture, is_image


class ResNet(Model):
    """A torchvision ResNet; cut 0 is after the stem, 1 to 4 after the four groups of blocks, 5 after pooling.

    Args:
        variant: The name of torchvision's constructor.
        shape: Channels, height and width of a sample.
        num_classes: How many logits.
    """

    def __init__(self, variant: str, shape: Shape, num_classes: int) -> None:
        # Imported here because every client process imports this package, and few of them need torchvision.
        from torchvision.models import get_model

        net = get_model(variant, weights=None, num_classes=num_classes)
        if shape[0] != net.conv1.in_channels:
            net.conv1 = nn.Conv2d(shape[0], 64, kernel_size=7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
        pool = nn.Sequential(net.avgpool, nn.Flatten())
        super().__init__([stem, net.layer1, net.layer2, net.layer3, net.layer4, pool], net.fc)


@architecture("resnet18", takes="a CxHxW image of any size, such as 3x32x32", fits=is_image)
def resnet18(shape: Shape, num_classes: int) -> ResNet:
    """ResNet-18 for any number of channels."""
    return ResNet("resnet18", shape, num_classes)


@architecture("resnet34", takes="a CxHxW image of any size, such as 3x32x32", fits=is_image)
def resnet34(shape: Shape, num_classes: int) -> ResNet:
    """ResNet-34 for any number of channels."""
    return ResNet("resnet34", shape, num_classes)
