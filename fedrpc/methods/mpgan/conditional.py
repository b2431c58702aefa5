"""MP-GAN-AC (our variant of MP-GAN, after AC-GAN, Odena et al., 2017): a generator that is given the class to generate.

Departs from the thesis: as `mpgan/method.py` says, and generator paths get a label beside their noise; clients'
discriminators have an auxiliary head for the class, whose cross-entropy joins both losses at weight 1 (half of it on
real images, half on generated ones), as in MD-GAN (Hardy et al., 2019). So images have labels by construction: nothing
labels them, and none is refused. Each step sends the labels beside the images.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedrpc.methods.method import Round, register
from fedrpc.methods.mpgan.augment import Candidates, Labeller
from fedrpc.methods.mpgan.messages import GanParams, State
from fedrpc.methods.mpgan.method import GanMethod, MpGan


class MpGanAcParams(GanParams):
    """No classifier is needed before images can be distributed."""

    warm_up: int = Field(0, ge=0, description="rounds of plain FedAvg before any image is distributed")


@register
class MpGanAc(GanMethod[MpGanAcParams]):
    """MP-GAN with a class-conditional generator."""

    name = "mpgan-ac"
    dp_sgd = MpGan.dp_sgd
    conditional = True

    def name_labeller(self, params: MpGanAcParams) -> str:
        """Where labels come from, for the records."""
        return "the generator: it was given the classes to generate"

    async def prepare_labeller(self, state: State, rnd: Round[MpGanAcParams]) -> Labeller:
        """Images keep the labels that they were generated for."""

        def keep_labels(x: Tensor, y: Tensor | None) -> Candidates:
            assert y is not None, "the generator is conditional"
            return x, y, torch.ones(len(y), dtype=torch.bool)

        return keep_labels
