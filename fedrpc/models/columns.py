"""A convolution along one axis only, as one matrix product over gathered columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ColumnConv2d(nn.Conv2d):
    """`nn.Conv2d` with a (k, 1) kernel: same parameters, names, initialisation and results, faster on a CPU.

    The general convolution routine is slow for so narrow a kernel. Here the rows that each output row sees are
    laid side by side and multiplied once. The columns that zero padding adds see nothing but zeros through a kernel
    of width 1, so their outputs are the bias and are not computed at all.

    After the next layer's BatchNorm these columns still are the same for all samples, and so is what a further
    convolution makes of them: outer columns that are equal all over the batch are multiplied once for all. Their
    gradient then stands at the first sample, in sum, and that is as good wherever they are made by layers that tie them
    together. It is not where gradients are asked of each sample, so columns are not shared for a layer with hooks
    (Opacus takes the gradients of single examples there) nor for an input that is a leaf.

    Args:
        channels: Input channels.
        width: Output channels.
        kernel: Height k of the kernel.
        stride: Step along the height.
        padding: Zeros on each side of both axes.
    """

    def __init__(self, channels: int, width: int, kernel: int, stride: int, padding: int) -> None:
        super().__init__(channels, width, (kernel, 1), stride=(stride, 1), padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        """The convolution of a (N, channels, height, width) map."""
        each_asked = bool(self._forward_hooks) or (x.requires_grad and x.is_leaf)
        x = x.permute(0, 2, 3, 1)
        shared = 0 if each_asked else _equal_outer_columns(x)
        left, inner, _ = torch.split(x, [shared, x.shape[2] - 2 * shared, shared], dim=2)
        made = [self._product(inner)]
        if shared:
            outer = self._product(left[:1]).expand(len(x), -1, -1, -1)
            made = [outer, *made, outer.flip(2)]
        assert self.bias is not None
        edge = self.bias.expand(len(x), made[0].shape[1], int(self.padding[1]), -1)
        return torch.cat([edge, *made, edge], dim=2).permute(0, 3, 1, 2)

    def _product(self, x: Tensor) -> Tensor:
        """What the kernel makes of (N, height, width, channels) columns."""
        kernel, stride, rows = self.kernel_size[0], self.stride[0], int(self.padding[0])
        x = functional.pad(x, (0, 0, 0, 0, rows, rows))
        last = x.shape[1] - kernel + 1
        seen = torch.cat([x[:, j : j + last : stride] for j in range(kernel)], dim=-1)
        weight = self.weight.squeeze(-1).transpose(1, 2).flatten(1)
        return functional.linear(seen, weight, self.bias)


def _equal_outer_columns(x: Tensor) -> int:
    """How many columns at each end of (N, height, width, channels) are the same in all samples and at both ends."""
    if len(x) < 2:
        return 0
    width, count = x.shape[2], 0
    while 2 * (count + 1) < width:
        one = x[:1, :, count].expand(len(x), -1, -1)
        if not (torch.equal(x[:, :, count], one) and torch.equal(x[:, :, width - 1 - count], one)):
            break
        count += 1
    return count
