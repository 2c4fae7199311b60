"""The data: one or several data sets to train on, and named data sets to evaluate on.

In: the `data:` part of a job. Out: frozen values. Left out: rows of data sets (runtime/data).
"""

from collections.abc import Callable
from pathlib import PurePath
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from rlplan.spec.base import Spec

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]


class PromptSource(Spec):
    """One of several data sets in a mixture."""

    path: str
    """File or folder of rows."""
    weight: float = Field(default=1.0, gt=0, le=1e9)
    """Weight of the data set; its fraction of the prompts is its weight over the sum of all weights."""
    name: Name | None = None
    """Name of the data set in metrics; None: the file's name without its ending."""

    @property
    def label(self) -> str:
        """The data set's name."""
        return self.name or PurePath(self.path).stem


class DataSpec(Spec):
    """The `data:` part of a job. A run needs it; a plan does not."""

    prompts: str | tuple[PromptSource, ...]
    """File or folder of rows to train on, or several with weights."""
    heldout: str | dict[Name, str] | None = None
    """File or folder of rows to evaluate on, or several by name, evaluated separately. None: a tenth of each data set's
    prompts is held out, at most workload.num_heldout_prompts."""
    prompt_column: str | None = None
    """Column of the prompts, if the data set has none of the known layouts."""
    answer_column: str | None = None
    """Column of the answers, if the data set has none of the known layouts."""
    image_column: str | None = Field(default=None, min_length=1)
    """Column with an image, or a list of images, of each prompt; None: prompts are texts."""
    max_image_pixels: int = Field(default=256 * 28 * 28, ge=28 * 28, le=1 << 22)
    """Pixels to which larger images are scaled down, if the policy's own processor has no lower limit."""
    shuffles: bool = True
    """Whether each epoch is shuffled by the seed; otherwise data sets keep their order."""
    difficulty_column: str | None = None
    """Numeric column for a curriculum: each epoch of each data set starts with the smallest values."""
    system_prompt: str | None = Field(default=None, max_length=100_000)
    """System prompt for prompts without one of their own. All prompts are then rendered as chats."""

    @field_validator("prompts")
    @classmethod
    def _sources_differ(cls, prompts: str | tuple[PromptSource, ...]) -> str | tuple[PromptSource, ...]:
        labels = [] if isinstance(prompts, str) else [source.label for source in prompts]
        if isinstance(prompts, tuple) and not labels:
            raise ValueError("at least one data set")
        if len(set(labels)) < len(labels):
            raise ValueError(f"data set names are unique, these are {', '.join(labels)}: set `name`")
        return prompts

    @model_validator(mode="after")
    def _something_is_held_out(self) -> Self:
        if self.heldout is not None and not self.heldout:
            raise ValueError("data.heldout: at least one data set")
        return self

    @property
    def sources(self) -> tuple[PromptSource, ...]:
        """All data sets to train on."""
        return (PromptSource(path=self.prompts),) if isinstance(self.prompts, str) else self.prompts

    @property
    def heldout_sets(self) -> dict[str, str]:
        """Paths of evaluation data sets by name; a single one has the name "". Empty if prompts are held out of the
        training data.
        """
        return {"": self.heldout} if isinstance(self.heldout, str) else self.heldout or {}

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """(key, path) of each data set."""
        return (
            *(("data.prompts", source.path) for source in self.sources),
            *(("data.heldout", path) for path in self.heldout_sets.values()),
        )

    def map_paths(self, change: Callable[[str], str]) -> Self:
        """A copy with every path passed through `change`."""
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
