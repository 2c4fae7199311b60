"""A causal language model that returns log-probs of the response tokens instead of logits.

Sequences are packed into one row without padding. Positions restart with each sequence, and no sequence attends to
another (packed_attention.py). The head runs only on positions that predict response tokens, a few rows at a time in
both passes, so the full logits never exist.

In: token ids of packed sequences. Out: log-prob and entropy of every response token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

from rlplan.memory.model.logits import ROWS_ON_GPU, RowsAtOnce, rows_on_cpu
from rlplan.runtime.device.layer import device_of
from rlplan.runtime.images.tower import compute_positions as axes_of
from rlplan.runtime.images.tower import embed_with_images
from rlplan.runtime.learning.packing import pack_best_fit
from rlplan.runtime.models.router_replay import RouterReplay
from rlplan.runtime.models.sequence_parallel import Sharing
from rlplan.runtime.rollout.experience import PromptImage, SequencePair, TeacherTokens, TrainSample, chosen_indices

Entropies = Literal["none", "seen", "learned"]


@dataclass(frozen=True)
class TokenBatch:
    """Packed sequences in one row of T tokens, of which the policy sampled C."""

    input_ids: torch.Tensor
    """Token ids, [1, T]."""

    position_ids: torch.Tensor
    """Positions from 0 in each sequence, [1, T]; with images in time, height and width, [3, 1, T]."""

    sequence_lens: tuple[int, ...]
    """Tokens of each sequence; their sum is T."""

    positions: torch.Tensor
    """Indices into T whose hidden states predict the sampled tokens, [C]."""

    targets: torch.Tensor
    """Ids of the sampled tokens, [C]."""

    lengths: tuple[int, ...]
    """Sampled tokens of each sequence; their sum is C."""

    images: tuple[tuple[int, PromptImage], ...] = ()
    """(index of the image's first token in T, image)."""

    teacher: "Teacher | None" = None
    """The teacher's distributions at the sampled tokens; None without `algorithm.teacher_top_k`."""

    experts: torch.Tensor | None = None
    """Experts to replay, [T, layers with experts, experts of a token]; -1 where the router chooses."""


class Teacher(NamedTuple):
    """A teacher's distributions at C tokens: k tokens of the vocabulary each."""

    logprobs: torch.Tensor
    """Log-probs, fp32, [C, k]."""

    ids: torch.Tensor | None
    """Token ids, int32, [C, k]; None for the whole vocabulary in its order."""


def make_batch(sequences: Sequence[TrainSample | SequencePair]) -> TokenBatch:
    """Pack sequences. Without any, the batch has one dummy token and no response, so that ranks can stay in step."""
    tokens: list[int] = []
    has_images = any(sequence.images for sequence in sequences)
    axes: list[list[int]] = [[], [], []] if has_images else [[]]
    images: list[tuple[int, PromptImage]] = []
    positions, targets, lengths = [], [], []
    for sequence in sequences:
        images += [(len(tokens) + image.first, image) for image in sequence.images]
        first = len(tokens) + len(sequence.prompt_tokens) - 1
        chosen = chosen_indices(len(sequence.response_tokens), sequence.observed)
        tokens += [*sequence.prompt_tokens, *sequence.response_tokens]
        for axis, numbers in zip(axes, axes_of(sequence.num_tokens, sequence.images), strict=False):
            axis += numbers
        positions += [first + index for index in chosen]
        targets += [sequence.response_tokens[index] for index in chosen]
        lengths.append(len(chosen))
    return TokenBatch(
        input_ids=torch.tensor([tokens or [0]]),
        position_ids=torch.tensor(axes).unsqueeze(1) if has_images else torch.tensor([axes[0] or [0]]),
        sequence_lens=tuple(sequence.num_tokens for sequence in sequences) or (1,),
        positions=torch.tensor(positions, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        lengths=tuple(lengths),
        images=tuple(images),
        teacher=_join_teacher([s.teacher_tokens for s in sequences if isinstance(s, TrainSample)]),
        experts=_join_experts(sequences),
    )


def _join_experts(sequences: Sequence[TrainSample | SequencePair]) -> torch.Tensor | None:
    shapes = [sequence.experts.shape[1:] for sequence in sequences if sequence.experts is not None]
    if not shapes:
        return None
    rows = [np.full((sequence.num_tokens, *shapes[0]), -1, np.int16) for sequence in sequences]
    for chosen, sequence in zip(rows, sequences, strict=True):
        if sequence.experts is not None:
            chosen[: len(sequence.experts)] = sequence.experts[: len(chosen)]
    return torch.as_tensor(np.concatenate(rows))


def _join_teacher(parts: Sequence[TeacherTokens | None]) -> Teacher | None:
    tokens = [part for part in parts if part is not None]
    if not tokens:
        return None
    ids = [part.ids for part in tokens if part.ids is not None]
    logprobs = np.concatenate([part.logprobs for part in tokens])
    return Teacher(torch.as_tensor(logprobs), torch.as_tensor(np.concatenate(ids)) if ids else None)


Score = TypeVar("Score")


def list_numbers(part: torch.Tensor) -> tuple[float, ...]:
    """A response's scores, one per token, as plain numbers."""
    return tuple(part.tolist())


def read_teacher(part: torch.Tensor, vocab_size: int) -> TeacherTokens:
    """Read a teacher's distributions from the output of `LogprobModel` with top_k."""
    numbers, width = part.cpu().numpy(), part.shape[1] // 2
    if part.shape[1] == vocab_size:
        return TeacherTokens(numbers.copy())
    return TeacherTokens(numbers[:, :width].copy(), numbers[:, width:].astype(np.int32))  # fp32 holds ids below 2^24


def score_packed(
    pairs: Sequence[SequencePair],
    max_tokens: int,
    judge: Callable[[TokenBatch], torch.Tensor],
    convert: Callable[[torch.Tensor], Score],
) -> list[Score]:
    """Scores of each response's tokens, in the order of `pairs`, from packed passes of at most `max_tokens`.

    convert: makes a response's scores out of the rows of its tokens.
    """
    judged: dict[int, Score] = {}
    for pack in pack_best_fit([pair.num_tokens for pair in pairs], max_tokens):
        batch = make_batch([pairs[index] for index in pack])
        for index, part in zip(pack, judge(batch).split(batch.lengths), strict=True):
            judged[index] = convert(part)
    return [judged[index] for index in range(len(pairs))]


def compute_predicting_states(language_model: Any, batch: TokenBatch, sharing: Sharing | None = None) -> torch.Tensor:
    """Hidden states that predict response tokens, [C, hidden]. sharing: set if `batch` is a rank's part of a pack."""
    seen = {"input_ids": batch.input_ids}
    if batch.images:
        seen = {"inputs_embeds": embed_with_images(language_model, batch.input_ids, batch.images)}
    output = language_model.model(
        **seen,
        position_ids=batch.position_ids,
        sequence_lens=batch.sequence_lens,
        sharing=sharing,
        use_cache=False,
    )
    states: torch.Tensor = output.last_hidden_state[0][batch.positions]
    return states


class PackedModel(nn.Module):
    """A decoder that computes packed sequences.

    sharing: ranks that compute a pass together. Each gets the whole pack and returns the values of all its tokens.
    """

    def __init__(self, language_model: nn.Module, sharing: Sharing | None = None) -> None:
        super().__init__()
        self.language_model: Any = language_model
        self.sharing = sharing
        self.replay = RouterReplay(language_model)

    def compute_own_states(self, batch: TokenBatch) -> tuple[TokenBatch, torch.Tensor]:
        """(this rank's part of a pack, the hidden states that predict its response tokens)."""
        part = batch if self.sharing is None else self.sharing.take_own_part(batch)
        self.replay.experts = part.experts
        return part, compute_predicting_states(self.language_model, part, self.sharing)

    def gather_all(self, numbers: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Values of all response tokens of a pack, gathered from the ranks' parts."""
        return numbers if self.sharing is None or not len(batch.positions) else self.sharing.gather(numbers, batch)


class LogprobModel(PackedModel):
    """A Hugging Face causal LM whose `forward` returns (log-probs, entropies), both fp32 of shape [C].

    The head's `forward` is replaced by one that returns log-probs. The head is still called as a module, because ZeRO-3
    gathers parameters in module hooks.

    entropies: `none` skips them, `seen` computes them without gradient, `learned` with gradient.
    """

    def __init__(
        self, language_model: nn.Module, temperature: float, *, entropies: Entropies, sharing: Sharing | None = None
    ) -> None:
        super().__init__(language_model, sharing)
        head: Any = self.language_model.lm_head
        scale, cap = read_multiplier_and_cap(self.language_model.config)
        head.forward = partial(_head_forward, head, temperature=temperature / scale, entropies=entropies, cap=cap)

    def forward(self, batch: TokenBatch, top_k: int = 0) -> tuple[torch.Tensor, ...]:
        """(log-probs of the response tokens at the sampling temperature, entropies); with a teacher also its KLs.

        top_k: if above 0, return only the k likeliest tokens: log-probs, then ids, [C, 2 k]. For the whole vocabulary
        return log-probs alone, [C, V].
        """
        part, states = self.compute_own_states(batch)
        numbers: tuple[torch.Tensor, ...] = self.language_model.lm_head(states, part.targets, part.teacher, top_k)
        return numbers if top_k else tuple(self.gather_all(values, batch) for values in numbers)


def read_multiplier_and_cap(config: Any) -> tuple[float, float | None]:
    """(multiplier of the logits as in Cohere and Granite, soft cap as in Gemma 2)."""
    scale = float(getattr(config, "logit_scale", None) or 1) / float(getattr(config, "logits_scaling", None) or 1)
    return scale, getattr(config, "final_logit_softcapping", None)


def _head_forward(
    head: nn.Linear,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    teacher: Teacher | None = None,
    top_k: int = 0,
    *,
    temperature: float,
    entropies: Entropies,
    cap: float | None = None,
) -> tuple[torch.Tensor, ...]:
    at_once = ROWS_ON_GPU if device_of(hidden.device) else rows_on_cpu(hidden.element_size())
    if top_k:
        return (_list_likeliest(_Workspace(hidden, head.weight, at_once, temperature, cap), top_k),)
    result: tuple[torch.Tensor, ...] = HeadLogprobs.apply(
        hidden, head.weight, targets, temperature, entropies, at_once, cap, teacher
    )
    return result if teacher is not None else result[:2]


def _list_likeliest(work: "_Workspace", top_k: int) -> torch.Tensor:
    """Log-probs and ids of each row's likeliest tokens, [C, 2 k]; log-probs alone, [C, V], for the whole vocabulary."""
    vocab_size, parts = work.weight.shape[0], []
    for multiplied in work.slices:
        work.multiply(multiplied)
        for _, logits in work.upcast(multiplied):
            logprobs = logits.log_softmax(-1)
            parts.append(logprobs if top_k >= vocab_size else torch.cat(logprobs.topk(top_k), -1))
    width = vocab_size if top_k >= vocab_size else 2 * top_k
    return torch.cat(parts) if parts else work.hidden.new_zeros(0, width, dtype=torch.float32)


class HeadLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[target] and entropies, a few rows of logits at a time.

    cap: logits z become cap * tanh(z / cap) before they are divided by the temperature.

    The backward pass recomputes the logits and overwrites them with their gradient,
    g * (one_hot(target) - softmax) / temperature; an entropy H adds -g_H * softmax * (log softmax + H).
    Without an entropy the factor g / temperature is applied to the hidden states instead, which have far fewer columns
    than the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        entropy: Entropies,
        at_once: RowsAtOnce,
        cap: float | None = None,
        teacher: Teacher | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_rows = len(targets)
        logprobs, normalizer = (torch.empty(num_rows, dtype=torch.float32, device=hidden.device) for _ in range(2))
        entropies = torch.empty(num_rows if entropy != "none" else 0, dtype=torch.float32, device=hidden.device)
        divergences = torch.empty(0 if teacher is None else num_rows, dtype=torch.float32, device=hidden.device)
        work = _Workspace(hidden, weight, at_once, temperature, cap)
        weights = work.allocate_fp32()
        for multiplied in work.slices:
            work.multiply(multiplied)
            for rows, logits in work.upcast(multiplied):
                largest = logits.amax(-1, keepdim=True)  # subtracted before exp, which would overflow
                part = torch.sub(logits, largest, out=weights[: len(logits)]).exp_()
                total = part.sum(-1)
                normalizer[rows] = largest.squeeze(-1) + total.log()
                logprobs[rows] = logits.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1) - normalizer[rows]
                if entropy != "none":  # H = log Z - sum softmax * logits
                    entropies[rows] = normalizer[rows] - part.mul_(logits).sum(-1) / total
                if teacher is not None:
                    logprobs_of_all = logits.sub_(normalizer[rows].unsqueeze(-1))
                    divergences[rows] = _compare_with_teacher(logprobs_of_all, teacher, rows)[0]
        ctx.temperature, ctx.at_once, ctx.cap = temperature, at_once, cap
        ctx.learns_entropy, ctx.teacher = entropy == "learned", teacher
        ctx.save_for_backward(hidden, weight, targets, normalizer, *([entropies] if ctx.learns_entropy else []))
        if not ctx.learns_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies, divergences

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, entropy_gradient: torch.Tensor, divergence_gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normalizer, *entropies = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        scale = (gradient / ctx.temperature).unsqueeze(-1)
        work = _Workspace(hidden, weight, ctx.at_once, ctx.temperature, ctx.cap)
        factors = work.allocate_fp32() if ctx.learns_entropy or ctx.teacher is not None else None
        for multiplied in work.slices:
            work.multiply(multiplied)
            for rows, logits in work.upcast(multiplied):
                # The derivative of cap * tanh(z / cap) is 1 - tanh^2; the logits hold cap * tanh / temperature.
                slope = None if ctx.cap is None else (logits * (ctx.temperature / ctx.cap)).square_().neg_().add_(1)
                logits.sub_(normalizer[rows].unsqueeze(-1))  # log softmax
                if factors is None:
                    logits.exp_()  # softmax - one_hot; the factor -g / temperature follows below
                    at_target = torch.full_like(scale[rows], -1)
                else:
                    # The gradient is softmax * -(g_H (log softmax + H) - g_D (f - D) + g) / temperature, plus
                    # g / temperature at the target. D is the KL to the teacher, and f is log p/q of each token.
                    factor = factors[: len(logits)].copy_(scale[rows].expand_as(logits))
                    if ctx.learns_entropy:
                        torch.add(logits, entropies[0][rows].unsqueeze(-1), out=factor)
                        factor.mul_((entropy_gradient[rows] / ctx.temperature).unsqueeze(-1)).add_(scale[rows])
                    if ctx.teacher is not None:
                        divergence, apart = _compare_with_teacher(logits, ctx.teacher, rows)
                        apart = apart.sub_(divergence.unsqueeze(-1))
                        factor.sub_(apart.mul_((divergence_gradient[rows] / ctx.temperature).unsqueeze(-1)))
                    logits.exp_().mul_(factor.neg_())
                    at_target = scale[rows]
                logits.scatter_add_(-1, targets[rows].unsqueeze(-1), at_target)
                if slope is not None:
                    logits.mul_(slope)
                work.put_back(rows, logits)
            part, states = work.get_rows(multiplied), hidden[multiplied]
            torch.mm(part, weight, out=hidden_gradient[multiplied])
            if factors is None:
                row_scale = -scale[multiplied]
                hidden_gradient[multiplied] *= row_scale
                states = (states * row_scale).to(states.dtype)
            if weight_gradient is not None:
                weight_gradient.addmm_(part.T, states)
        return hidden_gradient, weight_gradient, None, None, None, None, None, None


SMALLEST_REST = 1e-6
"""Minimum probability of all other tokens together. Below it, 1 - sum of fp32 probabilities is only rounding."""


def _compare_with_teacher(logprobs: torch.Tensor, teacher: Teacher, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """(KL(policy || teacher) of each row, [R]; log p/q of each token, [R, V]).

    All tokens that the teacher does not list count as one token: their log p/q is that of the sums of their
    probabilities. Merging tokens never raises a KL, so the result is a lower bound of the KL over the whole vocabulary.
    Its derivative by a logit is p (log p/q - KL).
    Source: the tail of TRL 1.16, experimental GKD (`loss_add_tail`); Agarwal et al. 2024, arXiv:2306.13649.
    logprobs: the policy's, fp32, [R, V].
    """
    listed = teacher.logprobs[rows]
    if teacher.ids is None:
        apart = logprobs - listed
        return (logprobs.exp() * apart).sum(-1), apart
    ids = teacher.ids[rows].long()
    own = logprobs.gather(-1, ids)
    rest, teacher_rest = (1 - values.exp().sum(-1, keepdim=True) for values in (own, listed))
    rest = rest.clamp(min=SMALLEST_REST)
    rest_apart = rest.log() - teacher_rest.clamp(min=SMALLEST_REST).log()
    divergence = (own.exp() * (own - listed)).sum(-1) + (rest * rest_apart).squeeze(-1)
    return divergence, rest_apart.expand_as(logprobs).clone().scatter_(-1, ids, own - listed)


class _Workspace:
    """Reused memory for the logits of some rows: many rows in the model's type, and fewer at a time in fp32."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        at_once: RowsAtOnce,
        temperature: float,
        cap: float | None,
    ) -> None:
        self.hidden, self.weight, self.temperature, self.cap = hidden, weight, temperature, cap
        num_multiplied, self.num_upcast = (min(len(hidden), rows) for rows in at_once)
        self.slices = list(_split_rows(slice(0, len(hidden)), num_multiplied))
        self.buffer = torch.empty(num_multiplied, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
        self.first = 0
        """First row in the buffer."""
        self.upcasts = None if hidden.dtype is torch.float32 else self.allocate_fp32()

    def allocate_fp32(self) -> torch.Tensor:
        """An fp32 buffer for the rows that are upcast together."""
        return torch.empty(self.num_upcast, self.weight.shape[0], dtype=torch.float32, device=self.hidden.device)

    def get_rows(self, rows: slice) -> torch.Tensor:
        """The buffer's part for some rows."""
        return self.buffer[rows.start - self.first : rows.stop - self.first]

    def multiply(self, rows: slice) -> None:
        """Write the logits of some rows into the buffer, in the model's type."""
        self.first = rows.start
        torch.mm(self.hidden[rows], self.weight.T, out=self.get_rows(rows))

    def upcast(self, multiplied: slice) -> Iterator[tuple[slice, torch.Tensor]]:
        """(rows, their logits in fp32, capped and divided by the temperature) for parts of the last multiplied rows."""
        for rows in _split_rows(multiplied, self.num_upcast):
            logits = self.get_rows(rows)
            if self.upcasts is not None:
                logits = self.upcasts[: len(logits)].copy_(logits)
            if self.cap is not None:
                logits.div_(self.cap).tanh_().mul_(self.cap)
            yield rows, logits if self.temperature == 1 else logits.div_(self.temperature)

    def put_back(self, rows: slice, gradient: torch.Tensor) -> None:
        """Replace logits in the buffer by their gradient, in the model's type."""
        if self.upcasts is not None:
            self.get_rows(rows).copy_(gradient)


def _split_rows(rows: slice, size: int) -> Iterator[slice]:
    """Consecutive parts of `size` rows; the last one may be smaller."""
    # Without rows the size is 0, which `range` does not accept as a step.
    return (slice(first, min(first + size, rows.stop)) for first in range(rows.start, rows.stop, size or 1))
