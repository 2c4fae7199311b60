"""A serving engine and its load in a terminal."""

from rlplan.planner.serving import Served, ServedLoad
from rlplan.results import ServingResult
from rlplan.sources import Question
from rlplan.units import format_bytes, format_seconds
from rlplan_cli.render.terminal import print_json, show_fact


def answer_served(question: Question, *, as_json: bool, has_load: bool = False) -> None:
    """Print the engine of a serving job, and optionally its load.

    Raises: SpecError, NoFeasiblePlanError when the engine does not start.
    """
    result = ServingResult(question.job, question.predict_engine(), question.predict_load() if has_load else None)
    if as_json:
        print_json(result.as_json())
    else:
        show_served(result.served)
        if result.load is not None:
            show_load(result.load)
    if not result.fits:
        raise result.served.build_refusal(
            "larger GPUs, more of them, a smaller model, or a shorter workload.max_prompt_len"
        )


def show_served(served: Served) -> None:
    """Show an engine without a trainer."""
    memory = served.memory
    weights, cache = format_bytes(memory.model_bytes - served.on_host), format_bytes(memory.kv_cache)
    gpus = f"{served.num_gpus} of {served.num_given}x {served.gpu}"
    show_fact(
        served.verdict.value, f"{served.command} {served.model}, {gpus}: {weights} weights and {cache} KV cache per GPU"
    )
    show_fact("Scope", "only the engine as its server starts; nothing is trained")
    longest = f"sequences of at most {served.length:,} tokens" if served.length else "sequences as long as the cache"
    show_fact("KV cache", f"{memory.num_tokens:,} tokens; {longest}")
    for text in (*served.notes, served.short) if served.short else served.notes:
        print(f"  {text}")


def show_load(load: ServedLoad) -> None:
    """Show the latencies of concurrent requests."""
    latency, engines = load.latency, f"{load.num_engines} engine{'s' * (load.num_engines > 1)}"
    first, token = (
        f"{format_seconds(seconds)} ({' to '.join(format_seconds(end) for end in error.interval(seconds))})"
        for seconds, error in zip((latency.first_token_s, latency.token_s), load.errors, strict=True)
    )
    show_fact("Load", f"{load.num_requests:,} concurrent requests on {engines}: {load.tokens_per_s:,.0f} tokens/s")
    show_fact("Latency", f"{first} to the first token, {token} per further token")
    if load.waits_for_cache:
        at_once = load.fitting * load.num_engines
        show_fact("Queue", f"the cache holds {at_once:,.0f} requests at once; the rest queue")
