"""The kinds of parts and the element types of tensors that may travel: the wire's two closed sets."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import torch

from fedrpc.wire.v2 import coordinator_pb2 as pb

Direction = Literal["down", "up"]
DIRECTIONS: tuple[Direction, Direction] = ("down", "up")


class Kind(IntEnum):
    """What a part is about; every byte of a run is booked under exactly one kind."""

    WEIGHTS = pb.KIND_WEIGHTS
    CLASS_ABUNDANCE = pb.KIND_CLASS_ABUNDANCE
    LATENT_MEANS = pb.KIND_LATENT_MEANS
    ACTIVATIONS = pb.KIND_ACTIVATIONS
    IMAGES = pb.KIND_IMAGES
    FEEDBACK = pb.KIND_FEEDBACK
    MEAN_SAMPLES = pb.KIND_MEAN_SAMPLES
    SAMPLES = pb.KIND_SAMPLES
    MOMENTS = pb.KIND_MOMENTS
    SCALARS = pb.KIND_SCALARS
    ENVELOPE = pb.KIND_ENVELOPE
    CONTROL_VARIATES = pb.KIND_CONTROL_VARIATES

    @property
    def label(self) -> str:
        """The name used in ledgers, tables and summaries."""
        return self.name.lower()


# Scalars (example counts, losses) are data-derived like all other kinds; only the protocol's own text needs no
# privacy row.
NOT_DATA_DERIVED = frozenset({Kind.ENVELOPE})

DTYPES: dict[int, torch.dtype] = {
    pb.DTYPE_FLOAT32: torch.float32,
    pb.DTYPE_FLOAT64: torch.float64,
    pb.DTYPE_FLOAT16: torch.float16,
    pb.DTYPE_BFLOAT16: torch.bfloat16,
    pb.DTYPE_INT8: torch.int8,
    pb.DTYPE_INT16: torch.int16,
    pb.DTYPE_INT32: torch.int32,
    pb.DTYPE_INT64: torch.int64,
    pb.DTYPE_UINT8: torch.uint8,
    pb.DTYPE_BOOL: torch.bool,
    pb.DTYPE_COMPLEX64: torch.complex64,
    pb.DTYPE_COMPLEX128: torch.complex128,
    pb.DTYPE_UINT16: torch.uint16,
    pb.DTYPE_UINT32: torch.uint32,
    pb.DTYPE_UINT64: torch.uint64,
    pb.DTYPE_FLOAT8_E4M3FN: torch.float8_e4m3fn,
    pb.DTYPE_FLOAT8_E5M2: torch.float8_e5m2,
}
DTYPE_NUMBERS: dict[torch.dtype, int] = {dtype: number for number, dtype in DTYPES.items()}
