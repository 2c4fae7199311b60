"""Fingerprints: digests of a plan's inputs, so that a run notices another model or another hardware profile.

In: the policy's folder and a hardware profile. Out: short SHA-256 digests, compared when a plan is run. Left out: most
bytes of the weights; files that do not define the model, such as notes or a trainer's state.

For a weight file, its name, size and evenly spaced pieces count. Training changes nearly every element, so that another
revision shows in the pieces, and a file of any size is read in milliseconds. A digest begins with the version of its
rule.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlplan.errors import SpecError
from rlplan.reading import open_regular
from rlplan.spec.base import Spec
from rlplan.spec.hardware.catalogue import find_profile
from rlplan.spec.hardware.profile import Profile
from rlplan.spec.job import JobSpec
from rlplan.spec.model_files import identifying_files
from rlplan.spec.models.headers import read_index

RULE = "v2:"
"""Prefix of a model's digest."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
READ_BYTES = 1 << 20
"""Bytes of a file held in memory at once."""
NUM_PIECES = 64
PIECE_BYTES = 4096
DIGEST_LENGTH = 16
"""Hexadecimal digits kept: 64 bits, which protect against mistakes, not against forgery."""


class Fingerprints(Spec):
    """Digests of a plan's inputs, which reveal later changes."""

    model: str
    """Digest of the policy's folder; empty if the folder did not exist."""
    profile: str
    """Digest of the hardware profile's values."""


def take_fingerprints(job: JobSpec) -> Fingerprints:
    """The digests of a job's policy and hardware profile. Raises: SpecError when a file cannot be read."""
    folder, profile = Path(job.policy.path), find_profile(job.hardware.profile, where="hardware.profile")
    model = model_fingerprint(folder) if folder.exists() else ""
    return Fingerprints(model=model, profile=profile_fingerprint(profile))


def profile_fingerprint(profile: Profile) -> str:
    """The digest of every value in a profile, regardless of the file it comes from."""
    return hashlib.sha256(profile.model_dump_json().encode()).hexdigest()[:DIGEST_LENGTH]


def model_fingerprint(folder: Path) -> str:
    """The digest of a model folder: complete configs, tokenizer and chat templates, and pieces of the weights."""
    digest = hashlib.sha256()
    with _explaining_files():
        for path in identifying_files(folder):
            digest.update(f"{path.as_posix()}\0{(folder / path).stat().st_size}\0".encode())
            _add_whole(digest, folder / path)
        for name in _weight_files(folder):
            _add_pieces(digest, folder / name)
    return RULE + digest.hexdigest()[:DIGEST_LENGTH]


def _weight_files(folder: Path) -> list[str]:
    """Names of the existing weight files that a model is loaded from. Raises: SpecError."""
    names = {WEIGHTS, *(read_index(folder / INDEX).values() if (folder / INDEX).is_file() else ())}
    return sorted(name for name in names if os.path.lexists(folder / name))


@contextmanager
def _explaining_files() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpecError(
            f"the model's files cannot be read: {error.strerror}",
            where=str(error.filename),
            rule="a readable Hugging Face folder",
            way_out="correct the file's permissions, or name another folder",
        ) from None


def _add_whole(digest: "hashlib._Hash", path: Path) -> None:
    with open_regular(path, path.name) as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)


def _add_pieces(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with open_regular(path, path.name) as file:
        for index in range(NUM_PIECES):
            # the last piece ends with the file; in a file shorter than a piece all of them are the whole file
            file.seek(index * max(0, size - PIECE_BYTES) // max(1, NUM_PIECES - 1))
            digest.update(file.read(PIECE_BYTES))
