"""The shared arena carries every parameter unchanged, through buckets that are reused."""

from pathlib import Path

import pytest
import torch

from rlplan.memory.transitions import plan_buckets, staging_bytes
from rlplan.runtime.weight_sync.arena import SHARED_FOLDER, create_arena
from rlplan.runtime.weight_sync.shared_memory import BucketReader, BucketWriter
from tests.factories import make_model


@pytest.fixture
def arena_path(tmp_path: Path):  # type: ignore[no-untyped-def]
    path = Path(SHARED_FOLDER) / f"rlplan-test-{tmp_path.name}"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("bucket_bytes", [1, 100_000, 1 << 30])
def test_what_is_written_is_what_is_read_bit_for_bit(arena_path: Path, bucket_bytes: int) -> None:
    model = make_model()
    parameters = {p.name: torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
                  for i, p in enumerate(model.parameters)}  # fmt: skip
    buckets = plan_buckets(model.parameters, 4, bucket_bytes)
    create_arena(str(arena_path), staging_bytes(buckets))
    writer, reader = (kind(str(arena_path), staging_bytes(buckets)) for kind in (BucketWriter, BucketReader))
    arena_path.unlink()  # both sides have it mapped
    seen = {}
    for bucket in buckets:
        writer.write(bucket, parameters)
        seen |= {name: tensor.clone() for name, tensor in reader.read(bucket, torch.float32)}
    assert list(seen) == list(parameters)
    assert all(torch.equal(seen[name], parameters[name]) for name in parameters)
    writer.close()
    reader.close()
    reader.close()


def test_an_arena_is_never_laid_over_another(arena_path: Path) -> None:
    create_arena(str(arena_path), 4096)
    with pytest.raises(FileExistsError):
        create_arena(str(arena_path), 4096)
