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
        kernel, stride = self.kernel_size[0], self.stride[0]
        rows, columns = (int(side) for side in self.padding)
        x = functional.pad(x.permute(0, 2, 3, 1), (0, 0, 0, 0, rows, rows))
        height = (x.shape[1] - kernel) // stride + 1
        last = stride * (height - 1) + 1
        seen = torch.cat([x[:, j : j + last : stride] for j in range(kernel)], dim=-1)
        weight = self.weight.squeeze(-1).transpose(1, 2).flatten(1)
        inner = functional.linear(seen, weight, self.bias)
        assert self.bias is not None
        edge = self.bias.expand(len(x), height, columns, -1)
        return torch.cat([edge, inner, edge], dim=2).permute(0, 3, 1, 2)
