"""Detection of commands that run another script, or a script's text.

In: the words of a command. Out: the index of the script's name or text. Left out: reading it (script.py).
"""

RUN_BY = {"sbatch": "COMMAND"}
"""Variables whose text a batch script runs, by the command that submits it: NeMo-RL's `ray.sub`."""
STARTERS = ("bash", "sh", "exec", "time", "nohup")
"""Words before the name of a script that is started."""


def find_text(words: list[str]) -> int | None:
    """Index of the text of `bash -c TEXT`, also after srun, docker or ssh; None without one.

    >>> find_text(["srun", "-N", "1", "bash", "-lc", "echo 1"]), find_text(["bash", "run.sh"])
    (5, None)
    """
    shells = (at for at, word in enumerate(words[:-2]) if word.rpartition("/")[2] in ("bash", "sh", "zsh"))
    flags = ((at + 1, words[at + 1]) for at in shells)
    return next((at + 1 for at, flag in flags if flag.startswith("-") and flag[1:].isalpha() and "c" in flag), None)


def find_scripts(words: list[str]) -> list[int]:
    """Indices where the name of another script may stand: first, or after words such as `bash` and their flags.

    >>> [find_scripts(line.split()) for line in ("nohup bash -x inner.sh 8", "./inner.sh", "echo a.sh")]
    [[3], [0], []]
    """
    at = next((at for at, word in enumerate(words) if word not in STARTERS and not word.startswith("-")), None)
    return [] if at is None or not (at or words[0].endswith(".sh")) else [at]
