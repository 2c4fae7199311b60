# rlplan on a CPU host, with the packages of requirements/cpu.lock. Not built where it was written: no container engine.
# docker build -t rlplan . && docker run --rm --shm-size=2g rlplan run examples/quickstart.yaml
# The digest pins the base; `docker buildx imagetools inspect python:3.12-slim-bookworm` shows the newest.
FROM python:3.12-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254

RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap g++ iproute2 make strace \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /rlplan
COPY requirements requirements
COPY pyproject.toml hatch_build.py Makefile README.md LICENSE ./
COPY rlplan rlplan
COPY cli cli
COPY hardware_profiles hardware_profiles
COPY examples examples
# As in the Makefile: --build-arg TORCH_PIP_FLAGS=... takes PyTorch's CPU build from PyTorch's own index.
ARG TORCH_PIP_FLAGS=
RUN make setup TORCH_PIP_FLAGS="$TORCH_PIP_FLAGS"

ENTRYPOINT [".venv/bin/rlplan"]
CMD ["doctor"]
