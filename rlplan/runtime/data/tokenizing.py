"""Tokenizing: rows become prompts, or one message lists the rows that exceed the job's lengths.

In: a prompt file, a job, the policy's tokenizer. Out: tokenized prompts, and the columns that every row has.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlplan.errors import SpecError
from rlplan.runtime.data.layouts import BadRowError, Columns, DataRow
from rlplan.runtime.data.loading import Chats, RowNeeds, load_rows, report_bad_rows
from rlplan.runtime.data.model_text import ModelText
from rlplan.runtime.data.text_tokens import read_end_tokens
from rlplan.runtime.images.in_rows import ImagePlaces
from rlplan.runtime.rewards.assertions.trees import UnreadableTestsError
from rlplan.runtime.rewards.code_tests import read_tests
from rlplan.runtime.rollout.experience import Prompt, PromptImage
from rlplan.spec.base import shorten_value
from rlplan.spec.declaration import Given
from rlplan.spec.parts.rewards import AnswerMatcherSpec, CodeExecutorSpec, FunctionSpec
from rlplan.spec.resolved import ResolvedJob

MAX_PIXEL_BYTES = 1 << 30
"""Most bytes of the pixels of all images of a file, at the size that the policy sees."""
ALWAYS_ENCODED = 1 << 16
"""Texts up to this many characters are always tokenized: some tokenizers drop spaces, so few tokens may remain."""


def tokenize_file(
    path: Path, job: ResolvedJob, tokenizer: ModelText, chats: Chats, *, answer_kind: Given
) -> tuple[tuple[Prompt, ...], str, frozenset[str]]:
    """(prompts in the file's order, a log line, columns that every row has if a reward function needs any).

    answer_kind: answers that rows must hold. Raises: SpecError that lists bad rows.
    """
    data = job.needed_data
    columns = Columns(data.prompt_column, data.answer_column, data.image_column)
    loaded = load_rows(
        path, columns, Path(job.policy.path), RowNeeds(answer_kind) if answer_kind else _collect_needs(job), chats
    )
    encoder = _Encoder(job, tokenizer, path if path.is_dir() else path.parent)
    prompts: list[Prompt] = []
    faults: list[tuple[int, str]] = []
    left = MAX_PIXEL_BYTES
    for row in loaded.rows:
        try:
            prompts.extend(_make_prompts(row, encoder, answer_kind))
            # the two prompts of a labelled pair share their images
            left -= sum(len(image.pixels) for image in prompts[-1].images)
            if left < 0:
                raise _make_pixel_error(path, row.number)
        except BadRowError as error:
            faults.append((row.number, str(error)))
    if faults:
        raise report_bad_rows(
            path,
            faults,
            len(prompts),
            rule="a prompt has 1 to workload.max_prompt_len tokens, and an answer at most workload.max_response_len "
            "with its end-of-sequence token",
            way_out="raise the limit, or shorten or remove those rows",
        )
    has_functions = any(isinstance(spec, FunctionSpec) for spec in job.rewards)
    shared = _find_shared_columns(loaded.rows) if has_functions else frozenset[str]()
    return tuple(prompts), loaded.summarize(path), shared


def _make_pixel_error(path: Path, row: int) -> SpecError:
    return SpecError(
        f"the images of the first {row} rows have more than {MAX_PIXEL_BYTES} bytes of pixels",
        where=str(path),
        rule="the driver holds the images of all prompts in memory",
        way_out="lower data.max_image_pixels, or use fewer rows",
    )


class _Encoder:
    """Tokenizes prompts and answers, and checks them against the job's lengths."""

    def __init__(self, job: ResolvedJob, tokenizer: ModelText, folder: Path) -> None:
        self.tokenizer, self.workload, self.folder = tokenizer, job.workload, folder
        self.images = ImagePlaces(job, tokenizer) if job.takes_images else None
        self.end = sorted(read_end_tokens(Path(job.policy.path)))[:1]  # a model may have several; one suffices to learn

    def encode_prompt(self, row: DataRow) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """(tokens of a row's prompt with its images' tokens, the images)."""
        limit, name = self.workload.max_prompt_len, f"prompt {shorten_value(row.id)}"
        self._check_characters(str(row.prompt), name, limit)
        # Special tokens are added to plain texts only: a template writes a BOS token itself, if there is one.
        text = (
            str(row.prompt)
            if self.images is None or row.chat
            else self.images.write_image_tokens(str(row.prompt), len(row.images))
        )
        tokens = self.tokenizer.tokens(text, adds_special_tokens=row.chat is None)
        images: tuple[PromptImage, ...] = ()
        if self.images is not None:
            tokens, images = self.images.expand_images(tokens, row.images, self.folder)
        if not 0 < len(tokens) <= limit:
            raise BadRowError(f"{name} has {len(tokens)} tokens, the limit is {limit}")
        return tokens, images

    def encode_answer(self, row: DataRow, key: str) -> tuple[int, ...]:
        """Tokens of an answer, with the end-of-sequence token that the policy must learn."""
        limit, name, text = self.workload.max_response_len, f"{key} of {shorten_value(row.id)}", str(getattr(row, key))
        self._check_characters(text, name, limit)
        tokens = (*self.tokenizer.tokens(text, adds_special_tokens=False), *self.end)
        if len(tokens) > limit:
            raise BadRowError(f"{name} has {len(tokens)} tokens, the limit is {limit}")
        return tokens

    def _check_characters(self, text: str, name: str, limit: int) -> None:
        """Reject texts that are far too long before tokenizing, which takes hundreds of bytes per character."""
        if len(text) > max(ALWAYS_ENCODED, limit * self.tokenizer.longest_token):
            raise BadRowError(f"{name} has {len(text)} characters, more than {limit} tokens can hold")


def _make_prompts(row: DataRow, encoder: _Encoder, answer_kind: Given) -> list[Prompt]:
    """The prompts of a row: one, or two for a pair whose answers are labelled separately."""
    answer_keys = [key for key in ("chosen", "rejected") if answer_kind and getattr(row, key) is not None]
    right = str(row.answer or "") if row.answer is not None or not answer_keys else str(getattr(row, answer_keys[0]))
    answers = tuple(encoder.encode_answer(row, key) for key in answer_keys)
    tokens, images = encoder.encode_prompt(row)
    prompt = Prompt(
        row.id,
        str(row.prompt),
        right,
        tokens,
        columns=row.others,
        answers=answers,
        chat="" if row.chat is None else json.dumps(row.chat),
        joined="" if row.joined is None else json.dumps(row.joined),
        images=images,
    )
    if answer_kind != "unpaired":
        return [prompt]
    return [
        replace(
            prompt, id=f"{row.id}/{key}" if len(answer_keys) > 1 else row.id, answers=(tokens,), is_good=key == "chosen"
        )
        for key, tokens in zip(answer_keys, answers, strict=True)
    ]


def _find_shared_columns(rows: Sequence[DataRow]) -> frozenset[str]:
    """Columns that every row has, including `answer`, on which reward functions can rely."""
    columns = ({*json.loads(row.others), *(["answer"] if row.answer is not None else [])} for row in rows)
    return frozenset(set.intersection(*columns))


def _collect_needs(job: ResolvedJob) -> RowNeeds:
    """Requirements of the job's rewards on every row."""
    needs = [spec for spec in job.rewards if isinstance(spec, AnswerMatcherSpec | CodeExecutorSpec)]
    if any(isinstance(spec, CodeExecutorSpec) for spec in needs):
        return RowNeeds(
            answers=True,
            check=_check_tests,
            rule="tests must be splittable into calls of the program, which run in the sandbox, and conditions, which "
            "are evaluated outside (docs/job.md, Prompt files)",
        )
    return RowNeeds(answers=bool(needs))


def _check_tests(answer: str) -> None:
    try:
        read_tests(answer)
    except UnreadableTestsError as error:
        raise BadRowError(f"its tests: {error}") from None
