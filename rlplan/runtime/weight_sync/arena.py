"""The file behind the shared-memory transport: made and removed by the driver, which needs no torch for it."""

import os

SHARED_FOLDER = "/dev/shm"


def create_arena(path: str, num_bytes: int) -> None:
    """Make the shared file with all its pages. Raises: OSError when /dev/shm has too little room."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)
