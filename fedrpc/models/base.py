"""The interface of every model, and the registry that maps a name to its builder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from fedrpc import registry
from fedrpc.errors import ConfigError

Shape = tuple[int, ...]
Builder = Callable[..., nn.Module]
B = TypeVar("B", bound=Builder)

MODELS: registry.Registry[Builder] = registry.MODELS


class Model(nn.Module):
    """A chain of stages that ends in flat features, and one linear layer from features to logits.

    A cut is legal after every stage, so cut `i` is after `stages[i]` and the last one gives the features.

    Args:
        stages: The chain; the last stage returns a (batch, features) matrix.
        classifier: From the features to one logit per class.
    """

    split_layer_default: ClassVar[int] = 0

    def __init__(self, stages: Iterable[nn.Module], classifier: nn.Linear) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.classifier = classifier

    @property
    def num_cuts(self) -> int:
        """How many legal cuts there are; they count from 0."""
        return len(self.stages)

    def select_input(self, x: Tensor) -> Tensor:
        """The part of the inputs that reaches the network: what its activations may reveal."""
        return x

    def features(self, x: Tensor) -> Tensor:
        """The penultimate features, what the classifier sees."""
        for stage in self.stages:
            x = stage(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Logits, one per class; softmax belongs to the loss."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


@dataclass(frozen=True)
class Architecture:
    """A builder that knows which samples it accepts, so that a mismatch is explained before anything is built.

    Attributes:
        takes: The samples that the model accepts, in words that finish "model X takes ...".
        fits: Whether the model, with its default options, accepts samples of this shape.
        make: The builder, called with (shape, num_classes, **options).
    """

    takes: str
    fits: Callable[[Shape], bool]
    make: Builder

    def __call__(self, shape: Shape, num_classes: int, **options: object) -> nn.Module:
        """The model for samples of `shape`, freshly initialised."""
        return self.make(shape, num_classes, **options)


def architecture(name: str, *, takes: str, fits: Callable[[Shape], bool]) -> Callable[[B], B]:
    """Registers a class or function as the model `name`, as a decorator."""

    def register(make: B) -> B:
        MODELS.register(name)(Architecture(takes, fits, make))
        return make

    return register


def is_image(shape: Shape, least: int = 1) -> bool:
    """Whether `shape` is an image or spectrogram (channels, height, width) of at least `least` pixels a side."""
    return len(shape) == 3 and shape[0] >= 1 and min(shape[1:]) >= least


def unwrap(module: nn.Module) -> nn.Module:
    """The network itself, without the wrapper that Opacus puts around it in private training."""
    inner = getattr(module, "_module", None)
    return inner if isinstance(inner, nn.Module) else module


def require_stages(module: nn.Module, purpose: str) -> Model:
    """`module` as a `Model`, or a ConfigError that says what `purpose` needs."""
    module = unwrap(module)
    if isinstance(module, Model):
        return module
    raise ConfigError(
        f"{purpose} needs a model with stages, features and a linear classifier, but {type(module).__name__} "
        "has none; make it a torch.nn.Sequential that ends in a Linear, derive it from fedrpc.models.Model, or choose "
        "another --model"
    )
