"""Fingerprints: what a plan was made from, so that a run can tell another model or another machine's profile.

In: the policy's folder and a hardware profile. Out: short SHA-256 digests, compared when a plan is run.
Left out: every byte of the weights. Of each file of weights its name, its size and evenly spaced pieces count: training
changes nearly every element, so another revision shows in them, and a file of any size is read in milliseconds.
"""

import hashlib
from pathlib import Path

from rlplan.errors import SpecError
from rlplan.reading import opened, read_bytes
from rlplan.spec.base import Spec
from rlplan.spec.hardware.catalogue import find_profile
from rlplan.spec.hardware.profile import Profile
from rlplan.spec.job import JobSpec
from rlplan.spec.model_files import tokenizer_files

MAX_READ_BYTES = 1 << 26
"""Most bytes of a file that is read whole: the largest, tokenizers, have some 40 MB."""

NUM_PIECES = 64
PIECE_BYTES = 4096
DIGEST_LENGTH = 16
"""Hexadecimal digits that are kept: 64 bits, against mistakes and not against forgers."""


class Fingerprints(Spec):
    """Digests of what a plan was made for, to notice that it changed since."""

    model: str
    """Of the policy's folder; empty where it was not there."""
    profile: str
    """Of the hardware profile's values."""


def take_fingerprints(job: JobSpec) -> Fingerprints:
    """Of a job's policy and of its profile. Raises: SpecError when a file cannot be read."""
    folder, profile = Path(job.policy.path), find_profile(job.hardware.profile, where="hardware.profile")
    model = model_fingerprint(folder) if folder.exists() else ""
    return Fingerprints(model=model, profile=profile_fingerprint(profile))


def profile_fingerprint(profile: Profile) -> str:
    """Of every value in a profile, whatever file it stands in."""
    return hashlib.sha256(profile.model_dump_json().encode()).hexdigest()[:DIGEST_LENGTH]


def model_fingerprint(folder: Path) -> str:
    """Of a model folder: its configs, its tokenizer and its chat templates whole, its weights by pieces."""
    digest = hashlib.sha256()
    try:
        for name in map(str, (Path("config.json"), *tokenizer_files(folder))):
            if (folder / name).is_file():
                digest.update(f"{name}\0".encode() + read_bytes(folder / name, name, limit=MAX_READ_BYTES))
        for path in sorted(folder.glob("*.safetensors")):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            _add_pieces(digest, path)
    except OSError as error:
        raise SpecError(
            f"the model's files cannot be read: {error.strerror}",
            where=str(error.filename),
            rule="a readable Hugging Face folder",
            way_out="mend the file's permissions, or name another folder",
        ) from None
    return digest.hexdigest()[:DIGEST_LENGTH]


def _add_pieces(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    with opened(path, path.name) as file:
        for index in range(NUM_PIECES):
            file.seek(index * max(0, size - PIECE_BYTES) // max(1, NUM_PIECES - 1))
            digest.update(file.read(PIECE_BYTES))
