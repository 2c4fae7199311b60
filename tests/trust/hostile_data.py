"""Hostile files by name for the readers of readers.py: profiles, data, tokenizers, logs, tracebacks, run folders."""

_YAML = {
    "as many keys as are read": "".join(f"a{n}: {n}\n" for n in range(10_400)),
    "as many elements as are read": "a: [" + "1," * 20_800 + "1]",
    "too many elements": "a: [" + "1," * 500_000 + "1]",
    "deep lists": "a: " + "[" * 1_000_000,
    "deep blocks": "".join(" " * n + "a:\n" for n in range(1_300)),
    "aliases": "a: &a [1]\nb: [" + "*a," * 200_000 + "*a]",
    "anchors": "a: [" + ",".join(f"&a{n} b" for n in range(90_000)) + "]",
    "escapes": 'a: "' + "\\x41" * 240_000 + '"',
    "surrogates": 'a: "' + "\\ud800" * 100_000 + '"',
    "a long number": "kind: " + "9" * 1_000_000,
    "a long exponent": "kind: 1e" + "9" * 1_000_000,
    "a folded block": "a: >\n" + "  b\n\n" * 180_000,
    "lines of one word": "a: b\n" + " c\n" * 300_000,
    "question marks": "? " * 500_000,
    "dashes": "- " * 500_000,
    "tags": "a: " + "!a " * 300_000,
    "directives": "%YAML 1.2\n" * 90_000,
}
_ROW = b'{"prompt": "1 + 1?", "answer": "2"}\n'
_ROWS = {
    "a deep row": b'{"prompt": ' + b"[" * 400_000 + b"]" * 400_000 + b"}\n",
    "many deep rows": (b'{"prompt": "a", "answer": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}\n") * 150,
    "a long number": b'{"prompt": "a", "answer": ' + b"9" * 1_000_000 + b"}\n",
    "long numbers": (b'{"prompt": "a", "answer": ' + b"9" * 4_300 + b"}\n") * 200,
    "many values": b'{"prompt": [' + b"0," * 500_000 + b"0]}\n",
    "empty objects": b'{"prompt": [' + b"{}," * 330_000 + b"{}]}\n",
    "many messages": b'{"prompt": ['
    + b'{"role":"user","content":"a"},' * 30_000
    + b'{"role":"user","content":"a"}]}\n',
    "equal keys": b"{" + b'"prompt": "a", ' * 60_000 + b'"answer": "b"}\n',
    "many keys": b"{" + b", ".join(b'"k%d": 1' % n for n in range(70_000)) + b', "prompt": "a"}\n',
    "a column for each row": b"".join(b'{"k%d": 1, "prompt": "a", "answer": "b"}\n' % n for n in range(20_000)),
    "surrogates": (b'{"prompt": "' + b"\\ud800" * 200 + b'", "answer": "b"}\n') * 800,
    "empty lines": b"\n" * 1_000_000 + _ROW,
    "rows without text": b'{"prompt": 1}\n' * 70_000,
    "a torn row": _ROW * 10 + b'{"prompt": "',
    "numbers that are none": b'{"prompt": "a", "answer": NaN}\n' * 30_000,
}
_TOKENIZERS = {
    "deep": b"[" * 1_000_000,
    "deep vocabulary": b'{"model": {"vocab": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    "pairs": b'{"model": {"vocab": [' + b'["a",0],' * 120_000 + b'["b",0]]}}',
    "lists for tokens": b'{"model": {"vocab": [' + b'[["a"],0],' * 90_000 + b'["b",0]]}}',
    "empty pairs": b'{"model": {"vocab": [' + b"[]," * 300_000 + b"[]]}}",
    "texts": b'{"model": {"vocab": [' + b'"ab",' * 190_000 + b'"a"]}}',
    "as many tokens as fit": b'{"model": {"vocab": {' + b",".join(b'"%d":%d' % (n, n) for n in range(60_000)) + b"}}}",
    "equal tokens": b'{"model": {"vocab": {' + b'"a": 1,' * 130_000 + b'"b": 2}}}',
    "a long id": b'{"model": {"vocab": {"a": ' + b"9" * 900_000 + b"}}}",
    "deep additions": b'{"model": {"vocab": {}}, "added_tokens": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "lists for additions": b'{"model": {"vocab": {}}, "added_tokens": [{"content": ["a"], "id": 1}]}',
    "many merges": b'{"model": {"vocab": {"a": 1}}, "merges": [' + b'"a b",' * 160_000 + b'"a b"]}',
    "no UTF-8": b"\xff" * 1_000_000,
}
_ENDS = {
    "a deep token": b'{"eos_token_id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "many tokens": b'{"eos_token_id": [' + b"1," * 300_000 + b"1]}",
    "a long token": b'{"eos_token_id": ' + b"9" * 4_300 + b"}",
    "tokens that are none": b'{"eos_token_id": [1e400, 2.0, -3, true]}',
}
_LINES = {
    "a deep line": b'{"step": 1, "a": ' + b"[" * 400_000 + b"]" * 400_000 + b"}\n",
    "many deep lines": (b'{"step": 1, "a": ' + b"[" * 900 + b"]" * 900 + b"}\n") * 500,
    "long numbers": (b'{"step": ' + b"9" * 4_000 + b', "timing_s/step": 1' + b"0" * 4_000 + b"}\n") * 100,
    "long names": (b'{"step": 1, "' + b"a" * 9_000 + b'": 1}\n') * 100,
    "other names in each line": b"".join(b'{"step": %d, "a%d": 1, "b%d": 2}\n' % (n, n, n) for n in range(25_000)),
    "many names": b'{"step": 1' + b"".join(b', "a%d": 1' % n for n in range(70_000)) + b"}\n",
    "equal steps": b'{"step": 1, "step_s": 2}\n' * 40_000,
    "falling steps": b"".join(b'{"step": %d, "step_s": 2}\n' % n for n in range(30_000, 0, -1)),
    "equal names": b"{" + b'"step": 1, ' * 90_000 + b'"step_s": 2}\n',
    "histograms": (b'{"_step": 1, "_runtime": 2, "x": {"_type": "histogram", "bins": [' + b"1," * 900 + b"1]}}\n")
    * 400,
    "numbers that are none": b'{"step": NaN, "step_s": -Infinity}\n' * 20_000,
    "escapes": b'{"step": 1, "' + b"\\u0061" * 150_000 + b'": 1}\n',
    "zeros": b"\0" * 1_000_000,
}
_TABLES = {
    "runs of an export": b"Step,"
    + b",".join(b'"run%d - timing_s/step"' % n for n in range(9_000))
    + b"\n"
    + b"9," * 8_999,
    "quotes": b'"Step","' + b'""' * 300_000 + b'"\n1,2\n',
    "lines in a cell": b'step,a\n1,"' + b"\n" * 120_000 + b'"\n',
    "equal columns": b"step" + b",timing_s/step" * 60_000 + b"\n",
    "many rows": b"step,timing_s/step\n" + b"1,2\n" * 200_000,
}
_STATES = {
    "deep": b'{"log_history": ' + b"[" * 900_000,
    "many steps": b'{"log_history": [' + b",".join([b'{"step": 1, "step_time": 5.0}'] * 30_000) + b"]}",
    "many names": b'{"log_history": [{"step": 1' + b"".join(b', "a%d": 1' % n for n in range(70_000)) + b"}]}",
    "a long step": b'{"log_history": [{"step": 1' + b"0" * 4_299 + b', "step_time": 5.0}]}',
}
_LOST = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 18.55 GiB. "
_TRACEBACKS = {
    "frames": b'File "a.py", line 9, in f\n' * 40_000 + _LOST,
    "causes": (_LOST + b"\n\nDuring handling of the above exception, another exception occurred:\n\n") * 7_000,
    "a long frame": b'File "' + b"a" * 900_000 + b'", line 9, in f\n' + _LOST,
    "digits": b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate " + b"1" * 900_000 + b" GiB.",
    "spaces": b"CUDA out of memory." + b" " * 900_000 + b"Tried to allocate 1 GiB",
    "processes": _LOST
    + b"GPU 0 has a total capacity of 79.10 GiB. "
    + b"Process 7 has 75.90 GiB memory in use. " * 25_000,
    "groups": b"  + Exception Group Traceback (most recent call last):\n  | " * 16_000 + _LOST,
    "units": b"Tried to allocate 1e999 PiB. GPU 0 has a total capacity of nan GiB of which -1 GiB is free." * 9_000,
    "marks": b"    " + b"^" * 900_000 + b"\n" + _LOST,
}
_RUN_FILES = ("trace.jsonl", "metrics.jsonl", "timings.jsonl")
DATA: dict[str, tuple[str, str, bytes]] = {
    **{f"profile: {name}": ("profile", "cpu-host.yaml", text.encode()) for name, text in _YAML.items()},
    **{f"job: {name}": ("job", "job.yaml", text.encode()) for name, text in _YAML.items()},
    **{f"rows: {name}": ("data: lines", "rows.jsonl", data) for name, data in _ROWS.items()},
    **{f"tokens: {name}": ("tokens", "tokenizer.json", data) for name, data in _TOKENIZERS.items()},
    **{f"{file}: {name}": (f"run: {file}", file, data) for file in _RUN_FILES for name, data in _LINES.items()},
    **{f"status: {name}": ("run: status.json", "status.json", data) for name, data in _LINES.items()},
    **{f"log: {name}": ("log: rows", "log.jsonl", data) for name, data in _LINES.items()},
    **{f"table: {name}": ("log: CSV", "log.csv", data) for name, data in _TABLES.items()},
    **{f"state: {name}": ("log: a trainer's state", "trainer_state.json", data) for name, data in _STATES.items()},
    **{f"traceback: {name}": ("traceback", "run.err", data) for name, data in _TRACEBACKS.items()},
    **{f"ends: {name}": ("ends", "generation_config.json", data) for name, data in _ENDS.items()},
}
"""Name of the reader in tests/trust/readers.py, name of the file, and its bytes, at most about 1 MiB."""
