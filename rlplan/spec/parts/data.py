"""The data: what is trained on, mixed of one data set or of several, and what is held out, by name.

In: the `data:` part of a job. Out: frozen values. Left out: rows of data sets (runtime/data).
"""

from collections.abc import Callable
from pathlib import PurePath
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from rlplan.spec.base import Spec

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]


class PromptSource(Spec):
    """One of several data sets that are mixed."""

    path: str
    """A file or a folder of rows."""
    weight: float = Field(default=1.0, gt=0, le=1e9)
    """Its part of the prompts is its weight over the sum of all."""
    name: Name | None = None
    """In metrics; None for its file's, without the ending."""

    @property
    def label(self) -> str:
        """Its name."""
        return self.name or PurePath(self.path).stem


class DataSpec(Spec):
    """The `data:` part of a job: what is trained on, which a run needs and a plan does not."""

    prompts: str | tuple[PromptSource, ...]
    """A file or a folder of rows to train on; or several, each with its weight."""
    heldout: str | dict[Name, str] | None = None
    """The same for the evaluation; or several by name, each evaluated by itself. None holds a tenth of each data set's
    prompts back, at most workload.num_heldout_prompts."""
    prompt_column: str | None = None
    """Of a data set whose layout is none of those that are known."""
    answer_column: str | None = None
    """The same, of the answers."""
    image_column: str | None = Field(default=None, min_length=1)
    """A column with an image, or a list of images, of each prompt; None: prompts are texts."""
    max_image_pixels: int = Field(default=256 * 28 * 28, ge=28 * 28, le=1 << 22)
    """Larger images are made smaller, as far as the policy's own processor does not do so already."""
    shuffles: bool = True
    """Whether each epoch has an order of its own, from the seed; else each data set is taken as it stands."""
    difficulty_column: str | None = None
    """A column of numbers: each epoch of each data set begins with the smallest."""
    system_prompt: str | None = Field(default=None, max_length=100_000)
    """Goes before every prompt that has none of its own; prompts are then chats, whatever they are in their file."""

    @field_validator("prompts")
    @classmethod
    def _sources_differ(cls, prompts: str | tuple[PromptSource, ...]) -> str | tuple[PromptSource, ...]:
        labels = [] if isinstance(prompts, str) else [source.label for source in prompts]
        if isinstance(prompts, tuple) and not labels:
            raise ValueError("at least one data set")
        if len(set(labels)) < len(labels):
            raise ValueError(f"each data set has a name of its own, these are {', '.join(labels)}: give them `name`")
        return prompts

    @model_validator(mode="after")
    def _something_is_held_out(self) -> Self:
        if self.heldout is not None and not self.heldout:
            raise ValueError("data.heldout: at least one data set")
        return self

    @property
    def sources(self) -> tuple[PromptSource, ...]:
        """Every data set that is trained on."""
        return (PromptSource(path=self.prompts),) if isinstance(self.prompts, str) else self.prompts

    @property
    def heldout_sets(self) -> dict[str, str]:
        """Paths of what is held out by name; a single one has none. Empty where it is held back."""
        return {"": self.heldout} if isinstance(self.heldout, str) else self.heldout or {}

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """(key, path) of every data set."""
        return (
            *(("data.prompts", source.path) for source in self.sources),
            *(("data.heldout", path) for path in self.heldout_sets.values()),
        )

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """The same with every path passed through `change`."""
        prompts, heldout = self.prompts, self.heldout
        moved = {
            "prompts": change(prompts)
            if isinstance(prompts, str)
            else tuple(source.model_copy(update={"path": change(source.path)}) for source in prompts),
            "heldout": change(heldout)
            if isinstance(heldout, str)
            else heldout and {name: change(path) for name, path in heldout.items()},
        }
        return self.model_copy(update=moved)
