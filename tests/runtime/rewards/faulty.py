"""Reward functions that go wrong, each in a way of its own, and some that do not."""

import os
import signal
import sys
import threading
import time


def nan(completions, **rest):
    return [float("nan")]


def infinite(completions, **rest):
    return [float("inf")]


def minus_infinite(completions, **rest):
    return [float("-inf")]


def nothing(completions, **rest):
    return None


def raises(completions, **rest):
    raise KeyError("ground truth")


def exits(completions, **rest):
    sys.exit(0)


def dies(completions, **rest):
    os._exit(0)


def crashes(completions, **rest):
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(completions, **rest):
    while True:
        time.sleep(1)


def hangs_and_swallows(completions, **rest):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


def too_many(completions, **rest):
    return [1.0, 1.0]


def too_few(completions, **rest):
    return []


def text(completions, **rest):
    return ["1.0"]


def huge_result(completions, **rest):
    return ["x" * 10**8]


def huge_number(completions, **rest):
    return [10**400]


def prints_without_end(completions, **rest):
    sys.stdout.write("x" * 10**8)
    os.write(1, b'{"value": "0x1p+0"}\n' * 1000)
    return [float("nan")]


def takes_all_memory(completions, **rest):
    kept = []
    while True:
        kept.append(bytearray(4 * 10**8))


def leaves_threads(completions, **rest):
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(600,)).start()
    raise RuntimeError("with threads at work")


def tower(completions, **rest):
    return [float(9**9**9)]


def good(completions, answer, **rest):
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def good_as_verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "extra": extra_info, "source": data_source}


def wrong_signature(question, reply):
    return 1.0


def takes_no_parameters():
    return 1.0


def short_verl(solution_str, ground_truth):
    return float(solution_str == ground_truth)


def verl_with_more(data_source, solution_str, ground_truth, extra_info, needed):
    return 1.0


def asks_for_a_column(prompts, completions, level):
    return [float(level[0])]


def takes_positions(prompts, completions, /, **rest):
    return [1.0]


def generates(prompts, completions, **rest):
    yield 1.0


class Built:
    def __init__(self, prompts, completions, **rest):
        pass


class Scalar:
    def item(self):
        return 0.5


def tensor(completions, **rest):
    return [Scalar()]
