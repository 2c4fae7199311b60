"""Traps: files that Python would run if it looked into their folder; each leaves a sign.

In: a folder. Out: the file that any of them makes.
"""

import json
import shutil
from pathlib import Path

TRAPS = (
    "sitecustomize.py",
    "usercustomize.py",
    "json.py",
    "torch.py",
    "transformers.py",
    "ray.py",
    "psutil.py",
    "rlplan/__init__.py",
    "deepspeed/__init__.py",
    "vllm/__init__.py",
    "evil.pth",
)


def set_traps(folder: Path) -> Path:
    """Lay all of them out; gives the file that shows that one was sprung, and which."""
    sprung = folder / "sprung"
    for name in TRAPS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"import sys; open({str(sprung)!r}, 'a').write({name + ' '!r} + repr(sys.argv))\n")
    return sprung


def trapped_model(source: Path, folder: Path) -> Path:
    """A copy of a model whose configurations name classes of its own; gives the file that shows their import."""
    shutil.copytree(source, folder)
    sprung = set_traps(folder)
    (folder / "evil.py").write_text((folder / "torch.py").read_text())
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoTokenizer")
    for file in ("config.json", "tokenizer_config.json"):
        data = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(data | {"auto_map": dict.fromkeys(names, "evil.Evil")}))
    return sprung
