"""A convolution along one axis only, as one matrix product over gathered columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ColumnConv2d(nn.Conv2d):
    """`nn.Conv2d` with a (k, 1) kernel: same parameters, names, initialisation and results, faster on a CPU.

    The general convolution routine is slow for such a narrow kernel. Here the rows that each output row depends on are
    laid side by side and multiplied once. The columns that zero padding adds hold only zeros, so their outputs equal
    the bias and are not computed.

    After the next layer's BatchNorm these columns are still the same for all samples, and so are the outputs of a
    further convolution: outer columns that are equal in the whole batch are multiplied once. Their summed gradient is
    then attributed to the first sample, which makes no difference to the gradients of the layers before. It would where
    per-sample gradients are needed, so columns are not shared for a layer with hooks (Opacus's per-example gradients)
    nor for an input that is a leaf.

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
        per_sample = bool(self._forward_hooks) or (x.requires_grad and x.is_leaf)
        x = x.permute(0, 2, 3, 1)
        shared = 0 if per_sample else _count_equal_outer_columns(x)
        left, inner, _ = torch.split(x, [shared, x.shape[2] - 2 * shared, shared], dim=2)
        columns = [self._multiply(inner)]
        if shared:
            outer = self._multiply(left[:1]).expand(len(x), -1, -1, -1)
            columns = [outer, *columns, outer.flip(2)]
        assert self.bias is not None
        edge = self.bias.expand(len(x), columns[0].shape[1], int(self.padding[1]), -1)
        return torch.cat([edge, *columns, edge], dim=2).permute(0, 3, 1, 2)

    def _multiply(self, x: Tensor) -> Tensor:
        """The kernel applied to (N, height, width, channels) columns."""
        kernel, stride, rows = self.kernel_size[0], self.stride[0], int(self.padding[0])
        x = functional.pad(x, (0, 0, 0, 0, rows, rows))
        last = x.shape[1] - kernel + 1
        seen = torch.cat([x[:, j : j + last : stride] for j in range(kernel)], dim=-1)
        weight = self.weight.squeeze(-1).transpose(1, 2).flatten(1)
        return functional.linear(seen, weight, self.bias)


def _count_equal_outer_columns(x: Tensor) -> int:
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
